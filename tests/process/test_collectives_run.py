"""One script with a synchronous rule, under every launcher: the same numbers, and an end without leave()."""

import json
import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import require
from tests.contract.collectives_ranks import find_mpiexec
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]

# Worker r makes 3 + r steps; each subtracts the mean of what those give who are still there.
SCRIPT = """
import numpy as np

import maniple

worker = maniple.join()
w = {"w": np.full(4, float(worker.rank))}
replica = worker.share(w, rule=maniple.BSP())
begin = w["w"][0]
for _ in range(3 + worker.rank):
    gradients = {"w": np.full(4, worker.rank + 1.0)}
    replica.reduce(gradients)
    w["w"] -= gradients["w"]
    replica.step()
print(f"[{worker.rank}/{worker.world} from {begin:.0f} by {w['w'][0] - begin:.6f}]", flush=True)
"""


def expected(rank: int, world: int) -> float:
    value = 0.0
    for step in range(3 + rank):
        there = [r + 1 for r in range(world) if step < 3 + r]
        value -= sum(there) / len(there)
    return value


def assert_numbers(output: str, world: int) -> None:
    """All began with the values of one worker, whoever came first, and went on as they should."""
    found = re.findall(r"\[(\d+)/(\d+) from (\d) by (\S+)\]", output)
    assert len({begin for *_, begin, _ in found}) == 1, output
    made = sorted((int(rank), int(size), by) for rank, size, _, by in found)
    assert made == [(rank, world, f"{expected(rank, world):.6f}") for rank in range(world)], output


def called(tmp_path: Path, *command: str) -> str:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_maniple_run_gives_torch_collectives_a_rendezvous(run):
    require("torch", find_spec("torch") is not None, "no torch")
    going = run(SCRIPT, "-n", "3", "--collectives", "torch", "--collectives-deadline", "60")
    assert going.process.returncode == 0, going.output
    assert going.description["asked"]["collectives"] == "torch"
    assert_numbers("".join(going.log(rank) for rank in range(3)), 3)


# Stands in for GPUs: the model says that it lies there, and is carried by Gloo.
ON_GPUS = """
import maniple.worker.collective_groups
from maniple.adapters.numpy_arrays import NumpyAdapter
import maniple.worker.worker
from maniple.adapters import adapt
from maniple.collectives.torch_distributed import TorchCollectives
from maniple.collectives.peer_to_peer import PeerToPeer

NumpyAdapter.device = property(lambda model: f"cuda:{worker.rank if DIFFER else 0}")
maniple.worker.collective_groups.gpu_of = lambda device: (device, "")
TorchCollectives.reside = lambda self, sizes, wire, device: PeerToPeer.reside(self, sizes, wire=wire)
"""


@pytest.mark.parametrize(
    ("differ", "options", "engine", "words"),
    [
        (True, (), "torch", "2 workers use torch collectives"),
        (False, (), "shared", "workers 0 and 1 share one GPU (cuda:0), which NCCL refuses"),
        (True, ("--restarts", "1"), "shared", "with --restarts 1 workers may come back, whom NCCL cannot take in"),
    ],
    ids=["own GPUs", "one GPU", "restarts"],
)
def test_gradients_on_gpus_of_one_machine_are_reduced_over_nccl_where_possible(run, differ, options, engine, words):
    require("torch", find_spec("torch") is not None, "no torch")
    done = run(ON_GPUS.replace("DIFFER", str(differ)) + SCRIPT, "-n", "2", *options)
    assert done.process.returncode == 0, done.output
    assert words in done.output
    assert [row["engine"] for rank in (0, 1) for row in done.events(rank, "circle")] == [engine, engine]
    assert_numbers(done.output, 2)


def test_torchrun_starts_collectives_without_changes(tmp_path, monkeypatch):
    require("torch", find_spec("torch") is not None, "no torch")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    monkeypatch.setenv("MANIPLE_COLLECTIVES", "torch")
    said = called(tmp_path, *torchrun, "train.py")
    assert "2 workers use torch collectives (torchrun)" in said
    assert_numbers(said, 2)


def test_mpiexec_starts_collectives_without_changes(tmp_path):
    launcher = find_mpiexec()
    require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
    said = called(tmp_path, str(launcher), "-n", "4", sys.executable, "train.py")
    assert "4 workers use shared collectives (mpirun)" in said
    assert_numbers(said, 4)
    (last,) = (tmp_path / "runs").glob("mpirun-*")
    assert json.loads((last / "run.json").read_text())["exit_code"] == 0


def test_without_a_host_there_are_collectives_but_no_center(tmp_path, monkeypatch):
    launcher = find_mpiexec()
    require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
    monkeypatch.setenv("MANIPLE_CENTER", "none")
    said = called(tmp_path, str(launcher), "-n", "2", sys.executable, "train.py")
    assert "2 workers use mpi collectives" in said
    assert_numbers(said, 2)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "train.py").write_text(SCRIPT.replace("BSP", "EASGD"))
    env = os.environ | {"PMI_RANK": "0", "PMI_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode != 0
    assert "MANIPLE_CENTER=none gives these" in done.stderr
