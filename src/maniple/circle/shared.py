"""The circle of one machine: slots in shared memory, in which each worker reads the others' values.

Workers may die, leave, come late and come again (`roster`). If one dies in the middle of a call, the others make it
without that one; of arrays above some MB, what it gave to earlier pieces stays in those. `resident` vectors, where
gradients live, are whole or not at all.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from maniple.center.segment import DEAD, LEFT, Segment
from maniple.circle.absence import OnLongWait, PassedOver
from maniple.circle.call import Call, check_parts, check_reduction, check_root, check_values
from maniple.circle.packing import opened, packed
from maniple.circle.pieces import Pieces
from maniple.circle.resident import InPlace, Private
from maniple.circle.roster import Roster
from maniple.circle.slots import Slots
from maniple.contracts import Array, Resident, Round
from maniple.errors import PeerLost

Result = TypeVar("Result")


class Shared:
    """A circle in shared memory (`contracts.Circle`).

    Args:
        world: so many workers are expected at the beginning.
        is_boundary: newcomers may begin after any call, not only after a round of resident vectors.
    """

    name = "shared"

    def __init__(
        self, segment: Segment, name: str, *, rank: int, world: int, deadline_s: float, is_boundary: bool = True
    ) -> None:
        incarnation = segment.incarnation(rank)
        self.rank, self.world, self._segment, self._name = rank, world, segment, name
        self.roster = Roster(segment.path / name, rank, incarnation, deadline_s=deadline_s)
        self.slots = Slots(segment.path, name, rank, incarnation)
        self._pieces = Pieces(self.roster, self.slots)
        self._is_boundary = is_boundary
        self._has_entered = False
        self._nested = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that belong to it now."""
        self.enter_once()
        return self.roster.members()

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits for other workers that take unusually long."""
        self.roster.long_wait.on_report = on_report

    def enter(self) -> bool:
        """Take part from now on; True if the others were there already. Calls do it by themselves."""
        self._has_entered = True
        is_late = self.roster.enter(range(self.world), self._is_absent)
        self.slots.clear()
        return is_late

    def enter_once(self) -> None:
        """Enter, unless this worker has done so already."""
        if not self._has_entered:
            self.enter()

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round:
        """Put together what all workers have, for all."""
        check_reduction(op, str(x.dtype), wire)
        call = Call("all_reduce", 0, str(x.dtype), x.size, op, 0, wire, weight)
        return self._make(lambda: self._pieces.reduce(call, x, out))

    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """Put together what all workers have, for worker `root`."""
        check_reduction(op, str(x.dtype), wire)
        check_root(root, self.ranks)
        call = Call("reduce", 0, str(x.dtype), x.size, op, root, wire, weight)
        into = out if self.rank == root else None
        return self._make(lambda: self._pieces.reduce(call, x, into))

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`, in place."""
        check_root(root, self.ranks)
        call = Call("broadcast", 0, str(x.dtype), x.size, root=root, wire=wire)
        mine = packed(x, wire)
        data = mine.view(np.uint8) if self.rank == root else np.empty(0, np.uint8)
        came = np.empty_like(mine)
        ranks = self._show(call, data, lambda sizes: {root: came.view(np.uint8)} if root in sizes else {})
        self._require(root, ranks, call)
        x[:] = opened(came, str(x.dtype), wire)

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays, for worker `root`."""
        check_root(root, self.ranks)
        call = Call("gather", 0, str(x.dtype), x.size, root=root, wire=wire)
        parts = self._collect(call, x, is_taker=self.rank == root)
        self._require(root, tuple(parts), call)
        return list(parts.values()) if self.rank == root else None

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]:
        """All workers' arrays, for all."""
        call = Call("all_gather", 0, str(x.dtype), x.size, wire=wire)
        return list(self._collect(call, x, is_taker=True).values())

    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """The own one of worker `root`'s parts."""
        check_root(root, self.ranks)
        if self.rank == root:
            check_parts(parts, len(self.ranks))
        with self.whole():
            return self._scatter(Call("scatter", 0, dtype, root=root, wire=wire), parts)

    def _scatter(self, call: Call, parts: Sequence[Array] | None) -> Array:
        root, dtype, wire = call.root, call.dtype, call.wire
        whom, sizes, data = self.ranks, np.zeros(0, np.int64), np.empty(0, np.uint8)
        if self.rank == root and parts is not None:
            ready = [packed(np.ascontiguousarray(part), wire).view(np.uint8) for part in parts]
            sizes = np.array([*whom, *(part.size for part in ready)], np.int64)
            data = np.concatenate(ready)
        told = self._collect(call, sizes.view(np.uint8), is_taker=True)
        self._require(root, tuple(told), call)
        known, lengths = np.split(told[root].view(np.int64), 2)
        came = np.empty(int(lengths.sum()), np.uint8)
        self._require(root, self._show(call, data, lambda sizes: {root: came} if root in sizes else {}), call)
        if self.rank not in known:
            raise PeerLost(f"worker {self.rank} has entered the circle while worker {root} made its parts. Try again.")
        index = known.tolist().index(self.rank)
        start = int(lengths[:index].sum())
        mine = came[start : start + int(lengths[index])].copy()
        return opened(mine.view(packed(np.empty(0, dtype), wire).dtype), dtype, wire)

    def barrier(self) -> None:
        """Until all workers are here."""
        self._show(Call("barrier", 0), np.empty(0, np.uint8), lambda _: {})

    def reserve(self, size: int) -> None:
        """Have room for calls with arrays of up to `size` bytes from now on; beyond some MB they go in pieces."""
        self._pieces.reserve(size)

    def reside(self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu") -> Resident:
        """Vectors that live in this worker's slot; those of a GPU are copied there."""
        del device
        for dtype in sizes:
            check_values(dtype, wire)
        return InPlace(self, sizes) if wire == "float32" else Private(self, sizes, wire)

    @contextmanager
    def whole(self) -> Generator[None]:
        """The calls in this block are one: nobody enters in between."""
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1
        self._end_call()

    def close(self) -> None:
        """Leave. What this worker has given stays for as long as somebody needs it."""
        self.roster.close()
        self.slots.close()

    def greet(self) -> None:
        """Before the first round of some: make their parcel, if this worker is the first of the others."""
        self.roster.greet(self.roster.meeting + 1)

    def parcel(self, meeting: int) -> Path:
        """Where the parcel lies of those who come for the first time to `meeting`."""
        return self._segment.path / f"{self._name}.parcel-{meeting}"

    def await_parcel(self) -> Path | None:
        """The parcel for this worker, which has entered late; None if nobody is left to make one."""
        if self.roster.is_refounded:
            return None
        roster, path = self.roster, self.parcel(self.roster.meeting + 1)

        def is_done() -> bool:
            return path.exists() or roster.is_alone or not roster.is_current

        roster.wait(is_done, "the entrance, for the others' state,", range(roster.table.height))
        if not path.exists() and not roster.is_current:
            raise PassedOver
        return path if path.exists() else None

    def forget_parcel(self) -> None:
        """After a round: those whose first one it was have read their parcel."""
        if self.roster.greeted:
            self.parcel(self.roster.greeted).unlink(missing_ok=True)
            self.roster.greeted = 0

    def _is_absent(self, rank: int) -> bool:
        return self._segment.state(rank) in {LEFT, DEAD}

    def _show(self, call: Call, data: Array, take: Callable[[dict[int, int]], dict[int, Array]]) -> tuple[int, ...]:
        check_values(call.dtype, call.wire)

        def act() -> tuple[int, ...]:
            ranks = self._pieces.show(call, data, take)
            if not self._is_boundary:  # a round with a quorum may follow: it must not go on while somebody still reads
                self.roster.meet(call, is_end=True)
            return ranks

        return self._make(act)

    def _collect(self, call: Call, x: Array, *, is_taker: bool) -> dict[int, Array]:
        mine = packed(x, call.wire)
        found: dict[int, Array] = {}

        def take(sizes: dict[int, int]) -> dict[int, Array]:
            found.clear()
            found.update({rank: np.empty(size // mine.itemsize, mine.dtype) for rank, size in sizes.items()})
            return {rank: one.view(np.uint8) for rank, one in found.items()} if is_taker else {}

        ranks = self._show(call, mine.view(np.uint8), take)
        return {rank: opened(found[rank], str(x.dtype), call.wire) for rank in ranks}

    def _make(self, act: Callable[[], Result]) -> Result:
        """Make a call; if the others have gone on without this worker, enter again first."""
        self.enter_once()
        while True:
            try:
                result = act()
            except PassedOver:
                if not self._is_boundary:
                    raise
                self.roster.leave()
                self.enter()
                continue
            self._end_call()
            return result

    def let_in(self) -> None:
        """After a call: those who knocked may begin."""
        if self.roster.meeting:
            self.roster.let_in(self.roster.members(self.roster.meeting))

    def _end_call(self) -> None:
        if self._is_boundary and not self._nested:
            self.let_in()

    def _require(self, root: int, ranks: tuple[int, ...], call: Call) -> None:
        if root not in ranks:
            raise PeerLost(f"worker {root} was lost in {call.kind}, of which it was the root. Choose another one.")
