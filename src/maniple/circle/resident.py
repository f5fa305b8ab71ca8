"""Resident vectors: they live in their worker's slot, and each worker combines its part of everybody's, in place.

offset 0     progress, bytes of the vectors, bytes of a block
4096         the block under way
...          one vector per dtype

A worker that dies in the middle of its part has left what was done and what was not, to the block; one of the others
finishes the part, so the round is whole and has what the dead one gave to it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from maniple.circle.call import Call, check_reduction, counted, done
from maniple.circle.sums import JOURNAL_BYTES, Part, block_bytes, bounds, warm_up
from maniple.contracts import Array, Round
from maniple.errors import LayoutMismatch

if TYPE_CHECKING:
    from maniple.circle.shared import Shared

_PAGE = 4096


class InPlace:
    """This worker's vectors, and the others' as this worker sees them."""

    def __init__(self, circle: "Shared", sizes: dict[str, int]) -> None:
        self._circle, self._sizes = circle, sizes
        self._dtype, self._count = next(iter(sizes), "float32"), sum(sizes.values())
        self._bytes = sum(_aligned(np.dtype(dtype).itemsize * size) for dtype, size in sizes.items())
        self._serial, memory = circle.slots.make(_PAGE + JOURNAL_BYTES + self._bytes)
        self._own = _View(memory, sizes)
        self._own.head[1:3] = self._bytes, block_bytes()
        self._others: dict[tuple[int, int], _View] = {}
        self._under_way: tuple[tuple[int, ...], list[_View], str, list[float]] | None = None
        self._known: tuple[list[_View], int] = [], 0  # whose parts are at hand
        self._parts: list[Part] = []
        circle.roster.on_missing = self._finish_for
        warm_up(list(sizes))

    @property
    def flat(self) -> dict[str, Any]:
        """The vectors, one per dtype."""
        return self._own.flat

    def all_reduce(self, op: str, *, weight: float = 1.0, quorum: int = 0) -> Round:
        """Replace the vectors by what all workers' vectors make together."""
        for dtype in self._sizes:
            check_reduction(op, dtype, "float32")
        circle, roster = self._circle, self._circle.roster
        circle.enter_once()
        waited = roster.waited_s
        self._own.head[0] = 0
        call = Call("resident", 0, self._dtype, self._count, op, 0, "float32", weight)
        with roster.whole():
            ranks = roster.meet(call, slot=self._serial, quorum=quorum)
            told = [roster.table.weight(rank, roster.meeting) for rank in ranks]
            weights = counted(told)
            views = [self._view(rank, roster.table.slot(rank, roster.meeting)) for rank in ranks]
            if len(ranks) > 1 and (op != "mean" or sum(weights) > 0):
                self._under_way = ranks, views, op, weights
                self._combine(views, ranks.index(circle.rank), op, weights)
        roster.let_in(roster.meet(call, slot=self._serial, is_end=True))
        self._under_way = None
        return done(op, ranks, told, roster.waited_s - waited)

    def _finish_for(self, rank: int) -> bool:
        """A worker has died in the middle of a round: combine its part for it."""
        if self._under_way is None:
            return False
        ranks, views, op, weights = self._under_way
        self._combine(views, ranks.index(rank), op, weights)
        return True

    def _combine(self, views: "list[_View]", index: int, op: str, weights: list[float]) -> None:
        """Combine the part of worker `index` of all, from where it has stopped."""
        if self._known != (views, index):
            self._known, self._parts = (views, index), _parts(views, index)
        for part in self._parts:
            part.combine(op, weights)

    def _view(self, rank: int, serial: int) -> "_View":
        circle = self._circle
        if rank == circle.rank:
            return self._own
        incarnation = circle.roster.table.holder(rank)
        view = self._others.get((rank, incarnation))
        if view is None:
            for old in [key for key in self._others if key[0] == rank]:
                del self._others[old]
            memory = circle.slots.of(rank, incarnation, serial)
            head = memory[:24].view(np.int64)
            if int(head[1]) != self._bytes:
                raise LayoutMismatch(
                    f"worker {rank} brings {int(head[1])} bytes to a round, this worker {self._bytes}. "
                    "Every worker must build the same model."
                )
            view = self._others[rank, incarnation] = _View(memory, self._sizes)
        return view


class Private:
    """Vectors that travel in half precision: they are this worker's own, and copied through its slot."""

    def __init__(self, circle: "Shared", sizes: dict[str, int], wire: str) -> None:
        self._circle, self._wire = circle, wire
        self._flat = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}

    @property
    def flat(self) -> dict[str, Any]:
        """The vectors, one per dtype."""
        return self._flat

    def all_reduce(self, op: str, *, weight: float = 1.0, quorum: int = 0) -> Round:
        """Replace the vectors by what all workers' vectors make together."""
        del quorum
        result, waited_s = Round((self._circle.rank,), weight), 0.0
        for vector in self._flat.values():
            result = self._circle.all_reduce(vector, vector, op, weight=weight, wire=self._wire)
            waited_s += result.waited_s
        result.waited_s = waited_s
        self._circle.let_in()
        return result


class _View:
    """The parts of one worker's slot."""

    def __init__(self, memory: Array, sizes: dict[str, int]) -> None:
        self.head = memory[:24].view(np.int64)
        self.journal = memory[_PAGE : _PAGE + JOURNAL_BYTES]
        self.flat: dict[str, Array] = {}
        start = _PAGE + JOURNAL_BYTES
        for dtype, size in sizes.items():
            stop = start + np.dtype(dtype).itemsize * size
            self.flat[dtype] = memory[start:stop].view(dtype)
            start += _aligned(stop - start)


def _parts(views: list[_View], index: int) -> list[Part]:
    """The part of worker `index` of all, for each dtype."""
    owner, parts, base = views[index], list[Part](), 0
    for dtype in owner.flat:
        vectors = [view.flat[dtype] for view in views]
        block = owner.journal[: int(owner.head[2])].view(dtype)
        part = Part(vectors, bounds(vectors[0].size, len(views))[index], block=block, progress=owner.head, base=base)
        parts.append(part)
        base += part.blocks
    return parts


def _aligned(size: int) -> int:
    return size + -size % _PAGE
