"""Collectives in shared memory, for the workers of one machine (`contracts.Collectives`).

There is no root: each element is computed by one worker, in the order of the ranks, and all get the same bits. Workers
may join, leave and die at any time (`membership`). Values pass through slots (`slots`).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from maniple.collectives.call import CollectiveCall, OnLongWait, PassedOver, check_resident
from maniple.collectives.group import CollectiveGroup
from maniple.collectives.membership import Membership
from maniple.collectives.slots import InPlaceVectors, Slots, SlotTransfer
from maniple.collectives.values import empty_packed
from maniple.contracts import NO_EXACT, Array, ElasticMembership, ResidentVectors, Round
from maniple.errors import PeerLost
from maniple.memory.segment import Segment

Result = TypeVar("Result")


class SharedMemoryCollectives(CollectiveGroup):
    """A group of workers of one machine.

    Args:
        world: how many workers form the group at the beginning.
        admit_after_calls: newcomers may begin after any call; else only after a round of resident vectors, and a worker
            that was passed over gets PassedOver.
        calls: of the group of the script's own calls, where members of this group may be blocked on this worker.
        on_wait: called every 50 ms while this worker waits for others; may raise to give up.
    """

    name = "shared"

    def __init__(
        self,
        segment: Segment,
        name: str,
        *,
        rank: int,
        world: int,
        deadline_s: float,
        admit_after_calls: bool = True,
        calls: ElasticMembership | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.membership = self.elastic = Membership(
            segment,
            name,
            rank,
            world=world,
            deadline_s=deadline_s,
            calls=calls,
            on_wait=on_wait,
        )
        self._slots = Slots(segment.path, name, rank, self.membership.incarnation)
        self._transfer = SlotTransfer(self.membership, self._slots)
        self._admit_after_calls = admit_after_calls
        self._nested = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The current members."""
        if not self.membership.has_joined:
            self.membership.join()
        return self.membership.members

    def set_background(self, in_background: bool) -> None:
        """Say whether a thread beside the training thread makes the calls."""
        self.membership.may_spin = not in_background

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits for other workers that take unusually long."""
        self.membership.long_wait.on_report = on_report

    def reserve(self, size: int) -> None:
        """Reserve memory for calls with arrays of up to `size` bytes; larger ones go in pieces of some MB."""
        self._transfer.reserve(size)

    def reside(
        self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu", exact: Mapping[str, int] = NO_EXACT
    ) -> ResidentVectors:
        """Vectors that live in this worker's slot; those of a GPU are copied there."""
        del device
        for dtype in sizes:
            check_resident(dtype, wire)
        return InPlaceVectors(self.membership, self._slots, sizes, wire=wire, exact=exact)

    @contextmanager
    def one_call(self) -> Generator[None]:
        """Admit no newcomers between the calls in this block."""
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1
        self._end_call()

    def close(self) -> None:
        """Leave. What this worker has given stays for as long as somebody needs it."""
        self.membership.close()
        self._slots.close()

    def _reduce(self, call: CollectiveCall, x: Array, out: Array | None) -> Round:
        return self._run(lambda: self._transfer.reduce(call, x, out))

    def _broadcast(self, call: CollectiveCall, values: Array) -> None:
        is_root = self.rank == call.root
        shown = self._show(call, values if is_root else values[:0], [] if is_root else [call.root])
        if not is_root:
            values[:] = shown[call.root]

    def _collect(self, call: CollectiveCall, values: Array) -> dict[int, Array]:
        return self._show(call, values, [] if call.kind == "gather" and self.rank != call.root else None)

    def _scatter(self, call: CollectiveCall, parts: Sequence[Array]) -> Array:
        """The root shows the ranks and the sizes of their parts, then all parts."""
        ranks, sizes = self.ranks, np.array([part.size for part in parts], np.int64)
        with self.one_call():
            shown = self._collect(call, np.array([*ranks, *sizes], np.int64) if parts else sizes)
            known, lengths = np.split(shown[call.root], 2)
            values = np.concatenate(parts) if parts else empty_packed(int(lengths.sum()), call.dtype, call.wire)
            self._broadcast(call, values)
        if self.rank not in known:
            raise PeerLost(
                f"worker {self.rank} has joined the group while worker {call.root} made its parts. Try again."
            )
        index = known.tolist().index(self.rank)
        return np.split(values, np.cumsum(lengths))[index].copy()

    def _exchange_pairs(self, call: CollectiveCall, values: Array) -> Array | None:
        """A partner that is no member any more was lost, and shows nothing."""
        partner = call.root if call.root != self.rank else None
        return self._show(call, values, [] if partner is None else [partner]).get(-1 if partner is None else partner)

    def _show(self, call: CollectiveCall, values: Array, wanted: Sequence[int] | None) -> dict[int, Array]:
        def act() -> dict[int, Array]:
            shown = self._transfer.show(call, values.view(np.uint8), wanted)
            if not self._admit_after_calls:  # a round with a quorum may follow, and must not begin while somebody reads
                self.membership.arrive(call, is_end=True)
            return shown

        shown = self._run(act)
        if call.kind in {"broadcast", "gather", "scatter"} and call.root not in shown:
            raise PeerLost(f"worker {call.root} was lost in {call.kind}, of which it was the root. Choose another one.")
        return {rank: one.view(values.dtype) for rank, one in shown.items()}

    def _run(self, act: Callable[[], Result]) -> Result:
        """Make a call; if the others have gone on without this worker, join again first."""
        if not self.membership.has_joined:
            self.membership.join()
        while True:
            try:
                result = act()
            except PassedOver:
                if not self._admit_after_calls:
                    raise
                self.membership.leave()
                self.membership.join()
                continue
            self._end_call()
            return result

    def _end_call(self) -> None:
        if self._admit_after_calls and not self._nested and self.membership.barrier:
            self.membership.end_round(self.membership.table.members(self.membership.barrier))
