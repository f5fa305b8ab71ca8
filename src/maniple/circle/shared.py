"""The circle of one machine: slots in shared memory. Each worker makes one of its part of everybody's values.

A call puts this worker's values into its slot, meets the others, and reads theirs. Each slot has two halves, used in
turn: who writes a half again has met everybody since, so nobody reads it any more. Large arrays go piece by piece.

If a worker dies in the middle of a call, the others make the call again without it, piece by piece: what it gave to
earlier pieces stays. `Resident` vectors, where gradients live, are whole or not at all.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from maniple.center.segment import DEAD, LEFT, Segment
from maniple.circle.fold import bounds, check_op, fold, shares
from maniple.circle.resident import Private, Slices
from maniple.circle.roster import PassedOver, Roster
from maniple.circle.slots import Slots
from maniple.circle.table import Call
from maniple.contracts import Array, Resident, Round
from maniple.errors import PeerLost
from maniple.wire.codecs import codec

_PIECE_BYTES = 4 << 20

Result = TypeVar("Result")


class Shared:
    """A circle in shared memory; see `contracts.Circle`.

    Args:
        world: so many workers are expected at the beginning.
        is_boundary: newcomers may begin after any call, not only after a round of resident vectors.
    """

    name = "shared"

    def __init__(
        self, segment: Segment, name: str, *, rank: int, world: int, deadline_s: float, is_boundary: bool = True
    ) -> None:
        incarnation = segment.incarnation(rank)
        self.rank, self._segment, self._world = rank, segment, world
        self.roster = Roster(segment.path / name, rank, incarnation, deadline_s=deadline_s)
        self.slots = Slots(segment.path, name, rank, incarnation)
        self._is_boundary = is_boundary
        self._has_entered = False
        self._serial = 0
        self._half_bytes = 0
        self._slot: Array = np.empty(0, np.uint8)
        self._turn = 0
        self._name = name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that belong to it now."""
        return self.roster.members() if self._has_entered else (self.rank,)

    def enter(self) -> bool:
        """Take part from now on; True if the others were there already. Calls do it by themselves."""
        self._has_entered = True
        return self.roster.enter(range(self._world), self._is_absent)

    def _is_absent(self, rank: int) -> bool:
        return self._segment.state(rank) in {LEFT, DEAD}

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round:
        """Make `out` of all workers' `x`."""
        check_op(op)
        words = f"all_reduce {op} {x.dtype} {wire}"
        return self._reduce(x, out, op, words, weight=weight, wire=wire, is_taker=True)

    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """As all_reduce, for worker `root` only."""
        check_op(op)
        words = f"reduce {op} {x.dtype} {wire} {root}"
        result = self._reduce(x, out, op, words, weight=weight, wire=wire, is_taker=self.rank == root)
        self._require(root, result.ranks, words)
        return result

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`."""
        data = _packed(x, wire)
        if self.rank != root:
            data = np.empty_like(data)
        words = f"broadcast {x.dtype} {wire} {root}"
        ranks = self._pass(data, words, lambda sizes: {root: (0, sizes.get(root, 0), data)})
        self._require(root, ranks, words)
        if self.rank != root or wire != "float32":
            _unpack(data, x, wire)

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays, for worker `root`."""
        words = f"gather {x.dtype} {wire} {root}"
        parts = self._collect(x, words, wire, is_taker=self.rank == root)
        self._require(root, tuple(parts), words)
        return list(parts.values()) if self.rank == root else None

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]:
        """All workers' arrays."""
        return list(self._collect(x, f"all_gather {x.dtype} {wire}", wire, is_taker=True).values())

    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """This worker's one of `parts`."""
        words = f"scatter {dtype} {wire} {root}"
        while True:
            whom = self._members()
            data = np.empty(0, np.uint8)
            if self.rank == root and parts is not None:
                packed = [_packed(part, wire) for part in parts]
                head = np.array([len(whom), *whom, *(part.size for part in packed)], np.int64)
                data = np.concatenate([head.view(np.uint8), *packed])
            whole: dict[int, Array] = {}

            def take(sizes: dict[int, int], whole: dict[int, Array] = whole) -> dict[int, tuple[int, int, Array]]:
                whole[root] = np.empty(sizes.get(root, 0), np.uint8)
                return {root: (0, sizes.get(root, 0), whole[root])}

            ranks = self._pass(data, words, take)
            self._require(root, ranks, words)
            count = int(whole[root][:8].view(np.int64)[0])
            head = whole[root][8 : 8 + 16 * count].view(np.int64)
            if tuple(head[:count]) == ranks:
                break
        index = ranks.index(self.rank)
        start = 8 + 16 * count + int(head[count : count + index].sum())
        return _unpacked(whole[root][start : start + int(head[count + index])], dtype, wire)

    def barrier(self) -> None:
        """Wait until all have come here."""
        self._pass(np.empty(0, np.uint8), "barrier", lambda _: {})

    def reside(self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu") -> Resident:
        """Vectors that live in this worker's slot."""
        del device  # a GPU's values are copied here
        return Slices(self, sizes) if wire == "float32" else Private(self, sizes, wire)

    def close(self) -> None:
        """Leave. What this worker has given stays until nobody needs it."""
        self.roster.close()
        self.slots.close()

    def greet(self) -> None:
        """Before a round: if some come to it for the first time, and this worker is the first of the others, see to it
        that they get a parcel."""
        meeting = self.roster.meeting
        self.roster.greet(list(self.roster.members(meeting)), meeting + 1)

    def parcel(self, meeting: int) -> Path:
        """Where the parcel lies of those who come for the first time to `meeting`."""
        return self._segment.path / f"{self._name}.parcel-{meeting}"

    def await_parcel(self) -> Path | None:
        """The parcel for this worker, which has entered late; None if nobody is left to make one."""
        if self.roster.is_refounded:
            return None
        path = self.parcel(self.roster.meeting + 1)
        self.roster.await_(lambda: path.exists() or self.roster.is_alone, "for the others' state")
        return path if path.exists() else None

    def forget_parcel(self) -> None:
        """After a round: those who came to it for the first time have read their parcel."""
        if self.roster.greeted:
            self.parcel(self.roster.greeted).unlink(missing_ok=True)
            self.roster.greeted = 0

    def meet(self, words: str, call: Call, *, quorum: int = 0) -> tuple[int, ...]:
        """Come to the next meeting."""
        return self.roster.meet(words, call, quorum=quorum)

    def _members(self) -> tuple[int, ...]:
        if not self._has_entered:
            self.enter()
        return self.roster.members()

    def _reduce(
        self, x: Array, out: Array | None, op: str, words: str, *, weight: float, wire: str, is_taker: bool
    ) -> Round:
        waited = self.roster.waited_s
        step = max(1, _PIECE_BYTES // x.itemsize)
        result = Round((self.rank,), weight)
        for start in range(0, max(1, x.size), step):
            piece = x[start : start + step]
            into = None if out is None or not is_taker else out[start : start + step]
            result = self._insist(lambda p=piece, i=into: self._reduce_piece(p, i, op, words, weight, wire))
        if self._is_boundary:
            self.roster.let_in(result.ranks)
        result.waited_s = self.roster.waited_s - waited
        return result

    def _reduce_piece(  # noqa: PLR0917 - one place calls it
        self, x: Array, out: Array | None, op: str, words: str, weight: float, wire: str
    ) -> Round | None:
        """One piece; None if the workers are not those one has thought of, and it must be made again."""
        whom = self._members()
        is_half = wire != "float32" and x.dtype.kind == "f"
        data = _packed(x, wire) if is_half else x.view(np.uint8)
        item = 2 if is_half else x.itemsize
        parts = bounds(x.size, len(whom))
        mine = parts[whom.index(self.rank)]
        slot = self._half(data.size)
        low, high = mine[0] * item, mine[1] * item
        if is_half:
            slot[: data.size] = data
        else:  # one's own part is read by nobody else
            slot[:low], slot[high : data.size] = data[:low], data[high:]
        call = self._call(words, data.size, whom)._replace(weight=weight)
        ranks = self.meet(words, call)
        calls = [self.roster.table.said(rank, self.roster.meeting) for rank in ranks]
        if any(one.shape != _shape(ranks) for one in calls):
            return None
        total = sum(one.weight for one in calls)
        halves = [self._half_of(rank, one) for rank, one in zip(ranks, calls, strict=True)]
        if total or op != "mean":
            weights = shares([one.weight for one in calls], op, np.float32 if is_half else x.dtype)
            pieces = [x[mine[0] : mine[1]] if rank == self.rank and not is_half else
                      half[low:high].view(np.uint16 if is_half else x.dtype)
                      for rank, half in zip(ranks, halves, strict=True)]  # fmt: skip
            if is_half:
                _fold_half(pieces, slot[low:high], op, weights, wire)
            else:
                fold(pieces, slot[low:high].view(x.dtype), op, weights)
        if self.meet(words, call) != ranks:
            return None
        if out is not None and (total or op != "mean"):
            for half, (a, b) in zip(halves, parts, strict=True):
                if is_half:
                    codec(wire).unpack(half[2 * a : 2 * b], out[a:b])
                else:
                    out[a:b] = half[a * item : b * item].view(x.dtype)
        return Round(ranks, total if op == "mean" else float(len(ranks)))

    def _collect(self, x: Array, words: str, wire: str, *, is_taker: bool) -> dict[int, Array]:
        found: dict[int, Array] = {}

        def take(sizes: dict[int, int]) -> dict[int, tuple[int, int, Array]]:
            found.clear()
            found.update({rank: np.empty(size if is_taker else 0, np.uint8) for rank, size in sizes.items()})
            return {rank: (0, size, found[rank]) for rank, size in sizes.items()} if is_taker else {}

        ranks = self._pass(_packed(x, wire), words, take)
        return {rank: _unpacked(found[rank], str(x.dtype), wire) for rank in ranks}

    def _pass(
        self, data: Array, words: str, take: Callable[[dict[int, int]], dict[int, tuple[int, int, Array]]]
    ) -> tuple[int, ...]:
        """Show `data` to the others piece by piece, and copy what `take(sizes)` asks for, by rank: start, stop, target.

        Gives those who have come to the end.
        """
        return self._insist(lambda: self._pass_once(data, words, take))

    def _pass_once(
        self, data: Array, words: str, take: Callable[[dict[int, int]], dict[int, tuple[int, int, Array]]]
    ) -> tuple[int, ...]:
        self._members()
        start, longest = 0, 1
        takes: dict[int, tuple[int, int, Array]] | None = None
        ranks: tuple[int, ...] = ()
        while start < longest:
            piece = data[start : start + _PIECE_BYTES]
            self._half(piece.size)[: piece.size] = piece
            ranks = self.meet(words, self._call(words, data.size, ()))
            calls = {rank: self.roster.table.said(rank, self.roster.meeting) for rank in ranks}
            if takes is None:
                longest = max(1, *(one.size for one in calls.values()))
                takes = take({rank: one.size for rank, one in calls.items()})
            for rank, (low, high, target) in takes.items():
                a, b = max(low, start), min(high, start + _PIECE_BYTES)
                if rank in calls and rank != self.rank and a < b:
                    target[a - low : b - low] = self._half_of(rank, calls[rank])[a - start : b - start]
                elif rank == self.rank and a < b:
                    target[a - low : b - low] = data[a:b]
            start += _PIECE_BYTES
        if self._is_boundary:
            self.roster.let_in(ranks)
        return ranks

    def _insist(self, act: Callable[[], Result | None]) -> Result:
        """Make a call until it succeeds; if the others have gone on without this worker, enter again first."""
        while True:
            try:
                result = act()
            except PassedOver:
                if not self._is_boundary:
                    raise
                self.roster.leave()
                self.enter()
                continue
            if result is not None:
                return result

    def _half(self, size: int) -> Array:
        """The half of this worker's slot whose turn it is, with room for `size` bytes."""
        self._turn += 1
        if size > self._half_bytes or not self._serial:
            self._half_bytes = max(4096, 1 << (max(1, size) - 1).bit_length())
            before = self._serial
            self._serial, self._slot = self.slots.make(2 * self._half_bytes)
            if before > 1:
                self.slots.forget(before - 1)  # its last readers have met us since
        return self._cut(self._slot, self._turn)

    def _half_of(self, rank: int, call: Call) -> Array:
        serial, turn = call.slot >> 1, call.slot & 1
        return self._cut(self.slots.of(rank, self.roster.table.holder(rank), serial), turn)

    @staticmethod
    def _cut(slot: Array, turn: int) -> Array:
        half = slot.size // 2
        return slot[half:] if turn % 2 else slot[:half]

    def _call(self, words: str, size: int, whom: tuple[int, ...]) -> Call:
        return Call.of(words, size)._replace(slot=self._serial << 1 | self._turn % 2, shape=_shape(whom))

    def _require(self, root: int, ranks: tuple[int, ...], words: str) -> None:
        if root not in ranks:
            raise PeerLost(
                f"worker {root}, the root of {words.split(maxsplit=1)[0]}, does not belong to the circle (there are: "
                f"{', '.join(map(str, ranks))}). It has died, left or never was: choose another root."
            )


def _shape(ranks: tuple[int, ...]) -> int:
    return zlib.crc32(repr(ranks).encode())


def _packed(x: Array, wire: str) -> Array:
    """The bytes of `x` as they travel."""
    if wire == "float32" or x.dtype.kind != "f":
        return x.view(np.uint8)
    data = np.empty(2 * x.size, np.uint8)
    codec(wire).pack(x, data)
    return data


def _unpack(data: Array, x: Array, wire: str) -> None:
    if wire == "float32" or x.dtype.kind != "f":
        x.view(np.uint8)[:] = data
    else:
        codec(wire).unpack(data, x)


def _unpacked(data: Array, dtype: str, wire: str) -> Array:
    is_half = wire != "float32" and np.dtype(dtype).kind == "f"
    x = np.empty(data.size // (2 if is_half else np.dtype(dtype).itemsize), dtype)
    _unpack(data, x, wire)
    return x


def _fold_half(pieces: list[Array], into: Array, op: str, weights: Array, wire: str) -> None:
    """Fold values of two bytes in float32."""
    values = [np.empty(piece.size, np.float32) for piece in pieces]
    for piece, value in zip(pieces, values, strict=True):
        codec(wire).unpack(piece.view(np.uint8), value)
    result = np.empty_like(values[0])
    fold(values, result, op, weights)
    codec(wire).pack(result, into)
