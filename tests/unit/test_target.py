"""Targets: what is one, what reaches it, and what a person is shown of it while the run continues."""

import pytest

from maniple.clock import clock
from maniple.errors import InvalidArgument
from maniple.launch.notices import TargetNotice
from maniple.launch.terminal import RunMonitor
from maniple.monitor.target import Target, parse_target
from tests.simulated_clock import SimulatedClock
from tests.written import Written


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("loss=0.2", Target("loss", 0.2)),
        ("loss <= 2e-1", Target("loss", 0.2, falling=True)),
        ("val_accuracy>=0.9", Target("val_accuracy", 0.9, falling=False)),
        ("reward/mean=-5", Target("reward/mean", -5.0)),
    ],
)
def test_a_target_is_a_name_a_sign_and_a_number(text, target):
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


def test_a_number_alone_is_a_target_only_where_the_value_is_known():
    assert parse_target("0.5", name="loss") == Target("loss", 0.5)
    with pytest.raises(InvalidArgument, match=r"--target '0.5' is no target: .* Write --target loss=0.2"):
        parse_target("0.5")


@pytest.mark.parametrize(
    "text", ["", "loss", "loss=", "=0.2", "loss=low", "loss=nan", "loss>=inf", "loss<0.2", "a b=1"]
)
def test_what_is_no_target_is_refused(text):
    with pytest.raises(InvalidArgument, match="is no target"):
        parse_target(text)


@pytest.fixture
def written(tmp_path) -> Written:
    written = Written(tmp_path / "run")
    written.folder.describe(asked={"workers": 1, "target": "loss=0.5"})
    written.row(0, "join", 0)
    written.progress(0, 3.0, step=1, samples=10, elapsed=2.5)  # at its first step
    return written


def test_the_time_to_a_target_counts_from_the_first_step_and_is_found_live(written):
    monitor, time = RunMonitor(written.folder, 1), SimulatedClock()
    with clock.replaced(time):
        monitor.refresh()
        assert monitor.target_status().text == "target loss 0.5: not yet, no loss was logged"
        written.row(0, "log", 4.0, step=2, loss=2.0)
        written.row(0, "log", 5.0, step=3, loss=0.8)
        monitor.refresh()
        assert monitor.totals().target.text == "target loss 0.5: not yet, best 1.4"  # the mean of both
        assert monitor.totals().target_s is None
        for i in range(12):
            written.row(0, "log", 6.0 + i, step=4 + i, loss=0.4)
        monitor.refresh()
        totals = monitor.totals()
    # The mean of the last 10 values is 0.6 with eight of them, and 0.44 with the ninth, when 2.0 leaves it.
    assert totals.target_s == totals.target.reached_s == pytest.approx(11.0)
    assert (totals.target.text, totals.target.falling) == ("target loss 0.5: reached after 11.0 s", True)
    assert monitor.result()["target"]["reached_s"] == totals.target_s
    assert monitor.summary()[-1] == totals.target.text


def test_a_run_that_has_ended_says_that_its_target_was_not_reached(written):
    written.row(0, "log", 4.0, step=2, loss=0.75)
    monitor = RunMonitor(written.folder, 1)
    monitor.refresh()
    assert monitor.summary()[-1] == "target loss 0.5: not reached, best 0.75"


def test_once_the_center_s_values_are_logged_only_these_count(written):
    written.row(0, "log", 4.0, step=2, loss=1.0)
    monitor, time = RunMonitor(written.folder, 1), SimulatedClock()
    with clock.replaced(time):
        for i in range(10):
            written.row(0, "log", 5.0 + i, step=3 + i, loss=0.1)
        monitor.refresh()
        assert monitor.target_status().reached_s is not None
        written.row(0, "validated", 20.0, loss=0.7)
        monitor.refresh()
        status = monitor.target_status()
        assert (status.reached_s, status.best, status.of) == (None, 0.7, "center")
        written.row(0, "log", 30.0, step=20, loss=0.5, center=True)
        monitor.refresh()
        assert monitor.target_status().reached_s == 27.0, "at the target is enough, and no mean is taken"


def test_a_value_that_starts_below_its_target_has_to_rise(written):
    for i, accuracy in enumerate((0.3, 0.6, 0.4)):
        written.row(0, "log", 4.0 + i, step=2 + i, accuracy=accuracy, center=True)
    written.folder.describe(asked={"target": "accuracy=0.5"})
    monitor = RunMonitor(written.folder, 1)
    monitor.refresh()
    status = monitor.target_status()
    assert (status.falling, status.reached_s, status.best) == (False, 2.0, 0.6)


def test_a_run_is_told_once_that_it_has_reached_its_target(written):
    monitor, notice = RunMonitor(written.folder, 1), TargetNotice()
    monitor.refresh()
    assert notice.due(monitor) == ""
    written.row(0, "log", 4.0, step=2, loss=0.7, center=True)
    written.row(0, "log", 5.0, step=2, loss=0.2, center=True)
    monitor.refresh()
    with clock.replaced(SimulatedClock()):
        assert notice.due(monitor) == "target loss 0.5: reached after 2.0 s"
        assert notice.due(monitor) == ""


@pytest.mark.parametrize("asked", [{"target": 5}, {"target": "what?"}, {}, [], None])
def test_a_target_that_cannot_be_read_is_none(tmp_path, asked):
    state = Written(tmp_path / "run").run_state()
    state.describe({"asked": asked, "baseline": {"rate": "fast"}})
    assert (state.target_status(), state.baseline) == (None, None)
