"""The state of a run in a terminal, as a table and as plain lines."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from rich.console import Console

from maniple.clock import clock
from maniple.launch.terminal import (
    PlainDisplay,
    choose_workers,
    columns,
    live_table,
    plain_lines,
    summarize_rest,
    total_line,
)
from maniple.monitor import Totals, WorkerState
from maniple.monitor.measures import initial_values
from maniple.monitor.target import TargetStatus
from maniple.monitor.worker_state import Counts
from tests.simulated_clock import SimulatedClock


def worker(state: str, counts: Counts | None = None, **values: float) -> WorkerState:
    return WorkerState(state, counts or Counts(), values=initial_values() | values)


TRAINING = worker("training", Counts(step=1200, samples=4800), samples_per_s=1234.5, loss=0.12345, sync_share=0.051)


def drawn(workers: dict[int, WorkerState], totals: Totals, height: int, **options) -> str:
    console = Console(width=100, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(live_table(workers, totals, height=height, **options))
    return capture.get()


def test_a_worker_in_columns():
    assert columns(TRAINING) == {
        "state": "training", "step": "1,200", "speed": "1,234 samples/s", "loss": "0.1235", "sync": "5.1%",
        "staleness": "–",
    }  # fmt: skip


def test_what_a_gate_does_is_shown_in_runs_that_have_one():
    gated = WorkerState("training")
    gated.values["gated"] = 3
    assert columns(gated)["gated"] == "3"
    assert columns(TRAINING, [gated])["gated"] == "–"
    assert "gated" not in columns(TRAINING)


def test_steps_are_shown_where_nobody_counts_samples():
    assert columns(worker("training", Counts(step=5), steps_per_s=7.0))["speed"] == "7 steps/s"


def test_a_restarted_worker_shows_its_life():
    assert columns(WorkerState("training", lives=3))["state"] == "training (life 3)"


def test_who_waits_says_for_whom_and_for_how_long():
    one = worker("training", samples_per_s=33.0)
    one.wait({"event": "waiting", "for": [2], "seconds": 14.2})
    assert columns(one)["state"] == "waiting for worker 2 (14 s)" and columns(one)["speed"] == "0 steps/s"
    one.wait({"event": "waiting", "for": [0, 2], "seconds": 16.2})
    assert columns(one)["state"] == "waiting for workers 0, 2 (16 s)"
    one.wait({"event": "waited", "for": [0, 2], "seconds": 17.0})
    assert columns(one)["state"] == "training"
    one.wait({"event": "waiting", "for": [2], "seconds": 2.0})
    one.set_state("dead", 1.0)
    assert columns(one)["state"] == "dead"


def test_who_is_done_shows_its_mean_speed():
    assert columns(WorkerState("done", Counts(samples=500, elapsed_s=10.0)))["speed"] == "50 samples/s"


def test_the_run_in_one_line():
    totals = Totals(live=3, samples=9, samples_per_s=5000.4, workers=4, busy_workers=3.71, goodput=0.934, version=12345)
    assert total_line(totals) == "5,000 samples/s, busy 3.71 of 4 workers, goodput 93%, center version 12,345"
    assert total_line(replace(totals, live=0)).startswith("5,000 samples/s in the mean, busy 3.71")


def test_a_target_has_a_line_of_its_own_and_takes_no_space_from_those_in_trouble():
    crowd = {rank: WorkerState("dead" if rank == 60 else "training") for rank in range(64)}
    totals = Totals(steps=1, speedup=1.834, target=TargetStatus("loss", 0.2, True, best=0.31))
    text = drawn(crowd, totals, height=24).splitlines()
    assert len(text) <= 24 and text[-1].rstrip() == "target loss 0.2: not yet, best 0.31"
    assert "speed-up 1.83 over one worker" in text[-2]
    assert plain_lines({0: TRAINING}, totals)[-1] == "target loss 0.2: not yet, best 0.31"
    reached = replace(totals, target=TargetStatus("loss", 0.2, True, reached_s=1234.56))
    assert plain_lines({0: TRAINING}, reached)[-1] == "target loss 0.2: reached after 1,234.6 s"


def test_a_crowd_fits_into_the_terminal_and_those_in_trouble_are_seen():
    crowd = {rank: WorkerState("dead" if rank == 60 else "training") for rank in range(64)}
    text = drawn(crowd, Totals(steps=1), height=24)
    assert len(text.splitlines()) <= 24
    assert "W60" in text and "dead" in text
    assert "43 more: 43 training" in text


def test_all_are_shown_where_there_is_space():
    few = dict.fromkeys(range(3), TRAINING)
    assert choose_workers(few, 10) == [0, 1, 2]
    assert summarize_rest(few, [0, 1, 2]) == ""
    text = drawn(few, Totals(), height=24)
    assert "W2" in text and "more" not in text


def test_progress_bars_are_below_the_workers_and_leave_them_space():
    few = dict.fromkeys(range(2), TRAINING)
    bars = {1: ("epochs 1/3", "steps 5/9"), 0: ("epochs 2/3", "s" * 200)}
    text = drawn(few, Totals(steps=1), height=24, bars=bars).splitlines()
    assert text[3:5] == ["W0 | epochs 2/3", "W0 | " + "s" * 94 + "…"] and text[5:7] == [
        "W1 | epochs 1/3",
        "W1 | steps 5/9",
    ]
    assert [line[:7] for line in drawn(few, Totals(steps=1), height=7, bars=bars).splitlines()[3:5]] == [
        "W0 | ss", "W1 | st",
    ]  # fmt: skip
    crowd = dict.fromkeys(range(64), TRAINING)
    many = drawn(crowd, Totals(steps=1), height=24, bars=dict.fromkeys(range(64), ("a bar",)))
    assert len(many.splitlines()) <= 24 and "a bar" not in many


def test_plain_lines_say_the_same():
    lines = plain_lines({0: TRAINING}, Totals(steps=1, samples=1, samples_per_s=2.0))
    assert lines[0] == "W0 : state training step 1,200 speed 1,234 samples/s loss 0.1235 sync 5.1% staleness –"
    assert lines[1].startswith("all: 2 samples/s")


# Without a terminal: plain lines


@dataclass
class Monitor:
    """A run's state as the test sets it."""

    workers: dict[int, WorkerState]
    epochs: float = 0.0
    validations: int = 0
    goodput: float = 0.9
    bars: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def totals(self) -> Totals:
        steps = sum(one.now.step for one in self.workers.values())
        return Totals(workers=len(self.workers), steps=steps, steps_per_s=1.0, goodput=self.goodput)


class Watch(SimulatedClock):
    """A plain display and the seconds that pass."""

    def __init__(self, capsys: pytest.CaptureFixture[str], board: Monitor) -> None:
        super().__init__()
        self.board, self._capsys = board, capsys
        with clock.replaced(self):
            self.display = PlainDisplay()

    def lines(self, at: float, *, is_last: bool = False) -> list[str]:
        """What is printed at that time."""
        self.now = at
        with clock.replaced(self):
            self.display.show(self.board, [], is_last=is_last)
        return self._capsys.readouterr().out.splitlines()


def training(step: int) -> WorkerState:
    return WorkerState("training", Counts(step=step))


@pytest.fixture
def watch(capsys):
    return Watch(capsys, Monitor({0: training(0), 1: training(0)}))


def test_a_row_that_says_the_same_again_is_not_printed(watch):
    assert len(watch.lines(5.0)) == 2
    for at in range(6, 400):
        assert watch.lines(float(at)) == []


def test_rows_come_less_and_less_often(watch):
    printed = []
    for at in range(1200):
        watch.board.workers = {0: training(at), 1: training(at)}
        if watch.lines(float(at)):
            printed.append(at)
    between = [b - a for a, b in pairwise(printed)]
    assert printed[1] == 5 and between == sorted(between) and between[-1] == 60 and len(printed) < 30


def test_a_worker_that_dies_is_reported_at_once_and_alone(watch):
    watch.lines(0.0)
    watch.board.workers = {0: training(7), 1: WorkerState("dead", Counts(step=6))}
    (line,) = watch.lines(0.2)
    assert line.startswith("W1 : state dead")


@pytest.mark.parametrize("what", ["epochs", "validations"])
def test_an_epoch_and_a_validation_are_reported_but_not_every_second(watch, what):
    printed = []
    for at in range(2000):
        setattr(watch.board, what, at // 25)
        watch.board.workers = {0: training(at), 1: training(at)}
        printed += [at] * bool(watch.lines(float(at)))
    assert printed[-8:] == [1975 - 25 * k for k in reversed(range(8))]
    printed.clear()
    for at in range(2000, 2060):
        setattr(watch.board, what, 10 * at)
        watch.board.workers = {0: training(at), 1: training(at)}
        printed += [at] * bool(watch.lines(float(at)))
    assert len(printed) <= 12


def test_nothing_is_printed_of_those_who_are_done_and_the_end_says_what_is_new(watch):
    watch.lines(0.0)
    watch.board.workers = {rank: WorkerState("done", Counts(step=9)) for rank in range(2)}
    assert [line[:15] for line in watch.lines(5.0)] == ["W0 : state done", "W1 : state done", "all: 1 steps/s "]
    watch.board.goodput = 0.5  # of a run that has not ended yet
    assert watch.lines(100.0) == [] == watch.lines(200.0, is_last=True)


def test_the_state_of_a_run_is_printed_at_once(watch):
    watch.board.workers = {0: training(3), 1: WorkerState("done", Counts(step=9))}
    assert len(watch.lines(0.0, is_last=True)) == 3
