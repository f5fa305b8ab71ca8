"""The memory of a center that lies in MPI windows, spread over the ranks of a job.

Parameters are put together to bundles of at most 2 MB, which are exchanged under one lock: what counts on a network is
how often something is asked, not how much. A larger parameter is a bundle of its own, of several pieces. Each piece
lies in the memory of the rank that has least so far; so memory and traffic are shared evenly, whatever the sizes are.
Before the first piece of a bundle stand two words: its lock, which is the holder's rank + 1 or 0, and its version, two
steps per write.
"""

import heapq
from typing import NamedTuple

import numpy as np

from maniple.center.job import Job
from maniple.center.memory import require_finite
from maniple.contracts import Array, Model
from maniple.errors import ManipleError
from maniple.layout import Layout

PIECE_BYTES = 2 << 20  # what a worker holds of the center at a time
LIVE = 0  # where rank 0 counts the workers that exchange
LOCK, VERSION = -64, -56  # from the first piece of a bundle on
_ALIGNED = 64


class Part(NamedTuple):
    """Elements of one parameter, and the byte of a piece at which they begin."""

    parameter: int
    elements: slice
    start: int

    def within(self, stage: Array, dtype: str) -> Array:
        """These elements, in memory that holds the piece."""
        size_bytes = (self.elements.stop - self.elements.start) * np.dtype(dtype).itemsize
        return stage[self.start : self.start + size_bytes].view(dtype)


class Piece(NamedTuple):
    """Bytes that lie together, at one rank."""

    rank: int
    offset: int
    size_bytes: int
    parts: list[Part]


Bundle = list[Piece]


def bundled(layout: Layout) -> list[list[list[Part]]]:
    """The parameters as bundles of pieces of parts, without a place yet."""
    bundles: list[list[list[Part]]] = []
    end = full = PIECE_BYTES + 1
    for i, (dtype, start, stop) in enumerate(layout.places):
        size, itemsize = stop - start, np.dtype(dtype).itemsize
        if size * itemsize > PIECE_BYTES:
            step = PIECE_BYTES // itemsize
            cuts = [slice(begin, min(size, begin + step)) for begin in range(0, size, step)]
            bundles.append([[Part(i, cut, 0)] for cut in cuts])
            end = full
            continue
        if end + size * itemsize > PIECE_BYTES:
            bundles.append([[]])
            end = 0
        bundles[-1][0].append(Part(i, slice(0, size), end))
        end = _aligned(end + size * itemsize)
    return bundles


def deal(layout: Layout, ranks: int) -> tuple[list[Bundle], list[int]]:
    """The bundles in their places, and the bytes that each rank gives: the same on all ranks."""
    least = [(_ALIGNED, rank) for rank in range(ranks)]
    bundles: list[Bundle] = []
    for bundle in bundled(layout):
        placed: Bundle = []
        for parts in bundle:
            end, rank = heapq.heappop(least)
            offset = end if placed else end + _ALIGNED
            last = parts[-1]
            itemsize = np.dtype(layout.places[last.parameter][0]).itemsize
            size_bytes = last.start + (last.elements.stop - last.elements.start) * itemsize
            placed.append(Piece(rank, offset, size_bytes, parts))
            heapq.heappush(least, (_aligned(offset + size_bytes), rank))
        bundles.append(placed)
    return bundles, [end for end, _ in sorted(least, key=lambda one: one[1])]


class Spread:
    """The memory of one center, over all ranks."""

    def __init__(self, job: Job, name: str, layout: Layout, note: str) -> None:
        self.job, self.name, self.layout, self.note = job, name, layout, note
        self.bundles, sizes = deal(layout, job.size)
        self.window = job.new_window(sizes[job.rank])

    @classmethod
    def make(cls, job: Job, name: str, model: Model, note: str) -> "Spread":
        """Make a center of rank 0's values. All ranks call it; if one's parameters differ, all are told."""
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
        self.window.add(0, LIVE, self.job.size)
        model.begin()
        for piece in (piece for bundle in self.bundles for piece in bundle):
            for part in piece.parts:
                value = model.array(part.parameter)[part.elements]
                self.window.put(piece.rank, piece.offset + part.start, value)
                self.window.flush(piece.rank)


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


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED
