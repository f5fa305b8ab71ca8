"""The contract of a model's class, validation, the recorder and what is kept with an epoch."""

import json
import math
import sys
import types

import numpy as np
import pytest

from maniple.cli.reports import table
from maniple.controller import DefaultPolicy
from maniple.errors import InvalidArgument
from maniple.model import top_errors
from maniple.model.contract import faults, load_class, make, shareable
from maniple.model.loop import load_optimizer, newest_checkpoint, write_checkpoint
from maniple.model.recorder import Recorder
from maniple.model.validation import VALIDATION_METRICS, SavedModels, metrics_of, validate, validate_saved
from maniple.record import Events, RunFolder
from maniple.record.times import PARTS, gather, read_times
from maniple.session import Session, command_words
from maniple.settings.options import Limits
from maniple.watch.plot import draw_times as draw
from tests.written import T0, Written


class Whole:
    """A model that keeps the contract."""

    n_epochs = 1

    def __init__(self) -> None:
        self.params = {"w": np.zeros(2)}
        self.data = types.SimpleNamespace(n_batch_train=4, n_batch_val=3)

    def train_iter(self, count, recorder):
        return 1.0

    def val_iter(self, count, recorder):
        return {"loss": float(self.params["w"].sum()) + count, "samples": 1 + count}

    def adjust_hyperp(self, epoch):
        pass

    def cleanup(self):
        pass


CONFIG = {"size": 1}


def test_a_class_that_keeps_the_contract_has_no_faults():
    assert faults(Whole()) == []
    assert make(Whole, CONFIG).data.n_batch_train == 4


def test_the_constructor_gets_its_config_or_nothing():
    class Reported(Whole):
        def __init__(self, config):
            super().__init__()
            self.config = config

    assert make(Reported, CONFIG).config is CONFIG


def test_all_that_is_missing_is_named_at_once_with_what_it_should_be():
    class Empty:
        pass

    with pytest.raises(InvalidArgument) as caught:
        make(Empty, CONFIG)
    text = str(caught.value)
    assert "Empty cannot be trained. Of what a model needs, 7 are missing or wrong" in text
    for part in (
        "params is missing: a torch module, a list of torch parameters, or a dict of NumPy arrays",
        "data.n_batch_train is missing: an integer",
        "data.n_batch_val is missing",
        "train_iter(self, count, recorder) is missing: it trains on batch `count`",
        "val_iter(self, count, recorder) is missing",
        "adjust_hyperp(self, epoch) is missing",
        "cleanup(self) is missing",
    ):
        assert part in text
    assert caught.value.exit_code == 2


def test_what_is_of_a_wrong_kind_is_named_with_what_it_is():
    class Wrong(Whole):
        val_iter = 3
        n_epochs = 0

        def __init__(self):
            self.params = {"w": [1.0]}
            self.data = types.SimpleNamespace(n_batch_train=2.5, n_batch_val=-1)

        def train_iter(self, count):
            return 1.0

    found = "\n".join(faults(Wrong()))
    for part in (
        "params is a dict whose 'w' is not a NumPy array",
        "data.n_batch_train is 2.5",
        "data.n_batch_val is -1",
        "train_iter(count) has other arguments: it is train_iter(self, count, recorder)",
        "val_iter is of type int",
        "n_epochs is 0",
    ):
        assert part in found
    assert len(found.splitlines()) == 6


def test_fewer_batches_than_workers_are_refused():
    assert faults(Whole(), world=5) == ["data.n_batch_train is 4, but there are 5 workers, and each needs a batch"]


def test_torch_parameters_are_taken_as_a_module_and_as_a_list():
    torch = pytest.importorskip("torch")
    model = Whole()
    layer = torch.nn.Linear(2, 1)
    for params in (layer, list(layer.parameters())):
        model.params = params
        assert faults(model) == []
        assert {id(p) for p in shareable(params).parameters()} == {id(p) for p in layer.parameters()}
    model.params = [layer.weight.detach()]
    assert faults(model)[0].startswith("params is a list of Tensor: a torch module")


def test_a_file_without_the_class_names_those_it_has(tmp_path):
    (tmp_path / "unit_net.py").write_text("class Net:\n    pass\n")
    assert load_class(f"{tmp_path}/unit_net.py:Net").__name__ == "Net"
    with pytest.raises(InvalidArgument, match=r"has no class Nett. It has Net"):
        load_class(f"{tmp_path}/unit_net.py:Nett")
    with pytest.raises(InvalidArgument, match=r"--model net.py names no class. Write FILE.py:CLASS"):
        load_class("net.py")


def test_errors_are_the_shares_of_samples_whose_label_is_not_among_the_first():
    scores = np.array([[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [0, 5, 1, 1, 1, 1]], float)
    assert top_errors(scores, [0, 0, 0]) == pytest.approx((2 / 3, 2 / 3))
    assert top_errors(scores, np.array([1, 1, 2])) == (1.0, 0.0)
    assert top_errors(scores, [0, 5, 1], k=2) == (0.0, 0.0)
    torch = pytest.importorskip("torch")
    assert top_errors(torch.tensor(scores, requires_grad=True), torch.tensor([0, 0, 0])) == pytest.approx(
        (2 / 3, 2 / 3)
    )


def test_a_model_that_gives_the_same_score_to_all_or_no_number_is_not_right():
    assert top_errors(np.zeros((6, 6)), np.arange(6)) == pytest.approx((5 / 6, 1 / 6))
    assert top_errors(np.full((2, 6), np.nan), [0, 1]) == (1.0, 1.0)


def test_results_may_be_a_number_a_tuple_or_a_dict():
    assert metrics_of(0.5, VALIDATION_METRICS, "val_iter") == {"loss": 0.5}
    assert metrics_of((0.5, 0.2, 0.1), VALIDATION_METRICS, "val_iter") == {
        "loss": 0.5,
        "top1_error": 0.2,
        "top5_error": 0.1,
    }
    assert metrics_of({"loss": 0.5, "bleu": 3}, VALIDATION_METRICS, "val_iter") == {"loss": 0.5, "bleu": 3}
    for nothing in (None, {"cost": 1.0}):
        with pytest.raises(InvalidArgument, match=r"val_iter returned .*, but a loss is required"):
            metrics_of(nothing, VALIDATION_METRICS, "val_iter")


def test_validation_weighs_batches_by_their_samples():
    means, samples, batches = validate(Whole(), None, [0, 1, 2])
    assert means == {"loss": pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)}
    assert (samples, batches) == (6, 3)


class Powers:
    """Notes what the controller is to do."""

    live = 2

    def __init__(self) -> None:
        self.done: list[str] = []

    def keep_candidate(self):
        self.done.append("candidate")

    def discard_candidate(self):
        self.done.append("discard")

    def keep_best(self, number, loss):
        self.done.append(f"best {number}")

    def keep_epoch(self, number):
        self.done.append(f"epoch {number}")
        return f"epoch-{number:04d}"


def part(epoch, loss, *, batches, weight, of=4):
    return {"epoch": epoch, "batches": batches, "of": of, "weight": weight, "means": {"loss": loss, "error": 0.5}}


def test_the_last_part_brings_the_means_over_all_of_them_and_counts_for_the_best():
    decisions = DefaultPolicy(Limits(patience=2))
    decisions.host = powers = Powers()
    first = decisions.answer((0, 0), "validated", part(1, 1.0, batches=1, weight=10))
    assert first == {"best": False, "stop": False, "means": None}
    last = decisions.answer((1, 0), "validated", part(1, 2.0, batches=3, weight=30))
    assert last == {"best": True, "stop": False, "means": {"loss": pytest.approx(1.75), "error": 0.5}}
    assert powers.done == ["candidate", "best 1"]
    for epoch in (2, 3):
        answer = decisions.answer((0, 0), "validated", part(epoch, 9.0, batches=4, weight=1))
    assert answer["stop"], "two validations in a row brought nothing better"


def test_a_part_that_is_sent_again_counts_once_and_later_parts_are_kept():
    decisions = DefaultPolicy()
    for _ in range(2):
        assert decisions.answer((0, 0), "validated", part(1, 1.0, batches=3, weight=1))["means"] is None
    assert decisions.answer((0, 1), "validated", part(2, 1.0, batches=3, weight=1))["means"] is None
    assert decisions.answer((1, 0), "validated", part(1, math.nan, batches=1, weight=1))["means"]["error"] == 0.5
    assert list(decisions.state.parts) == ["2"]


def test_an_epoch_is_kept_for_the_first_who_asks():
    decisions = DefaultPolicy()
    assert decisions.answer((0, 0), "keep", {"epoch": 2}) == {"name": None}, "alone there is nowhere to keep it"
    decisions.host = powers = Powers()
    answers = [decisions.answer((rank, 0), "keep", {"epoch": epoch})["name"] for epoch in (2, 4) for rank in (0, 1)]
    assert answers == ["epoch-0002", None, "epoch-0004", None]
    assert powers.done == ["epoch 2", "epoch 4"]


class Noted:
    """A worker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def record(self, event, /, **values):
        self.rows.append({"event": event, **values})

    def log(self, **values):
        self.record("log", **values)


def recorded(monkeypatch, *, every=2):
    """A recorder whose clock the test moves."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr("maniple.model.recorder.time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr("maniple.feed.local_feed.WaitTimes.total_s", 0.0)
    between = types.SimpleNamespace(seconds=0.0, is_measured=False)
    replica = types.SimpleNamespace(spent_s=0.0, waited_s=0.0, between=between)
    worker = Noted()
    return clock, replica, worker, Recorder(worker, replica, every=every, is_shown=True, lr=lambda: 0.1)


def test_all_time_belongs_to_one_part(monkeypatch, capsys):
    clock, replica, worker, recorder = recorded(monkeypatch)
    recorder.begin(1)
    for loss in (1.0, 3.0):
        recorder.start()
        clock.now += 2.0
        recorder.end("data")
        clock.now += 5.0
        replica.spent_s += 3.0  # of which the worker waited one
        replica.waited_s += 1.0
        recorder.batch({"loss": loss})
    (row,) = [row for row in worker.rows if row["event"] == "times"]
    assert {name: row[name] for name in PARTS} == {"compute": 4.0, "exchange": 4.0, "data": 4.0, "others": 2.0}
    assert (row["seconds"], row["batches"], row["loss"], row["lr"], row["epoch"]) == (14.0, 2, 2.0, 0.1, 1)
    line = capsys.readouterr().out
    assert line.startswith("epoch 1, batch 2: loss 2, lr 0.1; 14.0 s: compute 29 %, exchange 29 %, data 29 %")


def test_time_that_is_counted_by_itself_is_not_counted_twice(monkeypatch):
    clock, replica, worker, recorder = recorded(monkeypatch, every=1)
    recorder.begin(1)
    recorder.start()
    clock.now += 3.0
    replica.spent_s += 1.0
    recorder.end("data")
    recorder.batch({"loss": 1.0})
    assert (worker.rows[0]["data"], worker.rows[0]["exchange"], worker.rows[0]["compute"]) == (2.0, 1.0, 0.0)


def test_time_between_steps_is_data_and_what_the_model_names_itself_is_not_counted_twice(monkeypatch, capsys):
    clock, replica, worker, recorder = recorded(monkeypatch, every=1)
    replica.between.is_measured = True
    recorder.begin(1)
    recorder.start()
    clock.now += 2.0
    replica.between.seconds += 2.0  # until the forward pass
    recorder.end("others")
    clock.now += 3.0
    replica.between.seconds += 3.0
    clock.now += 5.0
    recorder.batch({"loss": 1.0})
    assert {name: worker.rows[0][name] for name in PARTS} == {"compute": 5, "exchange": 0, "data": 3, "others": 2}
    assert "data 30 %" in capsys.readouterr().out


def test_data_that_is_not_measured_is_said_to_be_so(monkeypatch, capsys):
    clock, _, worker, recorder = recorded(monkeypatch, every=1)
    recorder.begin(1)
    clock.now += 2.0
    recorder.batch({"loss": 1.0})
    assert "2.0 s: compute 100 %, data not measured" in capsys.readouterr().out
    assert worker.rows[0]["measures_data"] is False
    assert "not measured" in table(gather({0: [worker.rows[0] | {"event": "times"}]}))[1]


def test_an_epoch_has_the_means_of_all_its_batches(monkeypatch):
    clock, *_, recorder = recorded(monkeypatch)
    recorder.begin(3)
    for loss in (1.0, 3.0, 5.0):
        clock.now += 1.0
        recorder.batch({"loss": loss})
    recorder.flush()
    row = recorder.finish({"val_loss": 0.5})
    assert (row["epoch"], row["batches"], row["seconds"], row["loss"], row["val_loss"]) == (3, 3, 3.0, 3.0, 0.5)


def test_a_part_of_the_time_that_does_not_exist_is_refused(monkeypatch):
    *_, recorder = recorded(monkeypatch)
    recorder.start()
    with pytest.raises(InvalidArgument, match=r"'comm' is no part of the time. Use one of compute, exchange"):
        recorder.end("comm")


def test_the_record_of_a_run_is_a_line_per_worker_and_epoch():
    times = {"compute": 3.0, "exchange": 1.0, "data": 0.0, "others": 0.0, "batches": 2, "lr": 0.1, "event": "times"}
    times |= {"measures_data": True}
    rows = [times | {"epoch": 1, "loss": 2.0}, times | {"epoch": 1, "loss": 4.0}, times | {"epoch": 2, "loss": 1.0}]
    found = gather({0: rows, 1: [{"event": "validated", "epoch": 1, "loss": 0.5, "step": 3, "worker": 1}]})
    lines = table(found)
    assert lines[1].split() == ["0", "1", "4", "8.00", "75.0", "%", "25.0", "%", "0.0", "%", "0.0", "%", "3", "0.1"]
    assert lines[-1] == "validation after epoch 1: loss 0.5"


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidArgument, match=r"matplotlib is not installed. `pip install 'maniple\[plot\]'`"):
        draw(gather({}), tmp_path / "x.png", title="")


def test_an_optimizer_and_its_record_are_found_again(tmp_path):
    torch = pytest.importorskip("torch")

    def trained(steps):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return optimizer

    (tmp_path / "center/epoch-0002").mkdir(parents=True)
    before = trained(3)
    before.param_groups[0]["lr"] = 0.05
    write_checkpoint(tmp_path / "center/epoch-0002", before, epochs=2, rows=[{"epoch": 1}, {"epoch": 2}])
    folder, training = newest_checkpoint(tmp_path)
    assert (folder.name, training.epochs, training.rows) == ("epoch-0002", 2, [{"epoch": 1}, {"epoch": 2}])
    after = trained(0)
    load_optimizer(folder, training, after)
    assert after.param_groups[0]["lr"] == 0.05
    for key, value in before.state_dict()["state"][0].items():
        assert torch.equal(after.state_dict()["state"][0][key], value)


def test_epochs_from_after_the_center_that_a_run_began_again_from_do_not_count(tmp_path):
    def keep(number, saved):
        folder = tmp_path / f"center/epoch-{number:04d}"
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps({"epochs": number, "saved": saved}))

    for number in (1, 2, 3):
        keep(number, saved=100.0 * number)
    (tmp_path / "center/epoch-0009").mkdir()  # nobody has put a record beside it
    assert newest_checkpoint(tmp_path)[1].epochs == 3
    events = Events(RunFolder(tmp_path).events("host"))
    events.write("start")
    events.write("restored", snapshot="epoch-0002", saved=199.0)
    assert newest_checkpoint(tmp_path)[1].epochs == 2
    events.write("start")
    events.write("restored", snapshot="snapshot-000001", saved=150.0)
    events.close()
    assert newest_checkpoint(tmp_path)[1].epochs == 1
    keep(4, saved=1e12)
    assert newest_checkpoint(tmp_path)[1].epochs == 4, "made since then"
    assert newest_checkpoint(tmp_path, before_start=True)[1].epochs == 1
    assert newest_checkpoint(None) is None


def test_saved_models_are_validated_again_and_in_between(tmp_path, capsys):
    from safetensors.numpy import save_file

    for name, value in (("one", 0.0), ("other", 4.0)):
        (tmp_path / name).mkdir()
        save_file({"w": np.full(2, value)}, tmp_path / name / "center-0.safetensors")
    base = 8 / 6
    model = Whole()
    saved = SavedModels(model)
    one, other = saved.read(tmp_path / "one"), saved.read(tmp_path / "other" / "center-0.safetensors")
    assert [(share, means["loss"]) for share, means in saved.interpolate(one, other, 3)] == [
        (0.0, pytest.approx(base)), (0.5, pytest.approx(base + 4)), (1.0, pytest.approx(base + 8)),
    ]  # fmt: skip
    validate_saved(model, [tmp_path / "one", tmp_path / "other"], None, 5)
    assert capsys.readouterr().out.splitlines()[1].endswith("other: loss 9.33333")
    save_file({"w": np.zeros(3)}, tmp_path / "third.safetensors")
    with pytest.raises(InvalidArgument, match=r"has an array of \[3\] for parameter 'w' float64\[2\]"):
        saved.read(tmp_path / "third.safetensors")


def test_options_of_a_session_become_words_of_the_command():
    options = {"workers": 2, "rule": "easgd", "bind": False, "tls": False, "quiet": True, "devices": ["cpu", "cpu"]}
    assert command_words(options) == ["--workers=2", "--rule=easgd", "--no-bind", "--quiet", "--devices=cpu,cpu"]
    assert command_words({"model_arg": {"lr": 0.1, "name": "x", "deep": True}, "max_epochs": None}) == [
        "--model-arg=lr=0.1", "--model-arg=name=x", "--model-arg=deep=true",
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"wrokers=2 is no option of a session. Did you mean workers?"):
        command_words({"wrokers": 2})


def test_a_session_runs_a_model_or_a_script():
    with pytest.raises(InvalidArgument, match=r"was given neither"):
        Session()
    with pytest.raises(InvalidArgument, match=r"was given both"):
        Session("a.py:A", script="b.py")
    with pytest.raises(InvalidArgument, match=r"Local cannot be imported by a worker"):

        class Local:
            pass

        Session(Local)


def test_an_epoch_that_was_abandoned_is_not_counted_beside_the_one_that_was_made_instead(tmp_path):
    written = Written(tmp_path)
    parts = {"compute": 1.0, "exchange": 0.0, "data": 0.0, "others": 0.0, "lr": 0.1}
    written.row("host", "start", 0)
    for at, epoch, loss in ((1, 1, 4.0), (2, 2, 3.0), (5, 3, 100.0)):
        written.row(0, "times", at, epoch=epoch, batches=10, loss=loss, **parts)
        written.row(0, "validated", at, epoch=epoch, loss=loss)
    written.row(0, "times", 6, epoch=4, batches=5, loss=200.0, **parts)
    written.row("host", "start", 10)
    written.row("host", "restored", 10, snapshot="epoch-0002", saved=T0 + 3.0, updates=20)
    written.row(0, "times", 11, epoch=3, batches=10, loss=2.0, **parts)
    times = read_times(tmp_path)
    assert [(one.number, one.batches, one.loss) for one in times.workers[0]] == [
        (1, 10, 4.0),
        (2, 10, 3.0),
        (3, 10, 2.0),
    ]
    assert sorted(times.validated) == [1, 2], "what validation found of an abandoned epoch is not reported either"
