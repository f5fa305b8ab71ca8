"""Models as classes: `maniple run --model`, sessions from Python, snapshots of epochs and the record."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from maniple.errors import InvalidArgument
from maniple.record import Events, Row, read_events
from tests.conftest import require
from tests.process.conftest import MANIPLE, Run
from tests.waiting import PATIENCE_S, await_, is_gone

pytestmark = pytest.mark.usefixtures("without_numba")

# A straight line through six dimensions. In each epoch, and in each validation, everybody waits for everybody else
# once, so that all take part however slow the machine is.
LINE = """
    import pathlib
    import time

    import numpy as np


    class Data:
        batch_size, n_batch_train, n_batch_val = 10, 30, 7

        def __init__(self):
            rng = np.random.default_rng(0)
            self.x = rng.normal(size=(365, 6))
            self.y = self.x @ np.arange(1.0, 7.0)

        def batch(self, count):
            return self.x[count * 10 : count * 10 + 10], self.y[count * 10 : count * 10 + 10]


    class Line:
        n_epochs = 3
        record_every = 5

        def __init__(self, config):
            self.config, self.worker = config, config["worker"]
            self.data = Data()
            self.params = {"w": np.zeros(6)}
            self.lr, self.epoch, self.met = config.get("lr", 0.05), -1, set()

        def meet(self, what):
            if what not in self.met:
                self.met.add(what)
                pathlib.Path(f"{what}-{self.worker.rank}").touch()
                while not all(pathlib.Path(f"{what}-{rank}").exists() for rank in range(self.worker.world)):
                    time.sleep(0.01)

        def error(self, count):
            x, y = self.data.batch(count)
            return x, x @ self.params["w"] - y

        def train_iter(self, count, recorder):
            self.meet(f"train{self.epoch}")
            self.worker.log(taken=count, at=self.epoch)
            x, error = self.error(count)
            self.params["w"] -= self.lr * x.T @ error / len(x)
            return float(np.mean(error**2))

        def val_iter(self, count, recorder):
            self.meet(f"val{self.epoch}")
            _, error = self.error(30 + count)
            return {"loss": float(np.mean(error**2)), "samples": len(error)}

        def adjust_hyperp(self, epoch):
            self.epoch = epoch

        def cleanup(self):
            print("cleaned up")
"""

ROOT = Path(__file__).parents[2]


def net() -> str:
    """The class of docs/model.md."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/model.md").read_text(), re.M | re.S)[0]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(textwrap.dedent(LINE))
    (tmp_path / "net.py").write_text(net())
    return tmp_path


def run_model(here: Path, name: str, *words: str) -> Run:
    """`maniple run`, until its end; `name` is that of a new run, unless it goes on with one."""
    named = () if "--resume" in words else ("--name", name)
    run = Run(here, name, [str(MANIPLE), "run", *named, *words], {})
    run.wait()
    return run


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maniple.model", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_one_class_trains_alone_and_on_two_workers_that_share_its_batches(here):
    by_itself = alone("line.py:Line", "--model-arg", "lr=0.04")
    assert by_itself.returncode == 0, by_itself.stderr
    assert "epoch 3, batch 30: loss" in by_itself.stdout and ", lr 0.04; " in by_itself.stdout
    assert "epoch 3, validation: loss" in by_itself.stdout and "cleaned up" in by_itself.stdout
    for path in here.glob("*-0"):
        path.unlink()
    words = ("--every", "2", "--snapshot-epochs", "2", "--model", "line.py:Line", "--model-arg=lr=0.04")
    run = run_model(here, "two", "-n", "2", *words)
    assert run.process.returncode == 0, run.output
    taken = [(row["at"], row["taken"]) for rank in (0, 1) for row in run.events(rank, "log") if "taken" in row]
    assert sorted(taken) == [(epoch, count) for epoch in range(3) for count in range(30)]
    assert all(len(run.events(rank, "epoch")) == 3 for rank in (0, 1)), "both take part in each epoch"
    kept = [str(run.folder / "center" / f"epoch-{number:04d}") for number in (2, 3)]
    way = alone("line.py:Line", "--validate", kept[0], "--with", kept[1], "--steps", "3").stdout.splitlines()
    assert [line.partition(":")[0] for line in way[1:]] == ["0", "0.5", "1"], "from the second epoch to the last"
    losses = [float(line.rpartition(" ")[2]) for line in way[1:]]
    assert losses[0] > losses[1] > losses[2]


def test_what_workers_find_in_validation_is_combined_by_samples(here):
    run = run_model(here, "run", "-n", "2", "--every", "1", "--rule", "downpour", "--model", "line.py:Line")
    assert run.process.returncode == 0, run.output
    rows = [row for rank in (0, 1) for row in run.events(rank)]
    for epoch in (1, 2, 3):
        parts = [row for row in rows if row["event"] == "validation" and row["epoch"] == epoch]
        assert len(parts) == 2 and sum(part["batches"] for part in parts) == 7
        assert sum(part["samples"] for part in parts) == 65, "the last batch is half as large"
        (whole,) = [row for row in rows if row["event"] == "validated" and row["epoch"] == epoch]
        assert whole["loss"] == pytest.approx(sum(part["loss"] * part["samples"] for part in parts) / 65)
    assert (run.folder / "center/best").exists(), "the controller has heard of it"


# Under rules by which all meet: the loss grows after the second epoch, and each worker logs what it has validated.
MEETING = """
    import os
    import pathlib
    import signal
    import types

    import numpy as np


    class Meeting:
        n_epochs = 9

        def __init__(self, config):
            self.worker, self.epoch, self.victim = config["worker"], 0, config.get("victim")
            self.data = types.SimpleNamespace(batch_size=10, n_batch_train=6, n_batch_val=config["batches"])
            self.params = {"w": np.zeros(4)}
            if config.get("sampled"):
                sampler = self.worker.sampler(config["batches"], validation=True, static=True)
                self.worker.log(share=list(sampler), length=len(sampler))

        def train_iter(self, count, recorder):
            if self.epoch == 2 and self.worker.rank + 1 == self.victim and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = np.random.default_rng(count).normal(size=4)
            if recorder.replica.rule.averages_gradients:
                recorder.replica.reduce({"w": gradient})
            self.params["w"] -= 0.1 * gradient
            return 1.0

        def val_iter(self, count, recorder):
            self.worker.log(looked=count, at=self.epoch, sum=float(self.params["w"].sum()).hex())
            return abs(self.epoch - 2) + 0.1 * count

        def adjust_hyperp(self, epoch):
            self.epoch = epoch + 1

        def cleanup(self):
            pass
"""


def looked(run: Run, workers: int) -> list[Row]:
    return [row for rank in range(workers) for row in run.events(rank, "log") if "looked" in row]


def test_under_bsp_every_validation_batch_is_looked_at_once_though_they_do_not_divide(here):
    (here / "meeting.py").write_text(textwrap.dedent(MEETING))
    words = ("--model", "meeting.py:Meeting", "--model-arg=batches=5", "--model-arg=sampled=1", "--patience=2")
    run = run_model(here, "run", "-n", "2", "--rule", "bsp", *words)
    assert run.process.returncode == 0, run.output
    rows = [row for row in looked(run, 2) if row["at"] <= 4]  # until everybody has heard of the end, more may follow
    assert sorted((row["at"], row["looked"]) for row in rows) == [(e, b) for e in range(1, 5) for b in range(5)]
    validated = sorted(row["epoch"] for rank in (0, 1) for row in run.events(rank, "validated"))
    assert validated[:4] == [1, 2, 3, 4]
    (stop,) = run.events("server", "stop")
    assert "2 validations brought nothing better (--patience); the best was 0.2" in stop["reason"], "of all 5 batches"
    best = load_file(run.folder / "center/best/center-0.safetensors")["w"]
    assert {float(best.sum()).hex()} == {row["sum"] for row in rows if row["at"] == 2}, "what was validated, bit by bit"
    shares = [row for rank in (0, 1) for row in run.events(rank, "log") if "share" in row]
    assert sorted(index for row in shares for index in row["share"]) == list(range(5))


@pytest.mark.parametrize("comes_back", [True, False])
def test_under_local_sgd_some_workers_have_no_validation_batch_and_a_dead_one_s_go_to_others(here, comes_back):
    (here / "meeting.py").write_text(textwrap.dedent(MEETING))
    victim = ("--model-arg=victim=2", "--restarts", "1") if comes_back else ("--model-arg=victim=1",)
    words = ("--model", "meeting.py:Meeting", "--model-arg=batches=2", "--snapshot-epochs", "3", *victim)
    run = run_model(here, "run", "-n", "3", "--rule", "localsgd", "--every", "1", *words)
    assert run.process.returncode == 0, run.output
    kept = sorted(path.name for path in (run.folder / "center").glob("epoch-*"))
    assert kept == ["epoch-0003", "epoch-0006", "epoch-0009"], "also without worker 0"
    validated = [(row["epoch"], round(row["loss"], 6)) for rank in range(3) for row in run.events(rank, "validated")]
    assert sorted(validated) == [(epoch, abs(epoch - 2) + 0.05) for epoch in range(1, 10)], run.output
    assert (run.folder / "center/best").exists()


@pytest.mark.parametrize("starts", ["alone", "run"])
def test_a_class_that_lacks_something_ends_with_the_list_before_training(here, starts):
    (here / "bad.py").write_text("class Bad:\n    params = 3\n    def cleanup(self): pass\n")
    if starts == "alone":
        done = alone("bad.py:Bad")
        code, text = done.returncode, done.stderr
    else:
        run = run_model(here, "bad", "-n", "2", "--model", "bad.py:Bad")
        code, text = run.process.returncode, run.output
    assert code == 2
    assert "params is of type int: a torch module" in text and "train_iter(self, count, recorder) is missing" in text
    assert "Traceback" not in text


def test_patience_is_refused_for_a_class_without_validation_batches(here, monkeypatch):
    (here / "meeting.py").write_text(textwrap.dedent(MEETING))
    monkeypatch.setenv("MANIPLE_PATIENCE", "2")
    done = alone("meeting.py:Meeting", "--model-arg=batches=0")
    assert done.returncode == 2
    assert "--patience 2 counts validations, but Meeting has none (data.n_batch_val is 0)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_session_file_names_the_model_and_a_script_beside_it_is_refused(here):
    (here / "sub").mkdir()
    (here / "sub/session.yaml").write_text(
        "model: ../line.py:Line\nmodel_arg: [lr=0.03]\nworkers: 1\nname: filed\nmax_epochs: 1\n"
    )
    run = run_model(here, "filed", "sub/session.yaml")
    assert run.process.returncode == 0, run.output
    assert run.description["asked"]["model_args"] == ["lr=0.03"]
    assert len(run.events(0, "epoch")) == 1 and "lr 0.03" in run.log(0)
    both = run_model(here, "both", "--model", "line.py:Line", "train.py")
    assert both.process.returncode == 2
    assert "own loop, but there is also 'train.py' to run. Leave one of them out" in both.output


def test_a_run_goes_on_after_a_saved_epoch_with_optimizer_rate_and_record(here, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("-n", "2", "--rule", "bsp", "--model", "net.py:Net")
    run = run_model(here, "run", *words, "--snapshot-epochs", "1")
    assert run.process.returncode == 0, run.output
    center = run.folder / "center"
    whole = load_file(center / "epoch-0004/center-0.safetensors")
    again = run_model(here, "run", *words, "--resume", "runs/run", "--snapshot", "epoch-0003")
    assert again.process.returncode == 0, again.output
    assert "continuing after epoch 3, with optimizer and records of epoch-0003" in again.output
    resumed = load_file(center / "epoch-0004/center-0.safetensors")
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole), "as if it had never ended"
    training = json.loads((center / "epoch-0004/training.json").read_text())
    assert [row["epoch"] for row in training["rows"]] == [1, 2, 3, 4], "the old record stays"
    assert [row["lr"] for row in training["rows"]] == pytest.approx([0.1, 0.1207, 0.1414, 0.01414], rel=1e-3)

    recorded = [row for rank in (0, 1) for row in run.events(rank, "validated") if row["epoch"] == 4]
    done = alone("net.py:Net", "--validate", str(center / "epoch-0004"))
    assert done.returncode == 0, done.stderr
    found = dict(part.split() for part in done.stdout.rpartition(": ")[2].split(", "))
    for name in ("loss", "top1_error", "top5_error"):
        assert float(found[name]) == pytest.approx(recorded[-1][name], rel=1e-4), "a saved epoch is found as it was"


def test_a_session_from_python_trains_and_is_recorded(here):
    with maniple.Session(model="line.py:Line", rule="easgd", workers=2, every=2, quiet=True) as session:
        assert session.wait(PATIENCE_S) == 0
    assert session.folder.parent == here / "runs" and (session.folder / "center/center-0.safetensors").exists()
    shown = subprocess.run([MANIPLE, "record", session.folder], capture_output=True, text=True, timeout=PATIENCE_S)
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[0] == ["worker", "epoch", "batches", "seconds", "compute", "exchange", "data", "others", "loss", "lr"]
    assert [line[:2] for line in lines[1:7]] == [[rank, epoch] for rank in "01" for epoch in "123"]
    assert sum(int(line[2]) for line in lines[1:7]) == 90
    assert shown.stdout.count("validation after epoch") == 3
    nothing = subprocess.run([MANIPLE, "record", here], capture_output=True, text=True, timeout=PATIENCE_S)
    assert nothing.returncode == 2 and "has no rows `times`" in nothing.stderr


def test_a_picture_shows_where_the_time_went(here, monkeypatch):
    monkeypatch.setenv("MPLCONFIGDIR", str(here / "matplotlib"))
    require("matplotlib", find_spec("matplotlib") is not None, "matplotlib is not installed")
    parts = {"compute": 3.0, "exchange": 1.0, "data": 0.5, "others": 0.5, "batches": 2, "lr": 0.1, "loss": 2.0}
    for rank in (0, 1):
        events = Events(here / f"run/events/worker-{rank}.jsonl")
        for epoch in (1, 2):
            events.write("times", epoch=epoch, **parts)
            events.write("validated", epoch=epoch, loss=1.0 / epoch)
        events.close()
    command = [MANIPLE, "record", "run", "--plot", "times.png"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert (here / "times.png").read_bytes().startswith(b"\x89PNG")


ENDLESS = LINE.replace("n_epochs = 3", "n_epochs = 1000000").replace('self.meet(f"train', 'time.sleep(0.01), (f"train')


def test_leaving_a_session_ends_its_run_in_order(here):
    (here / "endless.py").write_text(textwrap.dedent(ENDLESS.replace('self.meet(f"val', '(f"val')))
    with (
        pytest.raises(ZeroDivisionError),
        maniple.Session(model="endless.py:Line", workers=2, name="endless", quiet=True) as session,
    ):
        await_((session.folder / "events/worker-1.jsonl").exists)
        with pytest.raises(TimeoutError, match="is still running after"):
            session.wait(0.01)
        raise ZeroDivisionError
    assert json.loads((session.folder / "run.json").read_text())["exit_code"] == 130
    assert not session.is_running


def rows_of(folder: Path, rank: int) -> list[Row]:
    path = folder / f"events/worker-{rank}.jsonl"
    return read_events(path) if path.exists() else []


def test_a_run_ends_in_order_when_the_program_that_started_it_is_killed(here):
    (here / "endless.py").write_text(textwrap.dedent(ENDLESS.replace('self.meet(f"val', '(f"val')))
    (here / "program.py").write_text(
        "import maniple\n"
        "if __name__ == '__main__':\n"
        "    maniple.Session(model='endless.py:Line', workers=2, name='tied', quiet=True).start().wait()\n"
    )
    program = subprocess.Popen([sys.executable, "program.py"])
    folder = here / "runs/tied"
    try:
        await_(lambda: [row for row in rows_of(folder, 1) if row["event"] == "times"])
        worker = next(row["pid"] for row in rows_of(folder, 1) if row["event"] == "join")
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait(PATIENCE_S)
    await_(lambda: is_gone(worker))
    await_(lambda: json.loads((folder / "run.json").read_text()).get("exit_code") == 130)
    assert (folder / "center/center-0.safetensors").exists()


# Gradients of NumPy arrays are averaged by the class itself. The worker that comes back ends the run after 5 batches.
RETURNING = """


    class Met(Line):
        n_epochs = 1000000

        def __init__(self, config):
            super().__init__(config)
            self.is_back = pathlib.Path("killed").exists()
            self.made = 0

        def train_iter(self, count, recorder):
            time.sleep(0.01)
            x, error = self.error(count)
            gradient = {"w": x.T @ error / len(x)}
            recorder.replica.reduce(gradient)
            self.worker.log(taken=count, at=self.epoch, back=self.is_back)
            self.params["w"] -= self.lr * gradient["w"]
            self.made += self.is_back
            if self.made == 5:
                self.worker.ask("stop", reason="it is back")
            return float(np.mean(error**2))

        def val_iter(self, count, recorder):
            return float(np.mean(self.error(30 + count)[1] ** 2))
"""


def test_a_worker_that_comes_back_goes_on_where_the_others_are(here):
    (here / "met.py").write_text(textwrap.dedent(LINE + RETURNING))
    command = [str(MANIPLE), "run", "-n", "2", "--restarts", "1", "--rule", "bsp", "--model", "met.py:Met"]
    run = Run(here, "run", [*command, "--name", "run"], {})
    try:
        await_(lambda: [row for row in run.events(1, "log") if row.get("at", 0) >= 1])
        (here / "killed").touch()
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.wait() == 0, run.output
    finally:
        if run.process.poll() is None:
            run.kill()
    back = [(row["at"], row["taken"]) for row in run.events(1, "log") if row.get("back")]
    met = {row["at"] for row in run.events(0, "log") if "taken" in row}
    assert back[0][0] >= 1 and back[0][0] in met, "not from the first epoch on"
    others = {(row["at"], row["taken"]) for row in run.events(0, "log") if "taken" in row}
    assert not others & set(back), "the shares of an epoch are still apart"


def test_a_class_itself_names_the_model_and_a_file_that_starts_itself_again_is_refused(here, monkeypatch):
    (here / "starting.py").write_text(
        (here / "line.py").read_text()
        + "\n\nimport maniple\n\nmaniple.Session(model='starting.py:Line', workers=1, name='again').start().wait()\n"
    )
    done = alone("starting.py:Line")
    assert done.returncode == 2 and 'Put the start under `if __name__ == "__main__":`' in done.stderr
    monkeypatch.syspath_prepend(here)
    import line

    with maniple.Session(line.Line, max_epochs=1, quiet=True) as session:
        assert session.wait(PATIENCE_S) == 0
    with pytest.raises(InvalidArgument, match="was started already"):
        session.start()
