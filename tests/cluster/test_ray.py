"""`maniple submit --ray` on a real Ray cluster: workers are placed as actors, and a lost one is placed again."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from maniple.record import Row, read_events
from tests.cluster.slurm import Cluster
from tests.doctoring import Findings, assert_found, grave, read
from tests.process.conftest import await_
from tests.unit.engines import engine

TRAINING = """
import os, time, numpy as np, maniple
worker = maniple.join()
params = {"w": np.zeros(1000)}
replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
print("here", worker.rank, worker.world, worker.local_world, os.environ["OMP_NUM_THREADS"], flush=True)
for index in worker.sampler(range(1200)):
    params["w"] += 1
    replica.step()
    time.sleep(0.02)
"""


@pytest.fixture
def ray(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cluster of one machine, inside one of the tests' own, so that it listens to nobody else."""
    engine("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("HOME", str(tmp_path))  # it keeps its token there
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie in it
    head = cluster.start(
        1, Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2",
        "--include-dashboard=false", "--object-store-memory=100000000", f"--node-ip-address={cluster.address(1)}",
        f"--temp-dir={folder}", folder=tmp_path, output=tmp_path / "ray",
    )  # fmt: skip
    try:
        await_(lambda: "Ray runtime started" in (tmp_path / "ray").read_text(), timeout_s=120)
        yield
    finally:
        cluster.off(1)  # whatever Ray has started
        head.wait(30)
        cluster.boot(1)
        shutil.rmtree(folder, ignore_errors=True)


def doctor(cluster: Cluster, node: int, address: str, *asked: str, folder: Path) -> Findings:
    command = (sys.executable, "-m", "maniple.cli", "doctor", "--json", "--ray", "--ray-address", address, *asked)
    return read(cluster.on(node, *command, folder=folder, check=False))


@pytest.mark.usefixtures("ray")
def test_workers_are_placed_by_ray_and_a_lost_one_again(cluster: Cluster, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    found = doctor(cluster, 1, f"{cluster.address(1)}:6379", "-n", "3", "--gpus-per-worker", "0", folder=tmp_path)
    assert grave(found) == set(), found
    assert_found(found, "ray", "ok", "Ray answers: 1 node, 2 CPUs, 0 GPUs")
    assert_found(found, "resources", "warning", "2 fit at a time", "-n 3", "--cpus-per-worker")
    run = cluster.start(
        1, sys.executable, "-m", "maniple.cli", "submit", "--ray", "-n", "2", "--restarts", "1", "--max-epochs", "1",
        "--name", "one", "--ray-address", f"{cluster.address(1)}:6379", "train.py", folder=tmp_path,
        output=tmp_path / "output",
    )  # fmt: skip
    folder = tmp_path / "runs" / "one"

    def rows(who: str, event: str) -> list[Row]:
        path = folder / "events" / f"{who}.jsonl"
        return [row for row in read_events(path) if row["event"] == event] if path.exists() else []

    def is_training(rank: int) -> bool:
        assert run.poll() is None, (tmp_path / "output").read_text()
        return len(rows(f"worker-{rank}", "exchange")) > 3

    await_(lambda: is_training(0) and is_training(1), timeout_s=120)
    cluster.on(1, "pkill", "-9", "-n", "-f", "ray::Carrier")  # with its actor, a worker is gone
    assert run.wait(180) == 0, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    assert "restart 1 of 1" in said
    assert sum(len(rows(f"worker-{rank}", "join")) for rank in range(2)) == 3
    assert "here 0 2 1 1" in (folder / "logs" / "worker-0.log").read_text()
    center = load_file(folder / "center" / "center-0.safetensors")["w"]
    assert center.min() == center.max() >= 1200, "a sample was lost"


def test_without_a_cluster_or_with_what_is_for_slurm_it_says_what_to_do(cluster: Cluster, tmp_path: Path):
    engine("ray")
    (tmp_path / "train.py").write_text(TRAINING)
    submit = (sys.executable, "-m", "maniple.cli", "submit", "--ray", "-n", "2")
    nowhere = cluster.on(2, *submit, "--ray-address", "127.0.0.1:1", "train.py", folder=tmp_path, check=False)
    assert "there is no Ray cluster at '127.0.0.1:1'" in nowhere
    found = doctor(cluster, 2, "127.0.0.1:1", folder=tmp_path)
    assert grave(found) == {"ray"}
    assert "there is no Ray cluster at '127.0.0.1:1'" in found[0]["seen"]
    assert not list(cluster.memory(2).iterdir())
    assert not (tmp_path / "runs").exists()
    assert "--walltime: that is not for --ray" in cluster.on(
        2, *submit, "--walltime", "3:00", "train.py", folder=tmp_path, check=False
    )
