"""The center in MPI windows: the ranks of one job hold it together (`spread`), and no server is needed.

An exchange locks a bundle of parameters (compare and swap), reads a piece, applies the rule here, writes the piece, and
so on; then it counts the version and gives the lock back. MPI's own lock would be one per rank, and knows neither a
deadline nor its holder. Nobody can die in the middle: a rank that does ends the job.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from maniple.center.locks import Patience, turns
from maniple.center.spread import LIVE, LOCK, VERSION, Bundle, Part, Piece, Spread
from maniple.contracts import Array, Exchanger, Model, Moment, OnValue, Outcome
from maniple.layout import Layout

LOCK_TIMEOUT_S = 60.0

Apply = Callable[[int, Array, slice, Array], bool]  # parameter, replica, which elements, the center's; is it clean?
Finish = Callable[[int, Array], None]


class Mpi:
    """One worker's view of a center in windows (`contracts.Center`)."""

    def __init__(self, spread: Spread, *, rank: int, lock: bool = True) -> None:
        self.name, self.note, self.layout = spread.name, spread.note, spread.layout
        self._bundles, self._window, self._size = spread.bundles, spread.window, spread.job.size
        self._rank, self._lock = rank, lock
        self._version = np.zeros(1, np.int64)
        stage_bytes = max(piece.size_bytes for bundle in self._bundles for piece in bundle)
        self._stages = np.empty(stage_bytes, np.uint8), np.empty(stage_bytes, np.uint8)
        self._begun: set[int] = set()  # the ranks with which something was begun that may not be done
        self._holder = 0  # of the lock that was asked for last
        self._seen = self._versions()
        self._is_open = True

    @property
    def live(self) -> int:
        """p, the workers that exchange now."""
        return self._window.total(0, LIVE)

    @property
    def versions(self) -> list[int]:
        """Twice the number of times that each parameter was written."""
        found = dict[int, int]()
        for bundle, version in zip(self._bundles, self._versions(), strict=True):
            found |= dict.fromkeys((part.parameter for part in bundle[0].parts), version)
        return [found[i] for i in range(len(self.layout.entries))]

    def exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome:
        """Apply `rule` to every parameter of `model` and of the center."""

        def apply(i: int, x: Array, elements: slice, c: Array) -> bool:
            return rule.exchange(x[elements], c, None if memory is None else memory[i][elements], moment)

        def finish(i: int, x: Array) -> None:
            if self.layout.is_half(i):
                self.layout.round(i, x)
                if memory is not None:
                    rule.rounded(x, memory[i])

        return self._pass(model, apply, finish, ways=2, moment=moment)

    def pull(self, model: Model, on_value: OnValue | None = None, *, is_look: bool = False) -> Outcome:
        """Set `model` to the center; `on_value` sees each parameter's value meanwhile. A look is no news."""

        def apply(i: int, x: Array, elements: slice, c: Array) -> bool:
            del i
            x[elements] = c
            return True

        def finish(i: int, x: Array) -> None:
            self.layout.round(i, x)
            if on_value is not None:
                on_value(i, x)

        return self._pass(model, apply, finish, writes=False, is_look=is_look)

    def push(self, model: Model, on_value: OnValue | None = None) -> Outcome:
        """Set the center to `model`, but for parameters that are not finite; `on_value` as in `pull`."""
        is_finite = True

        def apply(i: int, x: Array, elements: slice, c: Array) -> bool:
            nonlocal is_finite
            del i
            if elements.start == 0:
                is_finite = bool(np.isfinite(x).all())
            if is_finite:
                c[:] = x[elements]
            return is_finite

        def finish(i: int, x: Array) -> None:
            if on_value is not None and is_finite:
                on_value(i, x)

        return self._pass(model, apply, finish)

    def read(self, i: int, meanwhile: Callable[[], None] | None = None) -> Array:
        """A copy of parameter i, in its shape; `meanwhile` is called while nobody else can write it."""
        dtype, start, stop = self.layout.places[i]
        value, patience = np.empty(stop - start, dtype), Patience(LOCK_TIMEOUT_S)
        found = [(k, piece, part) for k, bundle in enumerate(self._bundles) for piece, part in _parts(bundle, i)]
        while not self._take(found[0][0]):
            patience.wait(self._describe(found[0][0]))
        try:
            for _, piece, part in found:
                self._get(piece.rank, piece.offset + part.start, value[part.elements])
            self._settle()
            if meanwhile is not None:
                meanwhile()
        finally:
            self._give(found[0][0])
        return value.reshape(self.layout.entries[i].shape)

    def release(self) -> None:
        """Nothing is kept that could come back."""

    def close(self) -> None:
        """Exchange no more. The memory stays, for the others."""
        if self._is_open:
            self._is_open = False
            self._window.add(0, LIVE, -1)

    def _pass(
        self,
        model: Model,
        apply: Apply,
        finish: Finish,
        *,
        writes: bool = True,
        ways: int = 1,
        is_look: bool = False,
        moment: Moment | None = None,
    ) -> Outcome:
        outcome = Outcome(size_bytes=ways * self.layout.size_bytes)
        moment, walk = moment or Moment(), _Walk(self.layout, model, apply, finish, outcome)
        model.begin()
        stale = 0
        with closing(self._locked()) as order:  # an error on the way gives the lock back at once
            for k in order:
                home = self._bundles[k][0]
                self._get(home.rank, home.offset + VERSION, self._version)  # it is there with the first piece
                for piece, stage in self._in_turn(self._bundles[k], writes=writes):
                    moment.staleness = max(0, int(self._version[0]) - self._seen[k]) // 2
                    walk.over(piece, stage)
                stale += moment.staleness * len(home.parts)
                if writes:
                    self._version += 2
                    self._put(home.rank, home.offset + VERSION, self._version)
                    self._settle()
                if not is_look:
                    self._seen[k] = int(self._version[0])
        outcome.staleness = stale / len(self.layout.entries)
        return outcome

    def _in_turn(self, bundle: Bundle, *, writes: bool) -> Generator[tuple[Piece, Array]]:
        """Each piece, read; it is written when the next one is asked for, which is on its way by then."""
        stages = [self._stages[k % 2][: piece.size_bytes] for k, piece in enumerate(bundle)]
        self._get(bundle[0].rank, bundle[0].offset, stages[0])
        for k, piece in enumerate(bundle):
            self._settle()  # this piece has come, and the one before has gone
            if k + 1 < len(bundle):
                self._get(bundle[k + 1].rank, bundle[k + 1].offset, stages[k + 1])
            yield piece, stages[k]
            if writes:
                self._put(piece.rank, piece.offset, stages[k])

    def _locked(self) -> Generator[int]:
        """Each bundle once, locked while it is out; those that others hold come later."""
        count = len(self._bundles)
        start = self._rank * count // self._size % count  # apart, so that workers seldom meet
        if not self._lock:
            return (k for k in [*range(start, count), *range(start)])
        return turns(count, start, take=self._take, give=self._give, describe=self._describe, timeout_s=LOCK_TIMEOUT_S)

    def _take(self, k: int) -> bool:
        home = self._bundles[k][0]
        self._holder = self._window.swap(home.rank, home.offset + LOCK, 0, self._rank + 1)
        return self._holder == 0

    def _give(self, k: int) -> None:
        self._settle()
        home = self._bundles[k][0]
        self._window.swap(home.rank, home.offset + LOCK, self._rank + 1, 0)

    def _describe(self, k: int) -> str:
        name = self.layout.entries[self._bundles[k][0].parts[0].parameter].name
        return f"the lock of parameter {name!r}, held by worker {self._holder - 1}"

    def _versions(self) -> list[int]:
        """Of each bundle."""
        versions = np.zeros(len(self._bundles), np.int64)
        for k, (home, *_) in enumerate(self._bundles):
            self._get(home.rank, home.offset + VERSION, versions[k : k + 1])
        self._settle()
        return versions.tolist()

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


@dataclass
class _Walk:
    """One pass over a model, piece by piece."""

    layout: Layout
    model: Model
    apply: Apply
    finish: Finish
    outcome: Outcome

    def over(self, piece: Piece, stage: Array) -> None:
        """Apply to all parts of a piece; a parameter begins with its first part, and is finished with its last."""
        for part in piece.parts:
            i, elements = part.parameter, part.elements
            entry = self.layout.entries[i]
            if elements.start == 0:
                self._x = self.model.array(i)
            c = part.within(stage, self.layout.places[i][0])
            if not self.apply(i, self._x, elements, c) and entry.name not in self.outcome.refused[-1:]:
                self.outcome.refused.append(entry.name)
            if elements.stop == entry.size:
                self.finish(i, self._x)
                self.model.commit(i)


def _parts(bundle: Bundle, i: int) -> list[tuple[Piece, Part]]:
    """The parts of parameter i in a bundle, and where they lie."""
    return [(piece, part) for piece in bundle for part in piece.parts if part.parameter == i]
