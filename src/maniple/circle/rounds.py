"""Rounds: the collective calls, made of messages. The circles of torch and MPI differ only in what carries these."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from maniple.circle.absence import OnLongWait
from maniple.circle.call import (
    Call,
    check_parts,
    check_reduction,
    check_root,
    check_values,
    compare,
    counted,
    done,
    empty_words,
)
from maniple.circle.link import Link, Message
from maniple.circle.packing import opened, packed, room
from maniple.circle.slices import Slices
from maniple.contracts import Array, Resident, Round
from maniple.errors import CallMismatch, InvalidArgument

CALL, VALUES, RESIDENT = 1, 2, 3  # tags: a call is never taken for values


class Rounds:
    """A circle on a link (`contracts.Circle`)."""

    name = ""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._calls = 0
        self._residents = 0

    @property
    def rank(self) -> int:
        """This worker's place among all."""
        return self._link.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All workers: nobody leaves or joins such a circle."""
        return tuple(range(self._link.size))

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits for other workers that take unusually long."""
        self._link.report_long_waits(on_report)

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round:
        """Put together what all workers have, for all."""
        return self._reduce(Call("all_reduce", self._next(), str(x.dtype), x.size, op, 0, wire, weight), x, out)

    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """Put together what all workers have, for worker `root`."""
        check_root(root, self.ranks)
        call = Call("reduce", self._next(), str(x.dtype), x.size, op, root, wire, weight)
        return self._reduce(call, x, out, root=root)

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`, in place."""
        check_root(root, self.ranks)
        self._meet(Call("broadcast", self._next(), str(x.dtype), x.size, root=root, wire=wire))
        slices = Slices(self._link, x, wire, tag=VALUES)
        self._link.finish(slices.scatter(root), "a broadcast")
        self._link.finish(slices.share(root), "a broadcast")
        slices.end()

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays, for worker `root`."""
        check_root(root, self.ranks)
        calls, _ = self._meet(Call("gather", self._next(), str(x.dtype), x.size, root=root, wire=wire))
        return self._collect(x, calls, [root], wire)

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]:
        """All workers' arrays, for all."""
        calls, _ = self._meet(Call("all_gather", self._next(), str(x.dtype), x.size, wire=wire))
        gathered = self._collect(x, calls, list(self.ranks), wire)
        assert gathered is not None
        return gathered

    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """The own one of worker `root`'s parts."""
        check_root(root, self.ranks)
        if self.rank == root:
            check_parts(parts, self._link.size)
        self._meet(Call("scatter", self._next(), dtype, root=root, wire=wire))
        size = np.zeros(1, np.int64)
        if parts is None or self.rank != root:
            self._link.finish(self._link.receive(root, size, CALL), "a scatter")
            mine = room(np.empty(size[0], dtype), wire)
            self._link.finish(self._link.receive(root, mine, VALUES), "a scatter")
            return opened(mine, dtype, wire)
        ready = [packed(np.ascontiguousarray(part), wire) for part in parts]
        sizes = [np.array([part.size], np.int64) for part in parts]
        messages = [m for peer in self._link.others for m in self._link.send(peer, sizes[peer], CALL)]
        messages += [m for peer in self._link.others for m in self._link.send(peer, ready[peer], VALUES)]
        self._link.finish(messages, "a scatter")
        return opened(ready[root].copy(), dtype, wire)

    def barrier(self) -> None:
        """Until all workers are here."""
        self._meet(Call("barrier", self._next()))

    def reside(self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu") -> Resident:
        """Vectors that are reduced in place, again and again."""
        if device != "cpu":
            raise InvalidArgument(f"the circle {self.name!r} has no vectors on {device}, only on the CPU. Use torch.")
        flat = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
        return self.settle(sizes, wire, flat)

    def settle(self, sizes: dict[str, int], wire: str, flat: dict[str, Array]) -> "Vectors":
        """Check that all workers have vectors of the same sizes, and give them their place in the circle."""
        for dtype, size in sizes.items():
            check_values(dtype, wire)
            self._meet(Call("reside", self._next(), dtype, size, wire=wire))
        self._residents += 1
        return Vectors(self._link, sizes, flat, wire, tag=RESIDENT + 2 * self._residents)

    def whole(self) -> AbstractContextManager[None]:
        """The calls in this block are one; nobody enters such a circle."""
        return nullcontext()

    def close(self) -> None:
        """Leave the circle."""
        self._link.close()

    def _reduce(self, call: Call, x: Array, out: Array | None, *, root: int | None = None) -> Round:
        check_reduction(call.op, call.dtype, call.wire)
        calls, waited_s = self._meet(call)
        made = _done(call.op, calls, waited_s)
        if not made.weight and call.op == "mean":
            return made
        flat = x.copy() if out is None else out
        if flat is not x:
            np.copyto(flat, x)
        slices = Slices(self._link, flat, call.wire, tag=VALUES)
        self._link.finish(slices.begin(), call.kind)
        slices.combine(call.op, counted([other.weight for other in calls]))
        self._link.finish(slices.spread(root=root), call.kind)
        if root in {None, self.rank}:
            slices.end()
        return made

    def _collect(self, x: Array, calls: Sequence[Call], to: list[int], wire: str) -> list[Array] | None:
        mine = packed(x, wire)
        is_taker = self.rank in to
        rooms = [room(np.empty(call.size, x.dtype), wire) for call in calls] if is_taker else []
        messages: list[Message] = []
        for peer in self._link.others if is_taker else ():
            messages += self._link.receive(peer, rooms[peer], VALUES)
        for peer in to:
            messages += self._link.send(peer, mine, VALUES) if peer != self.rank else []
        self._link.finish(messages, "a gather")
        if not is_taker:
            return None
        np.copyto(rooms[self.rank], mine)
        return [opened(one, str(x.dtype), wire) for one in rooms]

    def _next(self) -> int:
        self._link.check()
        self._calls += 1
        return self._calls

    def _meet(self, call: Call) -> tuple[list[Call], float]:
        check_values(call.dtype, call.wire)
        return meet(self._link, call, CALL)


class Vectors:
    """Vectors that are reduced in place (`contracts.Resident`). The call travels with the first values."""

    def __init__(self, link: Link, sizes: dict[str, int], flat: dict[str, Array], wire: str, *, tag: int) -> None:
        self._link, self._wire, self._tag = link, wire, tag
        self._dtype, self._size = next(iter(sizes), "float32"), sum(sizes.values())
        self.flat: dict[str, Any] = dict(flat)
        self._slices = [Slices(link, array, wire, tag=tag) for array in flat.values()]
        self._rounds = 0
        self._sent: list[Message] = []

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the vectors by what all workers' vectors make together."""
        self.send(op)
        return self.finish(op, weight=weight)

    def send(self, op: str) -> None:
        """Begin a round: the others get their slices of these vectors, which are not to be changed any more."""
        self._link.check()
        for dtype in self.flat:
            check_reduction(op, dtype, self._wire)
        self._sent = [message for slices in self._slices for message in slices.begin()]

    def finish(self, op: str, *, weight: float = 1.0) -> Round:
        """Hear from the others, and put together what was sent."""
        messages, self._sent = self._sent, []
        try:
            made, weights = self.meet(op, weight)
        except CallMismatch:
            self._link.finish(messages, "an all_reduce")  # nothing of this round is left for the next
            raise
        self._link.finish(messages, "an all_reduce")
        if not made.weight and op == "mean":
            return made
        for slices in self._slices:
            slices.combine(op, weights)
        self._link.finish([message for slices in self._slices for message in slices.spread()], "an all_reduce")
        for slices in self._slices:
            slices.end()
        return made

    def meet(self, op: str, weight: float) -> tuple[Round, list[float]]:
        """Tell the others of the next round, and hear from them: their weights, by rank."""
        self._rounds += 1
        call = Call("resident", self._rounds, self._dtype, self._size, op, 0, self._wire, weight)
        calls, waited_s = meet(self._link, call, self._tag + 1)
        return _done(op, calls, waited_s), counted([other.weight for other in calls])


def meet(link: Link, call: Call, tag: int) -> tuple[list[Call], float]:
    """Tell all workers `call`, and hear theirs: by rank, and the seconds of waiting."""
    rooms = [call.pack() if rank == link.rank else empty_words() for rank in range(link.size)]
    mine = rooms[link.rank]
    messages = [m for peer in link.others for m in link.receive(peer, rooms[peer], tag)]
    messages += [m for peer in link.others for m in link.send(peer, mine, tag)]
    waited_s = link.finish(messages, call.kind if call.kind != "resident" else "an all_reduce")
    calls = [Call.unpack(room) for room in rooms]
    compare(link.rank, dict(enumerate(calls)))
    return calls, waited_s


def _done(op: str, calls: Sequence[Call], waited_s: float) -> Round:
    return done(op, range(len(calls)), [call.weight for call in calls], waited_s)
