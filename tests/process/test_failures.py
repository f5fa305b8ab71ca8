"""Bad input and bad luck: a clear error, the right exit code, nothing lost, nothing left."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maniple.environment import shared_memory
from tests.waiting import PATIENCE_S, await_, is_gone

from .conftest import MANIPLE

pytestmark = pytest.mark.usefixtures("without_numba")

TRAINING = """
    import time, numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(1000)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    for step in range(3000):
        params["w"] += 1
        replica.step()
        time.sleep(0.01)
"""


def refused(*arguments: str, cwd: Path) -> tuple[int, str]:
    """The exit code and the words of a call that should fail at once."""
    done = subprocess.run([MANIPLE, "run", *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    assert not (cwd / "runs").exists(), "a run that cannot begin leaves no folder"
    return done.returncode, done.stderr


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("import maniple; maniple.join()")
    return "train.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "tarin.py"], ["no script 'tarin.py'", "Did you mean 'train.py'?"]),
        (["-n", "0", "train.py"], ["0 workers", "1 to 4096"]),
        (["-n", "-3", "train.py"], ["-3 workers"]),
        (["-n", "two", "train.py"], ["'two'", "integer"]),
        (["--rule", "eagsd", "train.py"], ["no rule 'eagsd'", "Did you mean easgd?"]),
        (["--rule", "easgd:alpha=1.5", "train.py"], ["alpha=1.5", "0 to 1"]),
        (["--rule", "easgd:alhpa=0.5", "train.py"], ["alhpa", "easgd has alpha"]),
        (["--rule", "easgd:alpha", "train.py"], ["'alpha'", "has no value"]),
        (["--every", "0", "train.py"], ["--every 0", "Write --every 10"]),
        (["--maximum-rate", "1.5", "train.py"], ["1.5", "up to 1"]),
        (["--every", "5", "--maximum-rate", "0.5", "train.py"], ["two paces"]),
        (["--restarts", "-1", "train.py"], ["--restarts -1", "out of range (0 or more)"]),
        (["--name", "a/b", "train.py"], ["'a/b'", "cannot name a run"]),
        (["--wrokers", "2", "train.py"], ["No such option", "--workers"]),
        ([], ["Missing argument 'SCRIPT'"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments, words, script, tmp_path):
    code, said = refused(*arguments, cwd=tmp_path)
    assert code == 2
    for word in words:
        assert word in said


def test_a_run_never_overwrites_another(run):
    first = run("import maniple; maniple.join()", "-n", "1")
    again = subprocess.run(
        [MANIPLE, "run", "--name", "run0", "script0.py"],
        cwd=first.folder.parent.parent, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_script_that_raises_ends_the_run_with_its_last_lines(run):
    failing = "replica.step()\n        if step == 5 and worker.rank == 1: raise RuntimeError('five')"
    done = run(TRAINING.replace("replica.step()", failing), "-n", "2")
    assert done.process.returncode == 1
    assert "worker 1 ended with exit code 1, so the run ends" in done.output
    assert "RuntimeError: five" in done.output
    assert done.description["exit_code"] == 1
    assert done.events(1, "failed")[0]["error"] == "RuntimeError: five"
    assert np.isfinite(done.center["w"]).all(), "the center is saved all the same"


def test_a_script_that_never_joins_is_reported(run):
    done = run("print('I train alone')", "-n", "2")
    assert done.process.returncode == 1
    assert "without calling maniple.join()" in done.output


def test_a_script_that_joins_and_shares_nothing_is_reported(run):
    done = run("import maniple; print(len(list(maniple.join().sampler(20))))", "-n", "2")
    assert done.process.returncode == 0, done.output
    (said,) = [line for line in done.output.splitlines() if "ended without sharing a model" in line]
    assert "script0.py, on 2 workers," in said and "worker.share(model, optimizer)" in said


@pytest.mark.parametrize(
    "use",
    [
        'worker.rank and worker.ask("next")',
        "worker.all_reduce(1.0)",
        'import numpy as np; maniple.Client().create(f"a{worker.rank}", np.zeros(3))',
    ],
)
def test_a_script_that_uses_its_run_without_sharing_a_model_gets_no_warning(run, use):
    done = run(f"import maniple; worker = maniple.join(); {use}", "-n", "2")
    assert done.process.returncode == 0, done.output
    assert "without sharing" not in done.output


def test_workers_whose_data_nothing_divides_are_warned_once(run):
    done = run(TRAINING.replace("3000", "5"), "-n", "2")
    assert done.process.returncode == 0, done.output
    assert done.output.count("nothing divides the data among them") == 1, "worker 0 says it, at its first step"
    assert "sampler=worker.sampler(train)" in done.output and "maniple.join(own_data=True)" in done.output
    assert [len(done.events(rank, "undivided")) for rank in (0, 1)] == [1, 0]


def test_params_that_are_not_chosen_stay_each_workers_own(run):
    done = run(
        """
        import numpy as np, maniple
        worker = maniple.join(own_data=True)
        model = {"body": np.zeros(3), "head": np.full(2, float(worker.rank))}
        replica = worker.share(model, params=["b*"], rule=maniple.BSP())
        gradients = {"body": np.full(3, float(worker.rank)), "head": np.full(2, 10.0 + worker.rank)}
        replica.reduce(gradients)
        for name in model: model[name] -= gradients[name]
        replica.step()
        worker.log(body=model["body"], head=model["head"])
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert list(done.center) == ["body"]
    for rank in (0, 1):
        (row,) = done.events(rank, "log")
        assert row["body"] == [-0.5] * 3, "the mean of the workers' gradients"
        assert row["head"] == [rank - 10.0 - rank] * 2, "its own value and gradient"


def test_error_for_workers_that_choose_different_params_names_the_parameter(run):
    script = "import numpy as np, maniple; w = maniple.join(); w.share({'a': np.zeros(2), 'b': np.zeros(3)}, params="
    done = run(f"{script}['a' if w.rank else 'b'], rule=maniple.BSP())", "-n", "2")
    assert done.process.returncode == 1
    assert "this worker's parameter 0 is 'a' float64[2], but the center has 'b' float64[3]" in done.output


def test_error_for_workers_with_different_models_names_the_parameter(run):
    done = run(
        """
        import pathlib, time, numpy as np, maniple
        worker, shared = maniple.join(), pathlib.Path("shared")
        while worker.rank == 1 and not shared.exists(): time.sleep(0.01)
        worker.share({"a": np.zeros(3), "w": np.zeros((5, 2 + worker.rank), "f4")})
        shared.touch()
        while worker.rank == 0: time.sleep(0.1)  # until the run ends
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.process.returncode == 1
    assert "'w' float32[5, 3], but the center has 'w' float32[5, 2]" in done.output


def test_rule_of_script_and_command_line_must_agree(run):
    script = "import numpy as np, maniple; maniple.join().share({'w': np.zeros(3)}, rule=maniple.EASGD(0.5))"
    done = run(script, "-n", "1", "--rule", "downpour")
    assert done.process.returncode == 2
    assert "EASGD(alpha=0.5, center_alpha=None, sync=False, nonfinite='stop', overlap=False)" in done.output
    assert "Downpour(compensate=False, sync=False, nonfinite='stop', overlap=False)" in done.output
    assert run(script, "-n", "1", "--rule", "easgd:alpha=0.5").process.returncode == 0


def test_pace_of_script_and_command_line_must_agree(run):
    script = "import numpy as np, maniple; maniple.join().share({'w': np.zeros(3)}, pace=maniple.Every(5))"
    done = run(script, "-n", "1", "--every", "7")
    assert done.process.returncode == 2
    assert "Every(5)" in done.output
    assert "Every(7)" in done.output


def test_a_tiny_shared_memory_is_refused_with_the_remedy(run, tiny):
    memory = tiny("shm", "1m")
    done = run(TRAINING.replace("1000)", "1000000)"), "-n", "1", env={"MANIPLE_SHM": str(memory)})
    assert done.process.returncode == 3
    assert "the center needs 8.0 MB" in done.output
    assert "remount,size=" in done.output
    assert list(memory.iterdir()) == []


def test_a_full_shared_memory_is_refused_before_the_first_worker(run, tiny):
    memory = tiny("shm", "16k")
    (memory / "full").write_bytes(bytes(4096 * 3))
    done = run(TRAINING, "-n", "1", env={"MANIPLE_SHM": str(memory)})
    assert done.process.returncode == 3
    assert "refuses the run's shared memory" in done.output
    assert not done.folder.exists()


def test_a_center_that_cannot_be_saved_is_kept_and_saved_by_the_next_run(run, tiny, tmp_path):
    disk, memory = tiny("disk", "512k"), tiny("shm", "64m")
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        replica = worker.share({"w": np.arange(200_000.0)})
    """
    done = run(script, "-n", "1", "--runs", str(disk), env={"MANIPLE_SHM": str(memory)})
    assert done.process.returncode == 3
    assert "the center could not be saved" in done.output
    assert json.loads((disk / "run0" / "run.json").read_text())["exit_code"] == 3
    (kept,) = memory.iterdir()
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
    again = run("import maniple; maniple.join()", "-n", "1", env={"MANIPLE_SHM": str(memory)})
    assert f"had left {kept.name} in memory: saved and removed" in again.output
    assert list(memory.iterdir()) == []
    done.folder = disk / "run0"
    assert np.array_equal(done.center["w"], np.arange(200_000.0))


def test_ctrl_c_ends_all_and_saves_the_center(start):
    going = start(TRAINING, "-n", "3")
    for rank in range(3):
        going.await_event(rank, "exchange", count=5)
    begin = time.monotonic()
    going.signal(signal.SIGINT)
    assert going.wait() == 130
    assert time.monotonic() - begin < 5
    assert "interrupted" in going.output
    steps = sum(going.events(rank, "exchange")[-1]["step"] for rank in range(3))
    assert going.center["w"].tolist() == [steps] * 1000, "each worker made its last exchange before it left"
    assert all(going.events(rank, "leave") for rank in range(3))


def test_ctrl_c_ends_also_workers_that_do_not_listen(start):
    going = start(
        """
        import signal, subprocess, time, maniple
        worker = maniple.join()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "100"])
        worker.log(child=child.pid)
        while True:
            time.sleep(1)
        """,
        "-n", "2",
    )  # fmt: skip
    children = [going.await_event(rank, "log")[0]["child"] for rank in range(2)]
    begin = time.monotonic()
    going.signal(signal.SIGINT)
    assert going.wait() == 130
    assert time.monotonic() - begin < 15
    for child in children:
        await_(lambda child=child: is_gone(child), 3)
    assert going.description["ends"] == {"0": "killed after 10 s", "1": "killed after 10 s"}
    assert "W0 : state killed after 10 s" in going.output
    assert "--resume" not in going.output, "there is no center to continue from"


def test_a_killed_launcher_leaves_no_process_and_the_next_run_saves_its_center(start, run):
    going = start(TRAINING, "-n", "2")
    for rank in range(2):
        going.await_event(rank, "exchange", count=5)
    pids = [going.pid(rank) for rank in range(2)]
    going.kill()
    for pid in pids:
        await_(lambda pid=pid: is_gone(pid), 3)
    segment = f"maniple-{going.description['lineage']}"
    memory = shared_memory()
    assert (memory / segment).exists()
    again = run("import maniple; maniple.join()", "-n", "1")
    assert f"had left {segment} in memory: saved and removed" in again.output
    assert not (memory / segment).exists()
    examined = subprocess.run([MANIPLE, "doctor", going.folder], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "its host was killed; the center was saved by a later run" in examined.stdout, examined.stderr
    done = sum(going.events(rank, "exchange")[-1]["step"] for rank in range(2))
    assert done <= going.center["w"].max() <= done + 2, "what was exchanged is there; two exchanges may lack their row"


def test_a_diverged_worker_cannot_poison_the_center(run):
    done = run(
        """
        import time, numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.ones(1000), "v": np.ones(10)}
        replica = worker.share(params, rule=maniple.EASGD(0.5), pace=maniple.Every(1))
        for step in range(100):
            if worker.rank == 0:
                params["w"][step % 1000] = (np.nan, np.inf, -np.inf)[step % 3]
            replica.step()
            time.sleep(0.01)
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.process.returncode == 1
    assert "Diverged: this worker offered non-finite values 3 exchanges in a row" in done.output
    assert done.events(0, "exchange")[0]["refused"] == ["w"]
    assert np.array_equal(done.center["w"], np.ones(1000))


def test_training_inside_the_center_block_is_an_error(run):
    done = run(
        """
        import numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.zeros(3)}
        replica = worker.share(params)
        params["w"] += 1
        with replica.center():
            assert params["w"].tolist() == [0, 0, 0]
            params["w"] += 5
        assert params["w"].tolist() == [1, 1, 1]
        with replica.center():
            replica.step()
        """,
        "-n", "1",
    )  # fmt: skip
    assert done.process.returncode == 2
    assert "inside `with replica.center():`" in done.output


def test_a_signal_just_as_the_run_begins_ends_it_in_order(tmp_path):
    """At the very moment from which on a signal ends the run."""
    program = """
import os, signal, sys
from maniple.launch import run as local
set_handlers, sent = local._JobRun._handle_signals, []
def and_send(self, handler):
    set_handlers(self, handler)
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
local._JobRun._handle_signals = and_send
sys.argv = ["maniple", "serve", "--name", "run", "--quiet"]
from maniple.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/run/run.json").read_text())["exit_code"] == 0
