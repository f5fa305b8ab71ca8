"""Notices of the launcher: what it says once."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from maniple.clock import clock
from maniple.launch.notices import RuleNotice, SlowWorkerNotice, StopNotices
from maniple.monitor import WorkerState
from maniple.monitor.worker_state import Counts
from tests.simulated_clock import SimulatedClock


@dataclass
class Monitor:
    """What notices look at."""

    shared: dict[str, Any] = field(default_factory=dict)
    workers: dict[int, WorkerState] = field(default_factory=dict)


def waiting(*shares: float, seconds: float = 100.0) -> dict[int, WorkerState]:
    """Workers that have waited for others for these shares of their time."""
    splits = [{"compute": (1 - one) * seconds, "exchange": 0.0, "data": 0.0, "others": one * seconds} for one in shares]
    return {i: WorkerState("training", Counts(step=9, elapsed_s=seconds, split=one)) for i, one in enumerate(splits)}


def test_workers_that_go_on_a_minute_after_the_stop_are_named_once():
    time, notices = SimulatedClock(), StopNotices()
    with clock.replaced(time):
        assert notices.due("", [0, 1]) == []
        assert notices.due("--max-batches 10", [0, 1]) == ["everybody stops: --max-batches 10"]
        time.now = 59.0
        assert notices.due("--max-batches 10", [0, 1]) == []
        time.now = 60.0
        (notice,) = notices.due("--max-batches 10", [1])
        assert "still running: 1. A loop ends by itself if it takes its samples from worker.sampler" in notice
        time.now = 600.0
        assert notices.due("--max-batches 10", [1]) == []


def test_workers_that_have_all_stopped_are_not_named():
    time, notices = SimulatedClock(), StopNotices()
    with clock.replaced(time):
        notices.due("enough", [0])
        time.now = 100.0
        assert notices.due("enough", []) == []


def test_default_rule_is_named_once_with_what_follows_for_the_learning_rate():
    monitor, notice = Monitor(), RuleNotice(4, None)
    assert notice.due(monitor) == ""  # nothing is shared yet
    monitor.shared = {"by_default": True, "meets": "gradients"}
    assert "4 times the batch: divide the batch size by worker.world, or raise the learning rate" in notice.due(monitor)
    assert notice.due(monitor) == ""


@pytest.mark.parametrize(
    ("shared", "workers", "text"),
    [
        ({"by_default": False, "meets": "gradients"}, 4, ""),  # the user has named it
        ({"meets": "gradients"}, 4, ""),  # a run of an older version
        ({"by_default": True, "meets": "gradients"}, 1, ""),  # plain training under any rule
        ({"by_default": True, "meets": "center"}, 4, "rule: easgd by default; no worker waits for another"),
    ],
)
def test_rule_that_needs_no_explanation_gets_none(shared, workers, text):
    assert RuleNotice(workers, None).due(Monitor(shared)) == text


def test_default_rule_is_not_explained_where_the_command_line_names_one():
    assert RuleNotice(4, "easgd").due(Monitor({"by_default": True, "meets": "gradients"})) == ""


def test_worker_for_which_the_others_wait_is_named_once_with_the_remedy():
    monitor, notice = Monitor({"meets": "gradients"}, waiting(0.4, 0.02, 0.38)), SlowWorkerNotice()
    text = notice.due(monitor)
    assert "worker 1 is slower than the others, which wait for it 40% of their time" in text
    assert "--rule easgd" in text
    assert notice.due(monitor) == ""


@pytest.mark.parametrize(
    ("meets", "workers"),
    [
        ("center", waiting(0.4, 0.02)),  # no worker waits for another
        ("gradients", waiting(0.2, 0.02)),  # rarely worth another rule
        ("gradients", waiting(0.4, 0.4)),  # in turn: no worker is the slow one
        ("gradients", waiting(0.4, 0.02, seconds=20.0)),  # too early to tell
        ("gradients", waiting(0.4)),
    ],
)
def test_workers_of_one_speed_are_left_alone(meets, workers):
    assert SlowWorkerNotice().due(Monitor({"meets": meets}, workers)) == ""


@pytest.mark.parametrize("state", ["training", "starting"])
def test_waits_before_a_run_was_resumed_do_not_count(state):
    workers = waiting(0.4, 0.02)
    for one in workers.values():
        one.state = state
        if state == "training":  # it has joined again; else its newest counts are those of its last life
            one.before, one.now = one.now, Counts(step=1, elapsed_s=1.0, split=dict.fromkeys(one.now.split, 0.25))
    assert SlowWorkerNotice().due(Monitor({"meets": "gradients"}, workers)) == ""
