"""Pieces: what a call in shared memory passes from worker to worker, through their slots, a few MB at a time.

Each worker's slot has two halves, used in turn: who writes a half again has met everybody since, so nobody reads it any
more. If a worker dies in the middle of a piece, the others make the piece again without it.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from maniple.circle.absence import PassedOver
from maniple.circle.call import Call, counted, done
from maniple.circle.packing import is_packed
from maniple.circle.roster import Roster
from maniple.circle.slots import Slots
from maniple.circle.sums import bounds, combine
from maniple.contracts import Array, Round
from maniple.wire.codecs import codec

_PIECE_BYTES = 4 << 20  # larger ones leave the cache, and are slower where each worker has a core

Take = Callable[[dict[int, int]], dict[int, Array]]  # from the workers' sizes to targets for what they show


class Pieces:
    """The calls of one worker, piece by piece."""

    def __init__(self, roster: Roster, slots: Slots) -> None:
        self._roster, self._slots = roster, slots
        self._serial, self._before, self._turn = 0, 0, 0
        self._slot: Array = np.empty(0, np.uint8)

    def show(self, call: Call, data: Array, take: Take) -> tuple[int, ...]:
        """Show `data`, bytes, to the others, and copy what they show to what `take` gives for it, by rank.

        Gives those who have come to the end.
        """
        roster, table = self._roster, self._roster.table
        start, longest = 0, 1
        targets: dict[int, Array] | None = None
        ranks: tuple[int, ...] = ()
        while start < longest:
            piece = data[start : start + _PIECE_BYTES]
            self._half(piece.size)[: piece.size] = piece
            ranks = roster.meet(call, slot=self._reference, expected=data.size)
            if targets is None:
                sizes = {rank: table.expected(rank, roster.meeting) for rank in ranks}
                longest = max(1, *sizes.values())
                targets = take(sizes)
            for rank, target in targets.items():
                stop = min(target.size, start + _PIECE_BYTES)
                if rank in ranks and start < stop:
                    source = piece if rank == self._roster.rank else self._half_of(rank)
                    target[start:stop] = source[: stop - start]
            start += _PIECE_BYTES
        return ranks

    def reduce(self, call: Call, x: Array, out: Array | None) -> Round:
        """Make `out` of all workers' `x`."""
        step = _PIECE_BYTES // x.itemsize
        waited, result = self._roster.waited_s, Round((self._roster.rank,))
        for start in range(0, max(1, x.size), step):
            into = None if out is None else out[start : start + step]
            while (made := self._reduce_piece(call, x[start : start + step], into)) is None:
                pass
            result = made
        result.waited_s = self._roster.waited_s - waited
        return result

    def _reduce_piece(self, call: Call, x: Array, out: Array | None) -> Round | None:
        """None if the workers were not those one has thought of, and it must be made again."""
        roster, table = self._roster, self._roster.table
        whom = roster.members()
        if roster.rank not in whom:
            raise PassedOver
        wire = "float16" if x.dtype == np.float16 else call.wire
        is_half = x.dtype == np.float16 or is_packed(x, wire)
        slot = self._half(2 * x.size if is_half else x.nbytes)
        parts = bounds(x.size, len(whom))
        low, high = parts[whom.index(roster.rank)]
        if is_half:
            codec(wire).pack(x, slot[: 2 * x.size])
        else:  # one's own part is read by nobody else
            values = slot[: x.nbytes].view(x.dtype)
            values[:low], values[high:] = x[:low], x[high:]
        ranks = roster.meet(call, slot=self._reference, expected=_mark(whom))
        if any(table.expected(rank, roster.meeting) != _mark(ranks) for rank in ranks):
            return None
        told = [table.weight(rank, roster.meeting) for rank in ranks]
        weights = counted(told)
        is_made = call.op != "mean" or sum(weights) > 0
        halves = [self._half_of(rank) for rank in ranks]
        if is_made and is_half:
            _combine_halves(
                call.op, [half[2 * low : 2 * high] for half in halves], weights, slot[2 * low : 2 * high], wire
            )
        elif is_made:
            cut = slice(low * x.itemsize, high * x.itemsize)
            pieces = [x[low:high] if rank == roster.rank else half[cut].view(x.dtype)
                      for rank, half in zip(ranks, halves, strict=True)]  # fmt: skip
            combine(call.op, pieces, weights, slot[cut].view(x.dtype))
        if roster.meet(call, slot=self._reference, expected=_mark(whom)) != ranks:
            return None
        if out is None or not is_made:
            return done(call.op, ranks, told, 0.0)
        for half, (a, b) in zip(halves, parts, strict=True):
            if is_half:
                codec(wire).unpack(half[2 * a : 2 * b], out[a:b])
            else:
                out[a:b] = half[a * x.itemsize : b * x.itemsize].view(x.dtype)
        return done(call.op, ranks, told, 0.0)

    def reserve(self, size: int) -> None:
        """Make this worker's slot, or a larger one, now."""
        size = min(size, _PIECE_BYTES)
        if 2 * size > self._slot.size or not self._serial:
            if self._before:
                self._slots.forget(self._before)  # its last readers have met us since
            self._before = self._serial
            self._serial, self._slot = self._slots.make(max(8192, 2 << (max(1, size) - 1).bit_length()))

    def _half(self, size: int) -> Array:
        """The half of this worker's slot whose turn it is, with room for `size` bytes."""
        self._turn += 1
        self.reserve(size)
        return _cut(self._slot, self._turn)

    @property
    def _reference(self) -> int:
        """By which the others find this half."""
        return self._serial << 1 | self._turn % 2

    def _half_of(self, rank: int) -> Array:
        reference = self._roster.table.slot(rank, self._roster.meeting)
        if rank == self._roster.rank:
            return _cut(self._slot, self._turn)
        return _cut(self._slots.of(rank, self._roster.table.holder(rank), reference >> 1), reference)


def _cut(slot: Array, turn: int) -> Array:
    half = slot.size // 2
    return slot[half:] if turn % 2 else slot[:half]


def _mark(ranks: tuple[int, ...]) -> int:
    """A number that tells these ranks from others."""
    return zlib.crc32(repr(ranks).encode())


def _combine_halves(op: str, pieces: Sequence[Array], weights: Sequence[float], out: Array, wire: str) -> None:
    """Combine halves in float32."""
    values = [np.empty(piece.size // 2, np.float32) for piece in pieces]
    for piece, value in zip(pieces, values, strict=True):
        codec(wire).unpack(piece, value)
    total = np.empty_like(values[0])
    combine(op, values, weights, total)
    codec(wire).pack(total, out)
