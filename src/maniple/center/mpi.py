"""The center in MPI windows: the ranks of one job hold it together, and no server is needed.

Each parameter is cut into pieces, and each piece lies in the memory of the rank that has least so far; so memory and
traffic are shared evenly, whatever the sizes are. The first piece has two words before it: the lock, which is the
holder's rank + 1 or 0, and the version, two steps per write.

An exchange locks a parameter (compare and swap), reads a piece, applies the rule here, writes the piece, and so on;
then it counts the version and gives the lock back. MPI's own lock would be one per rank, not per parameter, and knows
neither a deadline nor its holder. Nobody can die in the middle: a rank that does ends the job.
"""

import heapq
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from maniple.center.job import Job
from maniple.center.locks import Patience, turns
from maniple.center.memory import require_finite
from maniple.center.window import WORD
from maniple.contracts import Array, Exchanger, Model, Moment, OnValue, Outcome
from maniple.errors import ManipleError
from maniple.layout import Layout

PIECE_BYTES = 2 << 20  # what a worker holds of the center at a time
LOCK_TIMEOUT_S = 60.0
_LIVE = 0  # at rank 0: how many workers exchange
_HEAD = 64  # before a rank's pieces, and before a first piece
_LOCK, _VERSION = -64, -56  # from a first piece on


class Piece(NamedTuple):
    """A part of one parameter: where it lies, and which elements it has."""

    rank: int
    offset: int
    part: slice


def deal(layout: Layout, ranks: int) -> tuple[list[list[Piece]], list[int]]:
    """The pieces of each parameter, and the bytes that each rank gives: the same on all ranks."""
    least = [(_HEAD, rank) for rank in range(ranks)]
    pieces: list[list[Piece]] = []
    for dtype, start, stop in layout.places:
        size, itemsize, mine = stop - start, np.dtype(dtype).itemsize, list[Piece]()
        step = PIECE_BYTES // itemsize
        for begin in range(0, max(1, size), step):
            end, rank = heapq.heappop(least)
            offset = end + (0 if begin else _HEAD)
            part = slice(begin, min(size, begin + step))
            mine.append(Piece(rank, offset, part))
            used = offset + (part.stop - part.start) * itemsize
            heapq.heappush(least, (-(-used // _HEAD) * _HEAD, rank))
        pieces.append(mine)
    return pieces, [end for end, _ in sorted(least, key=lambda one: one[1])]


class Spread:
    """The memory of one center, over all ranks."""

    def __init__(self, job: Job, name: str, layout: Layout, note: str) -> None:
        self.job, self.name, self.layout, self.note = job, name, layout, note
        self.pieces, sizes = deal(layout, job.size)
        self.window = job.new_window(sizes[job.rank])

    @classmethod
    def make(cls, job: Job, name: str, model: Model, note: str) -> "Spread":
        """Make a center of rank 0's values. All ranks call it; those whose parameters differ are refused by all."""
        job.meet(f"share {name}")
        layout = Layout(model.entries, is_numeric=True)
        first = Layout.from_table(job.by_first(lambda: _checked(layout, model)))
        job.agree(_difference(layout, first))
        spread = cls(job, name, layout, note)
        if job.rank == 0:
            spread._fill(model)
        job.meet(f"begin with {name}")
        return spread

    def _fill(self, model: Model) -> None:
        self.window.add(0, _LIVE, self.job.size)
        model.begin()
        for i, pieces in enumerate(self.pieces):
            value = model.array(i)
            for piece in pieces:
                self.window.put(piece.rank, piece.offset, value[piece.part])
                self.window.flush(piece.rank)


class Mpi:
    """One worker's view of a center in windows (`contracts.Center`)."""

    def __init__(self, spread: Spread, *, rank: int, lock: bool = True) -> None:
        self.name, self.note, self.layout = spread.name, spread.note, spread.layout
        self._pieces, self._window, self._size = spread.pieces, spread.window, spread.job.size
        self._rank, self._lock = rank, lock
        self._version = np.zeros(1, np.int64)
        stage_bytes = min(PIECE_BYTES, max(WORD, self.layout.size_bytes))
        self._stages = np.empty(stage_bytes, np.uint8), np.empty(stage_bytes, np.uint8)
        self._begun: set[int] = set()  # the ranks with which something was begun that may not be done
        self._holder = 0  # of the lock that was asked for last
        self._seen = self.versions
        self._is_open = True

    @property
    def live(self) -> int:
        """p, the workers that exchange now."""
        return self._window.total(0, _LIVE)

    @property
    def versions(self) -> list[int]:
        """Twice the number of times that each parameter was written."""
        versions = np.zeros(len(self._pieces), np.int64)
        for i, (home, *_) in enumerate(self._pieces):
            self._get(home.rank, home.offset + _VERSION, versions[i : i + 1])
        self._settle()
        return versions.tolist()

    def exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome:
        """Apply `rule` to every parameter of `model` and of the center."""

        def apply(i: int, x: Array) -> bool:
            past, is_clean = None if memory is None else memory[i], True
            for part, c in self._in_turn(i):
                moment.staleness = self._staleness(i)
                is_clean &= rule.exchange(x[part], c, None if past is None else past[part], moment)
            if self.layout.is_half(i):
                self.layout.round(i, x)
                if past is not None:
                    rule.rounded(x, past)
            return is_clean

        return self._pass(model, apply, ways=2)

    def pull(self, model: Model, on_value: OnValue | None = None, *, is_look: bool = False) -> Outcome:
        """Set `model` to the center; `on_value` sees each parameter's value meanwhile. A look is no news."""

        def apply(i: int, x: Array) -> bool:
            self._load(i, x)
            self.layout.round(i, x)
            if on_value is not None:
                on_value(i, x)
            return True

        return self._pass(model, apply, writes=False, is_look=is_look)

    def push(self, model: Model, on_value: OnValue | None = None) -> Outcome:
        """Set the center to `model`, but for parameters that are not finite; `on_value` as in `pull`."""

        def apply(i: int, x: Array) -> bool:
            self._settle()
            if not np.isfinite(x).all():
                return False
            for piece in self._pieces[i]:
                self._put(piece.rank, piece.offset, x[piece.part])
            if on_value is not None:
                on_value(i, x)
            return True

        return self._pass(model, apply)

    def read(self, i: int, meanwhile: Callable[[], None] | None = None) -> Array:
        """A copy of parameter i, in its shape; `meanwhile` is called while nobody else can write it."""
        dtype, start, stop = self.layout.places[i]
        value, patience = np.empty(stop - start, dtype), Patience(LOCK_TIMEOUT_S)
        while not self._take(i):
            patience.wait(self._describe(i))
        try:
            self._load(i, value)
            if meanwhile is not None:
                meanwhile()
        finally:
            self._give(i)
        return value.reshape(self.layout.entries[i].shape)

    def release(self) -> None:
        """Nothing is kept that could come back."""

    def close(self) -> None:
        """Exchange no more. The memory stays, for the others."""
        if self._is_open:
            self._is_open = False
            self._window.add(0, _LIVE, -1)

    def _pass(
        self,
        model: Model,
        apply: Callable[[int, Array], bool],
        *,
        writes: bool = True,
        ways: int = 1,
        is_look: bool = False,
    ) -> Outcome:
        outcome = Outcome(size_bytes=ways * self.layout.size_bytes)
        model.begin()
        stale = 0
        with closing(self._locked()) as order:  # an error on the way gives the lock back at once
            for i in order:
                home = self._pieces[i][0]
                self._get(home.rank, home.offset + _VERSION, self._version)  # is there with the first piece
                if not apply(i, model.array(i)):
                    outcome.refused.append(self.layout.entries[i].name)
                stale += self._staleness(i)
                if writes:
                    self._version += 2
                    self._put(home.rank, home.offset + _VERSION, self._version)
                    self._settle()
                if not is_look:
                    self._seen[i] = int(self._version[0])
                model.commit(i)
        outcome.staleness = stale / len(self._pieces)
        return outcome

    def _locked(self) -> Generator[int]:
        """Each parameter once, locked while it is out; those that others hold come later."""
        count = len(self._pieces)
        start = self._rank * count // self._size % count  # apart, so that workers seldom meet
        if not self._lock:
            return (i for i in [*range(start, count), *range(start)])
        return turns(count, start, take=self._take, give=self._give, describe=self._describe, timeout_s=LOCK_TIMEOUT_S)

    def _take(self, i: int) -> bool:
        home = self._pieces[i][0]
        self._holder = self._window.swap(home.rank, home.offset + _LOCK, 0, self._rank + 1)
        return self._holder == 0

    def _give(self, i: int) -> None:
        self._settle()
        home = self._pieces[i][0]
        self._window.swap(home.rank, home.offset + _LOCK, self._rank + 1, 0)

    def _describe(self, i: int) -> str:
        return f"the lock of parameter {self.layout.entries[i].name!r}, held by worker {self._holder - 1}"

    def _staleness(self, i: int) -> int:
        return max(0, int(self._version[0]) - self._seen[i]) // 2

    def _load(self, i: int, x: Array) -> None:
        """Read all of parameter i."""
        for piece in self._pieces[i]:
            self._get(piece.rank, piece.offset, x[piece.part])
        self._settle()

    def _in_turn(self, i: int) -> Generator[tuple[slice, Array]]:
        """Each piece of parameter i, read, and written back when the next one is asked for; that one is on its way."""
        dtype, pieces = self.layout.places[i][0], self._pieces[i]
        stages = [stage[: stage.size // 8 * 8].view(dtype) for stage in self._stages]
        values = [stages[k % 2][: piece.part.stop - piece.part.start] for k, piece in enumerate(pieces)]
        self._get(pieces[0].rank, pieces[0].offset, values[0])
        for k, piece in enumerate(pieces):
            self._window.flush(piece.rank)
            if k + 1 < len(pieces):
                self._settle()  # the other stage may still be on its way to the center
                self._get(pieces[k + 1].rank, pieces[k + 1].offset, values[k + 1])
            yield piece.part, values[k]
            self._put(piece.rank, piece.offset, values[k])

    def _get(self, rank: int, offset: int, into: Array) -> None:
        self._window.get(rank, offset, into)
        self._begun.add(rank)

    def _put(self, rank: int, offset: int, value: Array) -> None:
        self._window.put(rank, offset, value)
        self._begun.add(rank)

    def _settle(self) -> None:
        """Wait until all that was begun is done."""
        for rank in self._begun:
            self._window.flush(rank)
        self._begun.clear()


def _checked(layout: Layout, model: Model) -> bytes:
    """The table of a model that may become the center."""
    model.begin()
    for i, entry in enumerate(layout.entries):
        require_finite(entry, model.array(i))
    return layout.table


def _difference(layout: Layout, first: Layout) -> ManipleError | None:
    try:
        layout.require(first, "worker 0")
    except ManipleError as error:
        return error
    return None
