"""Updates of a run, and metrics for Prometheus: nothing is sent twice, and nothing is left out."""

import json
from base64 import b64decode

import numpy as np
import pytest

from maniple.monitor import RunState
from maniple.watch.prometheus import metrics_text
from maniple.watch.updates import COLUMNS, Updates
from tests.unit.test_run_state import T0, Written


class Viewer:
    """Puts updates together, as the page does."""

    def __init__(self) -> None:
        self.small: dict = {}
        self.curves: dict = {}
        self.time_splits: dict = {}
        self.happened: list = []
        self.received = 0

    def receive(self, updates: bytes) -> None:
        self.received += len(updates)
        update = json.loads(updates)
        if "since" in update:
            self.__init__()
        for kind, name, rank, first, *points in update.pop("curves", []):
            known = self.curves.get((kind, name, rank), [np.empty(0)] * 2)
            self.curves[kind, name, rank] = [
                np.r_[old[:first], numbers(new)] for old, new in zip(known, points, strict=True)
            ]
        for rank, first, stretches in update.pop("time_splits", []):
            known = self.time_splits.get(rank, np.empty((0, 6)))
            self.time_splits[rank] = np.r_[known[:first], numbers(stretches).reshape(-1, 6)]
        self.happened += update.pop("happened", [])
        self.small |= update


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), np.float32)


@pytest.fixture
def written(tmp_path) -> Written:
    return Written(tmp_path / "run")


def write(written: Written, i: int) -> None:
    for rank in (0, 1):
        if i == 0:
            written.row(rank, "join", 0.0, node="a")
        written.row(rank, "log", i + 1, step=i, loss=1 / (i + 1))
        written.progress(rank, i + 1, step=10 * i + 10, samples=10 * i, exchange=0.1 * i, cpu=0.5 * i, ages=[1, 2])
    if i % 10 == 0:
        written.row("server", "joined", i, worker=0, live=2)


def test_updates_add_up_to_what_is_sent_at_once(written):
    state = RunState(written.folder, limit=20)  # so that points are dropped again and again
    updates, viewer = Updates(), Viewer()
    for i in range(200):
        write(written, i)
        state.refresh()
        viewer.receive(updates.next(state, {"name": "run"}))
    whole = Viewer()
    whole.receive(Updates().next(state, {"name": "run"}))
    assert viewer.small == whole.small
    assert viewer.happened == whole.happened
    assert (
        viewer.curves.keys()
        == whole.curves.keys()
        >= {("logged", "loss", 0), ("measured", "cores", 1), ("live", "live", 0)}
    )
    for key, points in whole.curves.items():
        np.testing.assert_array_equal(viewer.curves[key], points)
    np.testing.assert_array_equal(viewer.time_splits[1], whole.time_splits[1])
    xs, ys = state.logged.named["loss"][0].points()
    np.testing.assert_allclose(whole.curves["logged", "loss", 0], [np.array(xs) - T0, ys], rtol=1e-6)


def test_what_has_not_changed_is_not_sent_again(written):
    for i in range(50):
        write(written, i)
    state, updates = written.run_state(), Updates()
    assert len(updates.next(state, {"name": "run"})) > 1000
    assert updates.next(state, {"name": "run"}) == b"{}"
    written.row(0, "log", 60, step=60, loss=0.5)
    state.refresh()
    assert json.loads(updates.next(state, {"name": "run"})).keys() == {"curves", "run", "totals", "workers", "clock"}


def test_an_earlier_beginning_begins_anew(written):
    write(written, 0)
    state, updates, viewer = written.run_state(), Updates(), Viewer()
    viewer.receive(updates.next(state, {}))
    written.row(2, "join", -7.0)
    written.progress(2, -5.0, step=1, elapsed=1.5)  # at its first step, which starts the clock
    state.refresh()
    viewer.receive(updates.next(state, {}))
    assert viewer.curves["logged", "loss", 0][0].tolist() == [6.0]
    assert [row[0] for row in viewer.small["workers"]] == [0, 1, 2]


def test_a_run_of_which_nothing_is_known_has_updates(written):
    viewer = Viewer()
    viewer.receive(Updates().next(RunState(written.folder, workers=2), {}))
    assert [row[1] for row in viewer.small["workers"]] == ["starting", "starting"]
    assert len(viewer.small["workers"][0]) == 1 + len(COLUMNS)


def test_metrics_are_in_the_format_of_prometheus(written):
    write(written, 0)
    written.progress(0, 2.0, step=30, samples=320, bytes=1000, memory=4096, staleness=2.5)
    written.row("host", "exit", 2, worker=1, exit_code=-9, died=True)
    text = metrics_text(written.run_state(), 'a "run"')
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values[r'maniple_worker_step{run="a \"run\"",worker="0"}'] == "30"
    assert values[r'maniple_worker_samples_per_second{run="a \"run\"",worker="0"}'] == "320"
    assert values[r'maniple_worker_state{run="a \"run\"",worker="1",state="dead"}'] == "1"
    assert values[r'maniple_run_workers{run="a \"run\""}'] == "2"
    assert r'maniple_worker_staleness{run="a \"run\"",worker="1"}' not in values  # nothing is known of it
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert text.endswith("\n")


def test_a_page_has_the_target_and_the_speed_up_and_its_clock_starts_at_the_first_step(written):
    base = {"name": "one", "workers": 1, "rate": 50.0, "unit": "samples"}
    written.row(0, "join", 0.0)
    written.progress(0, 5.0, step=1, samples=10, elapsed=4.0)
    written.progress(0, 7.0, step=21, samples=210, elapsed=6.0)
    written.row(0, "log", 6.0, step=9, loss=0.8, center=True)
    written.row(0, "log", 7.0, step=21, loss=0.3, center=True)
    state = RunState(written.folder)
    state.describe({"asked": {"target": "loss=0.5"}, "baseline": base})
    state.refresh()
    viewer = Viewer()
    viewer.receive(Updates().next(state, {}))
    totals = viewer.small["totals"]
    assert (totals["speedup"], totals["target_s"], totals["target"]["best"]) == (2.0, 2.0, 0.3)
    assert viewer.curves["logged", "loss", -1][0].tolist() == [1.0, 2.0]
    assert (viewer.small["run"]["until"], viewer.small["run"]["target_at"]) == (2.0, 2.0)
