"""`maniple submit` on a real Slurm: an array that trains one model, whatever becomes of its tasks and of its host.

Each worker adds 1 to `seen[i]` when it trains on sample i, and says so in a file before. Downpour's center is the sum
of what all have added, so a contribution that is lost or counted twice shows.
"""

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.record import Row, read_events
from tests.cluster.slurm import HOSTS, Cluster
from tests.waiting import await_

pytestmark = pytest.mark.usefixtures("without_numba")

MANIPLE = str(Path(sys.executable).with_name("maniple"))
PATIENCE_S = 120.0  # only against hanging
SAMPLES, EPOCHS, BATCH, CHUNK = 4000, 3, 10, 50
SCRIPT = f"""
    import os, sys, time
    from pathlib import Path

    import numpy as np

    import maniple

    def data():
        x = np.random.default_rng(0).normal(size=({SAMPLES}, 4))
        return x, x @ np.array([1.0, -2.0, 3.0, 0.5])

    x, y = data()
    params = {{"w": np.zeros(4), "seen": np.zeros({SAMPLES})}}
    worker = maniple.join()
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(2))
    worker.log(begin=float(np.abs(params["w"]).sum()), task=sys.argv[1], threads=os.environ["OMP_NUM_THREADS"])
    sampler = worker.sampler({SAMPLES}, balance=True, chunk={CHUNK})
    taken = Path(f"taken-{{worker.rank}}-{{os.getpid()}}-{{time.time_ns()}}").open("w", buffering=1)
    for epoch in range(int(sys.argv[2])):
        for batch in sampler.batches({BATCH}):
            taken.write(" ".join(map(str, [epoch, *batch])) + "\\n")
            params["w"] -= 0.01 * x[batch].T @ (x[batch] @ params["w"] - y[batch]) / len(batch)
            params["seen"][batch] += 1
            replica.step()
            if not Path("quick").exists():
                time.sleep(0.25)
    print("all epochs are done")
"""


class Submitted:
    """A call of `maniple submit` on h0, and the run that it began."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self.folder, self.run = cluster, folder, folder / "runs" / "run"
        (folder / "script.py").write_text(textwrap.dedent(SCRIPT))

    def command(self, *options: str, epochs: int = EPOCHS) -> list[str]:
        words = ["--name", "run", *options, "script.py", "part-{rank}", str(epochs)]
        return [MANIPLE, "submit", "--slurm", *words]

    def start(self, *options: str, **rest: int) -> subprocess.Popen[str]:
        command = self.command(*options, **rest)
        return self._cluster.start(0, *command, folder=self.folder, output=self.folder / "output")

    def call(self, *words: str) -> str:
        return self._cluster.on(0, MANIPLE, *words, folder=self.folder)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def jobs(self) -> dict[str, str]:
        path = self.run / "submit.json"
        return json.loads(path.read_text())["jobs"] if path.exists() else {}

    def rows(self, who: int | str, *kinds: str) -> list[Row]:
        path = self.run / "events" / f"{who if isinstance(who, str) else f'worker-{who}'}.jsonl"
        return [row for row in (read_events(path) if path.exists() else []) if row["event"] in kinds]

    def await_rows(self, who: int | str, kind: str, count: int = 1) -> list[Row]:
        return await_(lambda: len(rows := self.rows(who, kind)) >= count and rows, PATIENCE_S)

    def taken(self) -> list[tuple[int, int]]:
        """Epoch and sample of all that was trained on."""
        found = []
        for path in self.folder.glob("taken-*"):
            for line in path.read_text().splitlines():
                epoch, *samples = map(int, line.split())
                found += [(epoch, sample) for sample in samples]
        return found

    def center(self) -> dict[str, np.ndarray]:
        return load_file(self.run / "center" / "center-0.safetensors")

    def assert_accounted(self, lost: int = 0) -> Counter[tuple[int, int]]:
        """The center has what each worker has done, exactly; but for `lost` samples at most, of one that died."""
        taken = self.taken()
        times = np.bincount([sample for _, sample in taken], minlength=SAMPLES)
        seen = self.center()["seen"]
        assert (seen <= times).all(), f"{(seen - times)[seen > times].sum()} twice"
        assert (times - seen).sum() <= lost, f"{(times - seen).sum()} lost"
        return Counter(taken)


@pytest.fixture
def submitted(cluster: Cluster, tmp_path: Path):
    yield Submitted(cluster, tmp_path)
    cluster.clear()
    for host in range(HOSTS + 1):
        left = list(cluster.memory(host).iterdir())
        assert not left, f"in the memory of h{host}: {left}"


def queue(cluster: Cluster) -> str:
    return cluster.on(0, "squeue", "-h", "-r", "-o", "%i %T")


def test_an_array_trains_one_model_though_tasks_are_cancelled_requeued_and_out_of_time(
    cluster: Cluster, submitted: Submitted
):
    going = submitted.start("-n", "8", "--max-simultaneous", "3", "--walltime", "2:00:00", "--max-epochs", str(EPOCHS))
    for task in range(3):
        submitted.await_rows(task, "exchange", 2)
    job = submitted.jobs()["workers"]
    assert queue(cluster).count("RUNNING") == 3

    cluster.on(0, "scontrol", "update", f"jobid={job}_2", "TimeLimit=1")  # it is warned a minute before: now
    cluster.on(0, "scancel", f"{job}_0")
    submitted.await_rows(0, "leave")
    cluster.on(0, "scontrol", "requeue", f"{job}_1")
    submitted.await_rows(1, "leave")
    for late in (3, 4):
        assert submitted.await_rows(late, "log")[0]["begin"] > 0, "it starts from the center"
    submitted.await_rows(2, "leave")
    assert "training" in (status := submitted.call("status", "runs/run")) and "alive on h0" in status, status

    (submitted.folder / "quick").touch()
    assert going.wait(PATIENCE_S) == 0, submitted.output
    assert queue(cluster) == ""
    assert len(submitted.rows(1, "join")) == 2 and submitted.rows("server", "restarted")[0]["worker"] == 1
    states = cluster.on(0, "squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%K %T")
    assert "0 CANCELLED" in states and states.count("COMPLETED") == 7, "also the one whose time was over"
    assert (submitted.run / "logs" / "worker-7.log").read_text().count("all epochs are done") == 1
    assert submitted.rows(5, "log")[0]["task"] == "part-5"

    times = submitted.assert_accounted()
    assert set(times) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)}
    assert sum(times.values()) - len(times) <= 3 * 2 * CHUNK, "of those who left, only leases not finished came again"
    assert np.abs(submitted.center()["w"] - [1, -2, 3, 0.5]).max() < 0.05
    assert "has ended with exit code 0" in submitted.call("status", "runs/run")


def test_a_host_in_the_queue_is_preempted_comes_back_elsewhere_and_is_stopped(cluster: Cluster, submitted: Submitted):
    options = ("-n", "2", "--host-job", "--sbatch", "--exclude=h1")
    said = cluster.on(0, *submitted.command(*options), folder=submitted.folder)
    jobs = submitted.jobs()
    assert f"job {jobs['host']}: the host" in said
    for task in range(2):
        submitted.await_rows(task, "exchange", 2)
    assert "alive on h1" in submitted.call("status", "runs/run")
    assert_token_is_nowhere(cluster, submitted)

    cluster.on(0, "sbatch", "--partition=urgent", "-w", "h1", "--cpus-per-task=4", "--wrap", "sleep 600")
    submitted.await_rows("host", "start", 2)
    exchanges = [len(submitted.rows(task, "exchange")) for task in range(2)]
    for task in range(2):
        submitted.await_rows(task, "exchange", exchanges[task] + 2)
    status = submitted.call("status", "runs/run")
    assert "alive on h2" in status and f"{jobs['host']} (host): 1 running on h2" in status, status
    starts = submitted.rows("host", "start")
    assert starts[0]["lineage"] == starts[1]["lineage"] and starts[1]["restored"] == 1
    assert "nothing was lost" in (submitted.run / "logs" / "host.log").read_text()

    cluster.on(0, "scancel", "--signal=USR1", "--batch", jobs["host"])  # as Slurm does before the walltime
    submitted.await_rows("host", "start", 3)
    exchanges = [len(submitted.rows(task, "exchange")) for task in range(2)]
    for task in range(2):
        submitted.await_rows(task, "exchange", exchanges[task] + 2)

    posted = json.loads((submitted.run / "host.json").read_text())
    cluster.on(int(posted["node"][1:]), "kill", "-9", str(posted["pid"]))  # for want of memory, say
    submitted.await_rows("host", "adopted")
    exchanges = [len(submitted.rows(task, "exchange")) for task in range(2)]
    for task in range(2):
        submitted.await_rows(task, "exchange", exchanges[task] + 2)

    assert "no job is in the queue" in submitted.call("stop", "runs/run")
    assert "run" not in cluster.on(0, "squeue", "-h", "-o", "%j"), "only the urgent job is left"
    submitted.assert_accounted()
    assert "has ended with exit code 0" in submitted.call("status", "runs/run")


def assert_token_is_nowhere(cluster: Cluster, submitted: Submitted) -> None:
    """But in its file, which only its owner can read."""
    token = (submitted.run / "token").read_text().strip()
    assert (submitted.run / "token").stat().st_mode & 0o777 == 0o600
    files = [path for path in submitted.run.rglob("*") if path.is_file() and path.name != "token"]
    assert not [path for path in files if token.encode() in path.read_bytes()]
    for job in submitted.jobs().values():
        assert token not in cluster.on(0, "scontrol", "show", "job", "-dd", job)
        assert token not in cluster.on(0, "scontrol", "write", "batch_script", job, "-")
    assert token not in cluster.on(0, "sh", "-c", f"grep -rsl {token} {cluster.folder}/state || true")
    for host in range(HOSTS + 1):
        assert token not in cluster.on(host, "ps", "-ef")


def test_ctrl_c_cancels_queued_and_running_tasks_and_saves_the_center(cluster: Cluster, submitted: Submitted):
    """Also if a node was powered off before: the next task takes the place of its task, which is queued again."""
    going = submitted.start("-n", "4", "--max-simultaneous", "2", "--cpus-per-worker", "4")
    for task in range(2):
        submitted.await_rows(task, "exchange", 2)
    node = cluster.on(0, "squeue", "-h", "-j", f"{submitted.jobs()['workers']}_1", "-o", "%N").strip()
    with powered_off(cluster, node):
        submitted.await_rows(2, "exchange", 2)
        assert f"{submitted.jobs()['workers']}_1 PENDING" in queue(cluster)
        cluster.signal(going, signal.SIGINT)
        assert going.wait(PATIENCE_S) == 130, submitted.output
        assert queue(cluster) == ""
    assert [bool(submitted.rows(task, "leave")) for task in range(3)] == [True, False, True], "their last exchange"
    assert not submitted.rows(3, "join")
    submitted.assert_accounted(lost=4 * BATCH)


@contextmanager
def powered_off(cluster: Cluster, node: str) -> Iterator[None]:
    """Slurm would find out by itself, after its SlurmdTimeout."""
    cluster.off(int(node[1:]))
    cluster.on(0, "scontrol", "update", f"nodename={node}", "state=down", "reason=off")
    try:
        yield
    finally:
        cluster.boot(int(node[1:]))
        cluster.on(0, "scontrol", "update", f"nodename={node}", "state=resume", check=False)  # or it came by itself


def test_workers_of_a_host_that_was_killed_find_its_successor_and_are_stopped(cluster: Cluster, submitted: Submitted):
    going = submitted.start("-n", "3", "--max-simultaneous", "2")
    for task in range(2):
        submitted.await_rows(task, "exchange", 2)
    cluster.signal(going, signal.SIGKILL)
    going.wait(PATIENCE_S)
    assert re.search("does not answer|is dead", submitted.call("status", "runs/run"))
    serve = ("serve", "--listen", "0.0.0.0:0", "--resume", "runs/run")
    successor = cluster.start(0, MANIPLE, *serve, folder=submitted.folder, output=submitted.folder / "successor")
    # A worker that is ordered to end while its host is away waits for it for a while only.
    exchanges = len(submitted.rows(0, "exchange"))
    submitted.await_rows(0, "exchange", exchanges + 2)
    cluster.on(0, "scancel", f"{submitted.jobs()['workers']}_0")  # so that the third starts, and finds it too
    submitted.await_rows(2, "exchange", 2)
    assert "no job is in the queue" in submitted.call("stop", "runs/run")
    assert successor.wait(PATIENCE_S) == 0
    assert queue(cluster) == ""
    submitted.assert_accounted()


def test_a_task_that_fails_is_reported_with_its_last_lines(cluster: Cluster, tmp_path: Path):
    """In a folder whose name needs care."""
    (tmp_path / 'it\'s #1, 50% "done"').mkdir()
    submitted = Submitted(cluster, tmp_path / 'it\'s #1, 50% "done"')
    script = submitted.folder / "script.py"
    script.write_text(
        "import maniple, sys\nworker = maniple.join()\nif worker.rank == 1:\n    raise ValueError('mine')\n"
    )
    going = submitted.start("-n", "2")
    assert going.wait(PATIENCE_S) == 1, submitted.output
    assert "1 task failed: 1" in submitted.output
    assert "ValueError: mine" in submitted.output
    assert json.loads((submitted.run / "run.json").read_text())["exit_code"] == 1
    assert "ValueError: mine" in (submitted.run / "logs" / "worker-1.log").read_text()


def test_what_slurm_refuses_is_reported_in_its_words(cluster: Cluster, submitted: Submitted):
    said = cluster.on(0, *submitted.command("-n", "2", "--partition", "none"), folder=submitted.folder, check=False)
    assert "invalid partition specified: none" in said
    said = cluster.on(
        0, *submitted.command("-n", "2", "--host-job", "--name", "other", "--sbatch", "--gres=none:1"),
        folder=submitted.folder, check=False,
    )  # fmt: skip
    assert "sbatch has refused" in said
    await_(lambda: queue(cluster) == "")
