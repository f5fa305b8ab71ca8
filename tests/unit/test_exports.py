"""Exports: every number of a run arrives as it stands in its row."""

import csv
import json
import math
import struct
import sys

import pytest

from maniple.errors import InvalidArgument
from maniple.record import read_events
from maniple.record.rows import numbers
from maniple.watch.exports import KINDS, Exporting, open_export, start_time
from tests.unit.engines import engine
from tests.written import T0, Written


@pytest.fixture
def written(tmp_path) -> Written:
    """Two workers; the second begins later. One loss is not a number."""
    written = Written(tmp_path / "run")
    written.folder.describe(asked={"workers": 2, "rule": None, "args": ["--lr", "0.1"]}, exit_code=0)
    written.row("host", "start", -1, workers=2)
    for rank in (0, 1):
        written.row(rank, "join", rank, worker=rank)
        written.row(rank, "log", rank + 1.5, worker=rank, step=1, loss=0.1 + rank, note="a word", is_odd=True)
        written.progress(rank, rank + 2.0, worker=rank, step=2, samples=64, ages=[1])
        written.row(rank, "exchange", rank + 2.0, worker=rank, step=2, duration=0.1)
        written.row(rank, "log", rank + 2.5, worker=rank, step=3, loss=["nan", 1e-30][rank], lr=0.1)
    written.row(0, "log", 3, worker=0, step=3, val_loss=0.5, center=True)
    written.row(1, "validated", 4, worker=1, step=3, epoch=1, loss=0.25)
    return written


def export(written, kind):
    opened = open_export(kind, "run", str(written.folder.path.parent / kind))
    exporting = Exporting(written.folder.path, opened)
    exporting.settings()
    assert exporting.advance()
    opened.close()
    return written.folder.path.parent / kind


def expected(written):
    """What is to arrive: (who, name, step, timestamp) and the value."""
    found = {}
    for rank in (0, 1):
        for row in read_events(written.folder.events(rank)):
            if row["event"] in {"log", "validated", "progress"}:
                is_center = "center" in row or row["event"] == "validated"
                prefix = "progress/" if row["event"] == "progress" else ""
                for name, value in numbers(row).items():
                    who = "center" if is_center else str(rank)
                    found[who, prefix + name, row["step"], row["timestamp"]] = value
    return found


def test_rows_in_several_files_are_all_exported(written):
    whole = (export(written, "csv") / "values.csv").read_text()
    for rank in (0, 1):
        written.divide(rank, 2)
    (written.folder.path.parent / "csv" / "values.csv").unlink()
    assert (export(written, "csv") / "values.csv").read_text() == whole


def same(found, wanted, tolerance=0.0):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=tolerance, abs=0.0, nan_ok=True), key


def test_numbers_of_a_row_are_all_but_words_flags_and_what_it_is_about():
    row = {
        "event": "log",
        "timestamp": 1.0,
        "worker": 0,
        "step": 3,
        "loss": "nan",
        "x": 1,
        "word": "w",
        "b": True,
        "big": 10**400,
    }
    assert numbers(row | {"list": [1], "up": "inf"}) == pytest.approx(
        {"loss": math.nan, "x": 1.0, "up": math.inf}, nan_ok=True
    )


def test_the_clock_begins_with_the_first_worker(written):
    assert start_time(written.folder) == T0


def test_a_csv_table_has_every_number_with_its_time_and_step(written):
    path = export(written, "csv") / "values.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["run", "worker", "timestamp", "elapsed", "step", "samples", "name", "value"]
    found = {
        (row["worker"], row["name"], int(row["step"]), float(row["timestamp"])): float(row["value"]) for row in rows
    }
    same(found, expected(written))
    assert all(float(row["elapsed"]) == float(row["timestamp"]) - T0 and row["run"] == "run" for row in rows)
    assert [row["samples"] for row in rows if row["name"] == "loss" and row["worker"] == "0"] == ["", "64"]


def test_tensorboard_has_a_run_for_each_worker_and_the_center_with_the_clock_of_the_rows(written):
    engine("tensorboardX")
    folder = export(written, "tensorboard")
    assert sorted(path.name for path in folder.iterdir()) == ["center", "run", "worker-0", "worker-1"]
    found = {}
    for path in folder.glob("*/events*"):
        who = path.parent.name.removeprefix("worker-")
        for event in tensorboard_events(path):
            for value in event.summary.value if who != "run" else ():
                found[who, value.tag, event.step, event.wall_time] = value.simple_value
    same(found, expected(written), tolerance=1e-6)  # it keeps 32 bits
    written_bytes = b"".join(path.read_bytes() for path in folder.glob("run/events*"))
    assert b'"args": [' in written_bytes and b'"event":"join"' in written_bytes and b'"event":"start"' in written_bytes


def tensorboard_events(path):
    """The events of a file: records with a length before and checksums around."""
    from tensorboardX.proto.event_pb2 import Event

    data, environment = path.read_bytes(), 0
    while environment < len(data):
        (length,) = struct.unpack_from("<Q", data, environment)
        yield Event.FromString(data[environment + 12 : environment + 12 + length])
        environment += 12 + length + 4


def test_mlflow_has_every_number_in_a_folder_of_its_own(written, monkeypatch):
    mlflow = engine("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that what the export sets is undone
    folder = export(written, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=folder.resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("maniple").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["args"]) == ("run", "FINISHED", "['--lr', '0.1']")
    found = {}
    for key in run.data.metrics:
        who, _, name = key.removeprefix("worker-").partition("/")
        for point in client.get_metric_history(run.info.run_id, key):
            found[who, name, point.step, point.timestamp / 1000] = point.value
    same(found, expected(written))
    (events,) = folder.rglob("events.json")
    assert [row["event"] for row in json.loads(events.read_text())["events"]] == ["start", "join", "join"]


def test_rows_that_make_no_sense_are_passed_over(written):
    with written.folder.events(0).open("a") as file:
        file.write(
            '{"event":"log","timesta\n[]\n{"event":"log"}\n{"event":7,"timestamp":1.0}\n{"event":"log","timestamp":"x"}\n'
        )
    assert export(written, "csv").exists()


def test_an_export_never_mixes_with_another(written, tmp_path):
    export(written, "csv")
    with pytest.raises(InvalidArgument, match=r"csv is not empty, and an export never mixes with another. Remove it"):
        export(written, "csv")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"cannot be used: .* Give another folder with -o"):
        open_export("csv", "run", str(tmp_path / "file"))
    with pytest.raises(InvalidArgument, match="is an address, and csv needs a folder"):
        open_export("csv", "run", "http://127.0.0.1:5000")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_missing_library_is_named_with_what_to_install(kind, tmp_path, monkeypatch):
    library = "tensorboardX" if kind == "tensorboard" else kind
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        InvalidArgument, match=rf"{library} is not installed. `pip install 'maniple\[{kind}\]'` installs it"
    ):
        open_export(kind, "run", str(tmp_path / kind))


def test_following_ends_when_the_run_has(written):
    opened = open_export("csv", "run", str(written.folder.path.parent / "csv"))
    exporting = Exporting(written.folder.path, opened)
    written.folder.describe(exit_code=None)
    waits = []

    def sleep(_):
        waits.append(exporting.rows)
        written.row(0, "log", 10, worker=0, step=9, loss=0.01)
        if len(waits) == 3:
            written.folder.describe(exit_code=0)

    exporting.follow(sleep)
    opened.close()
    first = waits[0]
    assert waits == [first, first + 1, first + 2] and exporting.rows == first + 3
