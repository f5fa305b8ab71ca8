"""`maniple submit --ray` on a real Ray cluster: workers are placed as actors, and a lost one is placed again."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from maniple.record import Row, read_events
from tests.cluster.slurm import Cluster
from tests.doctoring import Findings, assert_found, grave, read
from tests.unit.engines import engine
from tests.waiting import PATIENCE_S, await_

TRAINING = """
import os, sys, time, numpy as np, maniple
worker = maniple.join()
params = {"w": np.zeros(1000)}
replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
print("here", worker.rank, worker.world, worker.local_world, os.environ["OMP_NUM_THREADS"], flush=True)
for index in worker.sampler(int(sys.argv[1])):
    params["w"] += 1
    replica.step()
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def ray(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of one machine, inside one of the tests' own, so that it listens to nobody else."""
    engine("ray")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("HOME", str(home))  # it keeps its token there
        patch.delenv("RAY_ADDRESS", raising=False)
        yield from _headed(cluster, home)


def _headed(cluster: Cluster, home: Path) -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie in it
    head = cluster.start(
        1, Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=3",
        "--include-dashboard=false", "--object-store-memory=100000000", f"--node-ip-address={cluster.address(1)}",
        f"--temp-dir={folder}", folder=home, output=home / "ray",
    )  # fmt: skip
    try:
        await_(lambda: "Ray runtime started" in (home / "ray").read_text(), timeout_s=120)
        yield
    finally:
        cluster.off(1)  # whatever Ray has started
        head.wait(30)
        cluster.boot(1)
        shutil.rmtree(folder, ignore_errors=True)


def doctor(cluster: Cluster, node: int, address: str, *asked: str, folder: Path) -> Findings:
    command = (sys.executable, "-m", "maniple.cli", "doctor", "--json", "--ray", "--ray-address", address, *asked)
    return read(cluster.on(node, *command, folder=folder, check=False))


class Submitted:
    """A run on the Ray cluster."""

    def __init__(
        self, cluster: Cluster, folder: Path, name: str, *options: str, workers: int = 2, samples: int
    ) -> None:
        (folder / "train.py").write_text(TRAINING)
        self.workers, self.folder, self.output = workers, folder / "runs" / name, folder / f"{name}.output"
        self.process = cluster.start(
            1, sys.executable, "-m", "maniple.cli", "submit", "--ray", "-n", str(workers), "--max-epochs", "1",
            "--name", name, "--ray-address", f"{cluster.address(1)}:6379", *options, "train.py", str(samples),
            folder=folder, output=self.output,
        )  # fmt: skip

    def await_training(self) -> None:
        await_(lambda: all(map(self._is_training, range(self.workers))), timeout_s=120)

    def rows(self, who: str, event: str) -> list[Row]:
        path = self.folder / "events" / f"{who}.jsonl"
        return [row for row in read_events(path) if row["event"] == event] if path.exists() else []

    def _is_training(self, rank: int) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        return len(self.rows(f"worker-{rank}", "exchange")) > 3


@pytest.mark.usefixtures("ray")
def test_workers_are_placed_by_ray_and_a_lost_one_again(cluster: Cluster, tmp_path: Path):
    found = doctor(cluster, 1, f"{cluster.address(1)}:6379", "-n", "4", "--gpus-per-worker", "0", folder=tmp_path)
    assert grave(found) == set(), found
    assert_found(found, "ray", "ok", "Ray answers: 1 node, 3 CPUs, 0 GPUs")
    assert_found(found, "resources", "warning", "3 fit at a time", "-n 4", "--cpus-per-worker")
    run = Submitted(cluster, tmp_path, "one", "--restarts", "1", samples=800)
    run.await_training()
    cluster.on(1, "pkill", "-9", "-n", "-f", "ray::WorkerActor")  # with its actor, a worker is gone
    assert run.process.wait(180) == 0, run.output.read_text()
    assert "restart 1 of 1" in run.output.read_text()
    assert sum(len(run.rows(f"worker-{rank}", "join")) for rank in range(2)) == 3
    assert "here 0 2 1 1" in (run.folder / "logs" / "worker-0.log").read_text()
    center = load_file(run.folder / "center" / "center-0.safetensors")["w"]
    assert center.min() == center.max() >= 800, "a sample was lost"


@pytest.mark.usefixtures("ray")
def test_nothing_stays_on_the_cluster_when_the_command_is_ended(cluster: Cluster, tmp_path: Path):
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    runs = [Submitted(cluster, tmp_path, number.name, workers=1, samples=100_000) for number in signals]
    for run, number in zip(runs, signals, strict=True):
        run.await_training()
        cluster.signal(run.process, number)
    for run in runs[:2]:
        assert run.process.wait(PATIENCE_S) == 130, run.output.read_text()
        assert load_file(run.folder / "center" / "center-0.safetensors")["w"].min() > 0, "the center is saved"
    runs[2].process.wait(PATIENCE_S)
    await_(lambda: not cluster.on(1, "pgrep", "-f", "train.py|ray::WorkerActor", check=False))
    assert len(list(cluster.memory(1).glob("maniple-*"))) == 1, "what was killed is saved by the next run there"


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
