"""Workers that torchrun and mpiexec have started, without changes to the script. Worker 0 hosts them."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import require
from tests.contract.collectives_ranks import find_mpiexec
from tests.process.conftest import Run
from tests.waiting import PATIENCE_S, await_, is_gone

pytestmark = pytest.mark.process

MPIRUN = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}  # what mpiexec tells each of two workers of one machine

# Each sample adds 1 to one element: the first center counts how often each was trained on. The second is a model,
# trained by the rule that was asked for, EASGD by default.
COUNT = """
    import os, sys, time
    import numpy as np
    import maniple

    worker = maniple.join()
    counts, model = {"seen": np.zeros(120)}, {"w": np.zeros(8)}
    replica = worker.share(counts, rule=maniple.Downpour())
    trained = worker.share(model)
    begin = counts["seen"].sum()
    for batch in worker.sampler(120, chunk=10).batches(5):
        counts["seen"][batch] += 1
        replica.step()
        model["w"] += 0.5 * (1 - model["w"])
        trained.step()
        worker.record("trained", samples=[int(i) for i in batch])
        worker.log(loss=1.0)
        time.sleep(float(sys.argv[1]))
    answer = worker.ask("next")
    print(f"[{worker.rank}/{worker.world} near {worker._environment.is_near} from {begin:.0f}: {answer}]", flush=True)
"""

ASGD = """
    pushed = worker.share({"v": np.ones(2)}, rule=maniple.ASGD())
    pushed.step()"""

CONTROLLER = """
    import maniple

    class Counter(maniple.Controller):
        def handle_control(self, request, worker, info):
            self.state["asked"] = self.state.get("asked", 0) + 1
            return self.state["asked"]
"""


def launched(folder: Path, script: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(textwrap.dedent(script))
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(going: subprocess.Popen[str]) -> str:
    """What it has said until its end."""
    try:
        return going.communicate(timeout=PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        going.kill()
        pytest.fail(f"no end:\n{going.communicate()[0]}")


def mpiexec(workers: int) -> list[str]:
    launcher = find_mpiexec()
    require("mpi", launcher is not None, "no mpiexec of mpich")
    return [str(launcher), "-n", str(workers)]


class Launched(Run):
    """The run of external workers, as its folder shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def trained(self) -> Counter[int]:
        """How often each sample was trained on, as the workers say."""
        paths = (self.folder / "events").glob("worker-*.jsonl")
        rows = [row for path in paths for row in self.events(int(path.stem[7:]), "trained")]
        return Counter(i for row in rows for i in row["samples"])

    @property
    def learned(self) -> float:
        """How far the model has come, from 0 to 1."""
        return float(load_file(self.folder / "center" / "center-1.safetensors")["w"].min())


def the_run(folder: Path) -> Launched:
    """The one run that there is."""
    (path,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    assert (folder / "runs" / "last").resolve() == path
    return Launched(path)


def test_mpiexec_has_a_center_leases_answers_and_a_run_folder(tmp_path, without_numba):
    (tmp_path / "counter.py").write_text(textwrap.dedent(CONTROLLER))
    settings = {"MANIPLE_EVERY": "2", "MANIPLE_CONTROLLER": "counter.py:Counter"}
    # A shell in between, which has a worker's variables.
    command = [*mpiexec(4), "sh", "-c", '"$0" train.py 0.01; exit $?', sys.executable]
    script = COUNT.replace("trained = worker.share(model)", "trained = worker.share(model)" + ASGD)
    going = launched(tmp_path, script, *command, env=settings)
    said = finished(going)
    assert going.returncode == 0, said
    run = the_run(tmp_path)
    assert len(re.findall(r"\[\d/4 near True from", said)) == 4, said
    assert f"maniple: mpirun has started 4 workers; worker 0 hosts them, run folder runs/{run.folder.name}\n" in said
    assert sorted(re.findall(r": (\d)\]", said)) == ["1", "2", "3", "4"], "one controller has answered all"
    assert run.center["seen"].tolist() == [1.0] * 120, "each sample was trained on once"
    assert run.trained == Counter(range(120))
    assert run.description["exit_code"] == 0
    asked = run.description["asked"]
    assert (asked["workers"], asked["launcher"], asked["pace"]) == (4, "mpirun", "every:2")
    assert (asked["script"], asked["args"]) == (str(tmp_path / "train.py"), ["0.01"])
    shared = [(row["rule"].partition("(")[0], row["pace"]) for rank in range(4) for row in run.events(rank, "share")]
    assert shared == [("Downpour", "Every(2)"), ("EASGD", "Every(2)"), ("ASGD", "Every(2)")] * 4
    assert run.learned > 0.3
    assert all(run.events(rank, "leave") for rank in range(4))
    assert [row["unfinished"] for row in run.events("host", "sampled")] == [0]


def test_workers_that_torchrun_starts_again_rejoin_the_same_center(tmp_path, without_numba):
    require("torch", find_spec("torch") is not None, "no torch")
    script = COUNT.replace(
        "worker.log(loss=1.0)",
        """worker.log(loss=1.0)
        if worker.rank == 1 and replica.steps == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)""",
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    going = launched(tmp_path, script, *torchrun, "train.py", "0.02", env=env)
    said = finished(going)
    assert going.returncode == 0, said
    run = the_run(tmp_path)
    assert "maniple: torchrun has started 2 workers (restart 1); worker 0 hosts them" in said
    begun = [float(value) for value in re.findall(r"\[\d/2 near True from (\d+): ", said)]
    assert len(begun) == 2 and min(begun) > 0, "they go on from the center"
    assert run.learned > 0.3
    assert len(run.events("host", "start")) == 1, "it is the same host"
    assert [row["event"] for row in run.events("server") if row.get("worker") == 1] == [
        "joined", "lost", "restarted", "left",
    ]  # fmt: skip
    assert set(run.trained) == set(range(120)), "what the dead one had taken went to another"
    seen = run.center["seen"]
    assert seen.min() >= 1
    assert seen.sum() <= 120 + 2 * 20, "only what the two had of leases that were not finished is trained on twice"
    assert [row["unfinished"] for row in run.events("host", "sampled")] == [0]
    assert run.description["exit_code"] == 0


@pytest.mark.parametrize("strict", ["", "1"])
def test_the_others_continue_where_the_launcher_lets_them(tmp_path, without_numba, strict):
    """As srun does, unless it is told to end all; here a shell is the launcher."""
    script = COUNT.replace(
        "replica.step()", "replica.step(); worker.rank == replica.steps == 1 and os.kill(os.getpid(), 9)"
    ).replace("chunk=10", "chunk=10, balance=True")
    environment = "PMI_RANK={0} MPI_LOCALRANKID={0} PMI_SIZE=2 MPI_LOCALNRANKS=2"
    workers = " & ".join(f"{environment.format(rank)} {sys.executable} train.py 0.02" for rank in range(2))
    going = launched(tmp_path, script, "sh", "-c", f"{workers} & wait", env={"MANIPLE_STRICT": strict})
    finished(going)
    run = the_run(tmp_path)
    assert run.description["exit_code"] == (1 if strict else 0)
    if not strict:
        assert run.description["ends"] == {"1": "did not finish"}
        assert set(run.trained) == set(range(120)), "what the dead one had taken went to the other"


def test_host_saves_and_ends_when_the_launcher_is_killed(tmp_path, without_numba):
    going = launched(tmp_path, COUNT, *mpiexec(2), sys.executable, "train.py", "0.2", env={"MANIPLE_RULE": "downpour"})
    await_((tmp_path / "runs" / "last").exists)
    run = the_run(tmp_path)
    for rank in range(2):
        run.await_event(rank, "trained", count=3)
    host = run.await_event("host", "server")
    going.kill()
    finished(going)
    await_(lambda: run.description.get("exit_code"))
    assert run.description["exit_code"] == 1
    assert 0 < run.center["seen"].sum() < 120
    log = (run.folder / "logs" / "host.log").read_text()
    assert "of 2 workers of mpirun, " in log and "did not finish" in log
    await_(lambda: is_gone(host[0]["pid"]))


def test_run_ends_when_the_worker_that_hosts_fails(tmp_path, without_numba):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        worker.share({"w": np.full(3, 7.0)})
        raise ValueError("the data are bad")
    """
    going = launched(
        tmp_path, script, sys.executable, "train.py", env=MPIRUN | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    )
    said = finished(going)
    assert going.returncode == 1
    assert "the data are bad" in said
    run = the_run(tmp_path)
    assert run.description["exit_code"] == 1, "it has ended by then"
    assert np.array_equal(run.center["w"], [7.0] * 3), "and saved the center"


def failing(folder: Path, rank: int, **env: str) -> str:
    """What one of two workers says that cannot begin."""
    environment = MPIRUN | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}
    going = launched(folder, COUNT, sys.executable, "train.py", "0", env=environment | env)
    said = finished(going)
    assert going.returncode in {1, 2}, said
    return said


def test_host_that_cannot_begin_says_why(tmp_path, without_numba):
    said = failing(tmp_path, 0, MANIPLE_RUNS="/dev/null/runs")
    assert "Run folders are made in /dev/null/runs (MANIPLE_RUNS)" in said
    assert "cannot be created: Not a directory" in said
    assert "smoke" in failing(tmp_path, 0, MANIPLE_RULE="smoke")
    (tmp_path / "bad.py").write_text("raise RuntimeError('out of order')")
    said = failing(tmp_path, 0, MANIPLE_CONTROLLER="bad.py:Bad", MANIPLE_NAME="bad")
    assert "cannot be used" in said and "RuntimeError: out of order" in said


def test_other_workers_are_notified_that_the_host_cannot_start(tmp_path, without_numba):
    going = launched(tmp_path, COUNT, *mpiexec(3), sys.executable, "train.py", "0", env={"MANIPLE_RULE": "smoke"})
    said = finished(going)
    assert going.returncode != 0
    assert (
        len(re.findall(r"WorkerFailed: the host of .* has ended with exit code 1, before worker \d joined", said)) == 2
    )
    assert said.count("smoke") >= 3, "with its reason"
    assert the_run(tmp_path).description["exit_code"] == 1


def test_worker_says_for_whom_it_has_waited(tmp_path, without_numba):
    said = failing(tmp_path, 1, MANIPLE_HOST_DEADLINE="0.5")
    assert (
        f"worker 1 of 2 has waited 0.5 s for the host that worker 0 starts: there is none in {tmp_path}/runs/" in said
    )
    assert "MANIPLE_ADDRESS" in said


def test_external_workers_of_a_host_that_was_killed_are_resumed_by_their_successors(tmp_path, without_numba):
    """MANIPLE_RESUME goes on with the run, under mpiexec too."""
    going = launched(tmp_path, COUNT, *mpiexec(2), sys.executable, "train.py", "0.2", env={"MANIPLE_RULE": "downpour"})
    await_((tmp_path / "runs" / "last").exists)
    run = the_run(tmp_path)
    run.await_event(1, "trained", count=2)
    os.kill(run.events("host", "server")[0]["pid"], signal.SIGKILL)  # it is started again meanwhile
    going.kill()
    finished(going)
    await_(lambda: run.description.get("exit_code"))
    again = launched(tmp_path, COUNT, *mpiexec(2), sys.executable, "train.py", "0", env={"MANIPLE_RESUME": "runs/last"})
    said = finished(again)
    assert again.returncode == 0, said
    assert the_run(tmp_path).description["exit_code"] == 0
    assert set(run.trained) == set(range(120))
    assert len(re.findall(r"\[\d/2 near True from (?!0:)", said)) == 2, said
