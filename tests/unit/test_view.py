"""What is printed of a run where there is no terminal."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from maniple.launch.view import Lines
from maniple.story import Standing, Totals
from maniple.story.standing import Counts


@dataclass
class Board:
    """One that is as the test says."""

    standings: dict[int, Standing]
    epochs: float = 0.0
    validations: int = 0
    goodput: float = 0.9
    bars: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def totals(self) -> Totals:
        steps = sum(one.now.step for one in self.standings.values())
        return Totals(workers=len(self.standings), steps=steps, steps_per_s=1.0, goodput=self.goodput)


class Watch:
    """A view and the seconds that pass."""

    def __init__(self, capsys: pytest.CaptureFixture[str], board: Board) -> None:
        self.now, self.board, self._capsys = 0.0, board, capsys
        self.view = Lines(clock=lambda: self.now)

    def lines(self, at: float, *, is_last: bool = False) -> list[str]:
        """What is printed at that time."""
        self.now = at
        self.view.show(self.board, [], is_last=is_last)
        return self._capsys.readouterr().out.splitlines()


def training(step: int) -> Standing:
    return Standing("training", Counts(step=step))


@pytest.fixture
def watch(capsys):
    return Watch(capsys, Board({0: training(0), 1: training(0)}))


def test_a_row_that_says_the_same_again_is_not_printed(watch):
    assert len(watch.lines(5.0)) == 2
    for at in range(6, 400):
        assert watch.lines(float(at)) == []


def test_rows_come_less_and_less_often(watch):
    printed = []
    for at in range(1200):
        watch.board.standings = {0: training(at), 1: training(at)}
        if watch.lines(float(at)):
            printed.append(at)
    between = [b - a for a, b in pairwise(printed)]
    assert printed[1] == 5 and between == sorted(between) and between[-1] == 60 and len(printed) < 30


def test_a_worker_that_dies_is_told_of_at_once_and_alone(watch):
    watch.lines(0.0)
    watch.board.standings = {0: training(7), 1: Standing("dead", Counts(step=6))}
    (line,) = watch.lines(0.2)
    assert line.startswith("W1 : state dead")


@pytest.mark.parametrize("what", ["epochs", "validations"])
def test_an_epoch_and_a_validation_are_told_of_but_not_every_second(watch, what):
    printed = []
    for at in range(2000):
        setattr(watch.board, what, at // 25)
        watch.board.standings = {0: training(at), 1: training(at)}
        printed += [at] * bool(watch.lines(float(at)))
    assert printed[-8:] == [1975 - 25 * k for k in reversed(range(8))]
    printed.clear()
    for at in range(2000, 2060):
        setattr(watch.board, what, 10 * at)
        watch.board.standings = {0: training(at), 1: training(at)}
        printed += [at] * bool(watch.lines(float(at)))
    assert len(printed) <= 12


def test_nothing_is_printed_of_those_who_are_done_and_the_end_says_what_is_new(watch):
    watch.lines(0.0)
    watch.board.standings = {rank: Standing("done", Counts(step=9)) for rank in range(2)}
    assert [line[:15] for line in watch.lines(5.0)] == ["W0 : state done", "W1 : state done", "all: 1 steps/s "]
    watch.board.goodput = 0.5  # of a run that has not ended yet
    assert watch.lines(100.0) == [] == watch.lines(200.0, is_last=True)


def test_where_a_run_stands_is_told_in_one_look(watch):
    watch.board.standings = {0: training(3), 1: Standing("done", Counts(step=9))}
    assert len(watch.lines(0.0, is_last=True)) == 3
