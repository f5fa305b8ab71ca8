"""The state of one worker, row by row: what counts when rows come late, twice, or from several lives."""

import pytest

from maniple.monitor import WorkerState
from maniple.monitor.row_reader import ProgressRow
from maniple.monitor.worker_state import GONE, Counts


def row(step: int, elapsed: float, **values: object) -> ProgressRow:
    return ProgressRow(100.0 + elapsed, step, 10 * step, elapsed, **values)


def test_counts_of_two_lives_are_added_but_rounds_go_on():
    first = Counts(step=3, samples=30, exchanges=1, rounds=7, bytes=100, elapsed_s=2.0)
    second = Counts(step=4, samples=40, exchanges=2, rounds=9, bytes=1, elapsed_s=0.5)
    both = first + second
    assert (both.step, both.samples, both.exchanges, both.rounds, both.bytes) == (7, 70, 3, 9, 101)
    assert both.elapsed_s == 2.5


def test_the_latest_state_counts_in_whatever_order_rows_arrive():
    worker = WorkerState()
    for when, state in [(3.0, "done"), (1.0, "starting"), (2.0, "training")]:
        worker.set_state(state, when)
    assert worker.state == "done" and worker.is_gone


@pytest.mark.parametrize("end", sorted(GONE - {"lost"}))
def test_a_worker_that_has_ended_is_not_lost_when_its_connection_breaks_later(end):
    worker = WorkerState()
    worker.set_state(end, 1.0)
    worker.set_state("lost", 2.0)
    assert worker.state == end
    worker.set_state("training", 3.0)
    worker.set_state("lost", 4.0)
    assert worker.state == "lost"


def test_the_history_of_states_is_bounded():
    worker = WorkerState()
    for when in range(3000):
        worker.set_state("training" if when % 2 else "dead", float(when))
    assert len(worker.states) == 1000 and worker.states[-1] == (2999.0, "training")


def test_rates_are_those_of_the_newest_interval_and_zero_when_it_has_ended():
    worker = WorkerState()
    worker.join({"event": "join", "timestamp": 100.0, "node": "h1"})
    assert (worker.state, worker.node, worker.lives) == ("training", "h1", 1)
    worker.progress([row(10, 1.0), row(40, 2.0, exchange=0.25, data=0.25)])
    assert (worker.values["steps_per_s"], worker.values["samples_per_s"]) == (30.0, 300.0)
    assert worker.compute_share == pytest.approx(0.5) and worker.measures_data
    assert worker.mean_rates == (200.0, 20.0, 0.75)
    worker.set_state("done", 103.0)
    assert (worker.values["steps_per_s"], worker.compute_share) == (0.0, 0.0)


def test_intervals_hold_what_was_done_between_rows_also_across_two_reads():
    worker = WorkerState()
    worker.progress([row(1, 1.0)])
    intervals = worker.progress([row(3, 2.0, others=0.5), row(6, 4.0, others=0.5)])
    assert intervals.seconds.tolist() == [1.0, 2.0]
    assert intervals.split[0].tolist() == [0.5, 2.0] and intervals.split[3].tolist() == [0.5, 0.0]
    assert intervals.samples.tolist() == [30, 60]


def test_waits_longer_than_the_interval_make_no_negative_time():
    worker = WorkerState()
    intervals = worker.progress([row(1, 1.0, exchange=3.0)])
    assert intervals.split.min() == 0.0 and worker.now.split["compute"] == 0.0


def test_a_worker_that_joins_again_adds_to_its_earlier_lives():
    worker = WorkerState()
    for life in (1, 2):
        worker.join({"event": "join", "timestamp": 100.0 * life})
        worker.progress([row(10, 1.0)])
    assert (worker.lives, worker.now.step, worker.total.step, worker.total.samples) == (2, 10, 20, 200)
    assert worker.progress([row(11, 2.0)]).samples.tolist() == [210]


def test_the_newest_known_value_is_kept_where_rows_know_none():
    worker = WorkerState()
    worker.progress([row(1, 1.0, staleness=2.0), row(2, 2.0), row(3, 3.0)])
    assert worker.values["staleness"] == 2.0
    worker.progress([row(4, 4.0)])
    assert worker.values["staleness"] == 2.0


def test_whom_a_worker_waits_for_is_said_until_it_goes_on():
    worker = WorkerState("training")
    worker.wait({"event": "waiting", "for": [], "seconds": 3.0})
    assert worker.state_text == "waiting for others (3 s)"
    worker.wait({"event": "waiting", "for": [1, 2], "seconds": 4.4})
    assert worker.state_text == "waiting for workers 1, 2 (4 s)"
    worker.progress([row(1, 1.0)])
    assert worker.state_text == "training"


def test_a_killed_worker_says_after_how_long():
    assert WorkerState("killed", killed_after_s=10.4).state_text == "killed after 10 s"
