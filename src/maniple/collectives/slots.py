"""Slots: memory of one worker that the others of its machine map. Vectors are reduced there in place; other values are
copied through them.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maniple.collectives.call import CollectiveCall, check_resident_reduction, counted, round_result
from maniple.collectives.error_feedback import InPlaceFeedback
from maniple.collectives.membership import Membership
from maniple.collectives.reductions import JOURNAL_BYTES, SlicePart, block_bytes, bounds, warm_up
from maniple.collectives.values import is_packed, rounded
from maniple.contracts import NO_EXACT, Array, Round
from maniple.errors import LayoutMismatch
from maniple.memory.shm import map_file
from maniple.wire.codecs import get_codec, load_kernels_in_background

_PIECE_BYTES = 4 << 20  # larger pieces leave the cache, and are slower where each worker has a core
_PAGE = 4096
_STAGED = 32  # layouts of calls that are kept: those of a training step repeat
_HEAD = np.dtype([("progress", "<i8"), ("vector_bytes", "<i8"), ("block_bytes", "<i8")])


class Slots:
    """The slots of a group as one worker sees them. Each is a file, NAME.RANK.INCARNATION.SERIAL."""

    def __init__(self, folder: Path, name: str, rank: int, incarnation: int) -> None:
        self._folder, self._name, self._rank, self._incarnation = folder, name, rank, incarnation
        self._mapped: dict[tuple[int, int, int], Array] = {}
        self._serial = 0

    def create(self, size: int) -> tuple[int, Array]:
        """A new slot of this worker: its serial number and its bytes."""
        array = self._map((self._rank, self._incarnation, self._serial + 1), size)
        self._serial += 1
        return self._serial, array

    def open(self, rank: int, incarnation: int, serial: int) -> Array:
        """The bytes of a slot of worker `rank`."""
        key = (rank, incarnation, serial)
        if (known := self._mapped.get(key)) is not None:
            return known
        for old in [k for k in self._mapped if k[0] == rank and (k[1] != incarnation or k[2] < serial - 1)]:
            del self._mapped[old]
        return self._map(key)

    def remove(self, serial: int) -> None:
        """Remove a slot of this worker that no worker will open any more. Mappings of it stay valid."""
        key = self._rank, self._incarnation, serial
        self._path(key).unlink(missing_ok=True)
        self._mapped.pop(key, None)

    def close(self) -> None:
        """Unmap all slots. Their files stay: this worker's successor removes them once no worker needs them."""
        self._mapped.clear()

    def _map(self, key: tuple[int, int, int], size: int = 0) -> Array:
        memory = map_file(self._path(key), size, what="this worker's slot", is_new=size > 0)
        self._mapped[key] = array = np.frombuffer(memory, np.uint8)
        return array

    def _path(self, key: tuple[int, int, int]) -> Path:
        return self._folder / ".".join(map(str, (self._name, *key)))


class SlotTransfer:
    """The calls of one worker that copy values through its slots, 4 MB at a time.

    What is reduced is copied to vectors that are reduced in place. What is only shown has a slot of two halves, used in
    turn: while the others still read one, the next piece is written to the other.
    """

    def __init__(self, membership: Membership, slots: Slots) -> None:
        self._membership, self._slots, self._turn = membership, slots, 0
        self._shown, self._reduced = _GrowingSlot(slots), _GrowingSlot(slots)
        self._staged: dict[tuple[str, int], InPlaceVectors] = {}

    def show(self, call: CollectiveCall, data: Array, wanted: Sequence[int] | None = None) -> dict[int, Array]:
        """Show `data`, bytes, to the others; gives what the workers `wanted` show, or all.

        The ranks are those of all workers that took part to the end.
        """
        membership, table = self._membership, self._membership.table
        start, longest = 0, 1
        found: dict[int, Array] = {}
        while start < longest:
            piece = data[start : start + _PIECE_BYTES]
            self._shown.reserve(2 * piece.size)
            self._turn ^= 1
            _half(self._shown.memory, self._turn)[: piece.size] = piece
            ranks = membership.arrive(call, slot=self._shown.serial << 1 | self._turn, shown_bytes=data.size)
            if not start:
                sizes = {rank: table.shown_bytes[rank, membership.barrier & 1] for rank in ranks}
                longest = max(1, *sizes.values())
                found = {rank: np.empty(size if wanted is None or rank in wanted else 0, np.uint8)
                         for rank, size in sizes.items()}  # fmt: skip
            found = {rank: found[rank] for rank in ranks}
            for rank, target in found.items():
                stop = min(target.size, start + _PIECE_BYTES)
                if start < stop:
                    source = piece if rank == membership.rank else self._half_of(rank)
                    target[start:stop] = source[: stop - start]
            start += _PIECE_BYTES
        return found

    def reduce(self, call: CollectiveCall, x: Array, out: Array | None) -> Round:
        """Reduce all workers' `x` to `out`; None where the result is not needed."""
        step = _PIECE_BYTES // x.itemsize
        waited_s, result = 0.0, Round((self._membership.rank,))
        for start in range(0, max(1, x.size), step):
            piece = x[start : start + step]
            vectors = self._stage(piece)
            values = vectors.flat[call.dtype]
            values[:] = rounded(piece, call.wire)
            result = vectors.reduce(call)
            waited_s += result.waited_s
            if out is not None and (result.weight or call.op != "mean"):
                out[start : start + step] = rounded(values, call.wire)
        result.waited_s = waited_s
        return result

    def reserve(self, size: int) -> None:
        """Create this worker's slots, or larger ones, now."""
        size = min(size, _PIECE_BYTES)
        self._shown.reserve(2 * size)
        self._reserve_reduced(size)

    def _reserve_reduced(self, size: int) -> None:
        if self._reduced.reserve(_PAGE + _aligned(size) + min(JOURNAL_BYTES, _aligned(size))):
            self._staged.clear()

    def _stage(self, piece: Array) -> "InPlaceVectors":
        """Vectors of the shape of `piece`, in the slot of what is reduced."""
        self._reserve_reduced(piece.nbytes)
        key = str(piece.dtype), piece.size
        if key not in self._staged:
            if len(self._staged) == _STAGED:
                self._staged.clear()
            slot = self._reduced.serial, self._reduced.memory
            self._staged[key] = InPlaceVectors(self._membership, self._slots, dict([key]), slot=slot)
        return self._staged[key]

    def _half_of(self, rank: int) -> Array:
        table = self._membership.table
        slot = table.slot[rank, self._membership.barrier & 1]
        return _half(self._slots.open(rank, table.incarnation[rank] - 1, slot >> 1), slot & 1)


class _GrowingSlot:
    """A slot of this worker that is replaced when a call needs a larger one."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._serial_before = slots, 0
        self.serial, self.memory = 0, np.empty(0, np.uint8)

    def reserve(self, size: int) -> bool:
        """Make room for `size` bytes; True if that needed a new slot."""
        if size <= self.memory.size and self.serial:
            return False
        # Created before anything is removed: if shared memory is full, the announced slot stays in use.
        serial, memory = self._slots.create(max(2 * _PAGE, size, 2 * self.memory.size))
        if self._serial_before:
            self._slots.remove(self._serial_before)  # its last readers have passed a barrier with us since
        self._serial_before, self.serial, self.memory = self.serial, serial, memory
        return True


class InPlaceVectors:
    """This worker's vectors, and those of the others as this worker sees them (`contracts.ResidentVectors`).

    Args:
        wire: compression changes the vectors before and after each round, so that all engines give similar results.
        exact: how many values at the end of each vector codecs that keep errors leave as they are.
        slot: the serial number and memory of a slot that calls share; else the vectors get their own slot, and
            compiled kernels, which take a second to load.
    """

    def __init__(
        self,
        membership: Membership,
        slots: Slots,
        sizes: dict[str, int],
        *,
        wire: str = "float32",
        slot: tuple[int, Array] | None = None,
        exact: Mapping[str, int] = NO_EXACT,
    ) -> None:
        self._membership, self._slots, self._sizes, self._wire = membership, slots, sizes, wire
        self._dtype, self._count = next(iter(sizes), "float32"), sum(sizes.values())
        self._bytes = sum(_aligned(np.dtype(dtype).itemsize * size) for dtype, size in sizes.items())
        self._is_compiled = slot is None
        if slot is None:
            slot = slots.create(_PAGE + self._bytes + JOURNAL_BYTES)
            warm_up(list(sizes))
        self._serial, memory = slot
        room = memory.size - _PAGE - self._bytes
        self._block_bytes = block_bytes() if self._is_compiled else min(JOURNAL_BYTES, room)
        self._own = _SlotView(memory, sizes)
        self._checked: set[str] = set()  # the ops that were checked
        self._views_key: list[tuple[int, int, int]] = []
        self._views: list[_SlotView] = []
        self._parts_key: tuple[list[_SlotView], int] = [], 0
        self._parts: list[SlicePart] = []
        self._ended: tuple[int, ...] = ()  # the members at the end of the last round
        self.flat: dict[str, Any] = self._own.flat
        self._feedback: InPlaceFeedback | None = None
        if (codec := get_codec(wire)).keeps_errors:
            load_kernels_in_background(wire, size_bytes=self._bytes)
            vectors = [
                vector[: vector.size - exact.get(dtype, 0)]
                for dtype, vector in self._own.flat.items()
                if is_packed(vector, wire)
            ]
            self._feedback = InPlaceFeedback(codec, vectors)
        self._members: tuple[tuple[int, int], ...] = ()  # of the last round: rank, and the barrier it has joined at

    def all_reduce(self, op: str, *, weight: float = 1.0, quorum: int = 0) -> Round:
        """Replace the vectors by the reduction of all workers' vectors; afterwards newcomers may begin."""
        if op not in self._checked:
            for dtype in self._sizes:
                check_resident_reduction(op, dtype, self._wire)
            self._checked.add(op)
        if not self._membership.has_joined:
            self._membership.join()
        self._compress(contributes=op != "mean" or weight > 0)
        call = CollectiveCall("resident", self._dtype, self._count, op, 0, self._wire, weight)
        result = self.reduce(call, quorum)
        if self._feedback is not None:
            self._feedback.finish(self._members, has_result=op != "mean" or result.weight > 0)
        else:
            self._compress(contributes=False)
        result.size_bytes = sum(vector.nbytes for vector in self.flat.values())
        self._membership.end_round(self._ended)
        return result

    def reduce(self, call: CollectiveCall, quorum: int = 0) -> Round:
        """Make one round of a call. The part of a worker that dies in it is finished by the others."""
        membership, table, op = self._membership, self._membership.table, call.op
        waited, finish = membership.waited_s, None
        self._own.head[0] = (0, self._bytes, self._block_bytes)
        ranks = membership.arrive(call, slot=self._serial, quorum=quorum)
        try:
            parity = membership.barrier & 1
            told = [table.weight[rank, parity] for rank in ranks]
            weights = counted(told)
            views = self._find_views(ranks, parity)
            self._members = tuple((rank, table.first[rank]) for rank in ranks)
            if len(ranks) > 1 and (op != "mean" or sum(weights) > 0):
                finish = functools.partial(self._combine_for, ranks, views, op, weights)
                self._combine(views, ranks.index(membership.rank), op, weights)
        except BaseException as error:
            membership.give_up(error)
            raise
        self._ended = membership.arrive(call, slot=self._serial, is_end=True, finish=finish)
        return round_result(op, ranks, told, membership.waited_s - waited)

    def _compress(self, *, contributes: bool) -> None:
        if self._feedback is not None:
            self._feedback.compress(contributes=contributes)
        elif self._wire != "float32":
            for vector in self.flat.values():
                vector[:] = rounded(vector, self._wire)

    def _combine_for(self, ranks: tuple[int, ...], views: "list[_SlotView]", op: str, weights: Any, rank: int) -> None:
        """Combine the rest of the part of a worker that died in the middle of a round."""
        self._combine(views, ranks.index(rank), op, weights)

    def _combine(self, views: "list[_SlotView]", index: int, op: str, weights: Any) -> None:
        """Combine the part of the worker at `index`, from where it has stopped."""
        if self._parts_key != (views, index):
            self._parts_key, self._parts = (views, index), self._find_parts(views, index)
        for part in self._parts:
            part.combine(op, weights)

    def _find_parts(self, views: "list[_SlotView]", index: int) -> list[SlicePart]:
        """The part of the worker at `index`, for each dtype."""
        owner, parts, base = views[index], list[SlicePart](), 0
        journal = owner.journal[: int(owner.head["block_bytes"][0])]
        for dtype in owner.flat:
            vectors = [view.flat[dtype] for view in views]
            span, block = bounds(vectors[0].size, len(views))[index], journal.view(dtype)
            part = SlicePart(vectors, span, block, owner.progress, base=base, is_compiled=self._is_compiled)
            parts.append(part)
            base += part.blocks
        return parts

    def _find_views(self, ranks: tuple[int, ...], parity: int) -> "list[_SlotView]":
        table = self._membership.table
        key = [(rank, table.incarnation[rank] - 1, table.slot[rank, parity]) for rank in ranks]
        if key != self._views_key:
            self._views, self._views_key = [self._open(*one) for one in key], key
        return self._views

    def _open(self, rank: int, incarnation: int, serial: int) -> "_SlotView":
        if rank == self._membership.rank:
            return self._own
        view = _SlotView(self._slots.open(rank, incarnation, serial), self._sizes)
        if (size := int(view.head["vector_bytes"][0])) != self._bytes:
            raise LayoutMismatch(
                f"worker {rank} brings {size} bytes to a round, this worker {self._bytes}. Every worker must build the "
                "same model."
            )
        return view


class _SlotView:
    """The parts of one worker's slot: a page with the header, the vectors, and the journal."""

    def __init__(self, memory: Array, sizes: dict[str, int]) -> None:
        self.head: Any = memory[: _HEAD.itemsize].view(_HEAD)
        self.progress = memory[:8].view(np.int64)
        self.flat: dict[str, Array] = {}
        start = _PAGE
        for dtype, size in sizes.items():
            stop = start + np.dtype(dtype).itemsize * size
            self.flat[dtype] = memory[start:stop].view(dtype)
            start += _aligned(stop - start)
        self.journal = memory[start:]


def _half(slot: Array, turn: int) -> Array:
    half = slot.size // 2
    return slot[turn * half : (turn + 1) * half]


def _aligned(size: int) -> int:
    return size + -size % _PAGE
