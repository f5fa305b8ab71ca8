"""Collectives by messages from worker to worker, the base of those over torch.distributed and MPI.

A worker that waits for a message knows from whom, so a worker that is dead or stuck is named by the workers that wait
for it. The libraries' own collectives on the CPU do not name the missing worker, add up in an unspecified order, and
have no weights.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

from maniple.collectives.call import (
    CALL,
    CollectiveCall,
    LongWait,
    OnLongWait,
    check_resident,
    check_resident_reduction,
    check_root,
    compare,
    counted,
    round_result,
)
from maniple.collectives.error_feedback import CompressedSlices, GatheredVector
from maniple.collectives.group import CollectiveGroup
from maniple.collectives.reductions import combine
from maniple.collectives.values import empty_packed, is_packed, opened
from maniple.contracts import NO_EXACT, Array, ResidentVectors, Round
from maniple.errors import CallMismatch, InvalidArgument, ManipleError, PeerLost, WaitedTooLong
from maniple.wire.codecs import get_codec, load_kernels_in_background

_CHECK_S = 0.5  # how often the thread that reports long waits looks
_CALL_TAG, _VALUES_TAG, _RESIDENT_TAG = 1, 2, 3  # a call is never taken for values


class PeerToPeer(CollectiveGroup):
    """A group of fixed members on a link."""

    def __init__(self, link: "PeerLink") -> None:
        self._link, self.rank = link, link.rank
        self._calls = 0
        self._registered = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """All workers."""
        return tuple(range(self._link.size))

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits for other workers that take unusually long."""
        self._link.report_long_waits(on_report)

    def reside(
        self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu", exact: Mapping[str, int] = NO_EXACT
    ) -> ResidentVectors:
        """Vectors that are reduced in place, again and again."""
        if device != "cpu":
            raise InvalidArgument(
                f"collectives {self.name!r} have no vectors on {device}, only on the CPU. Use --collectives torch."
            )
        return self.register(sizes, wire, {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}, exact)

    def register(
        self, sizes: dict[str, int], wire: str, flat: dict[str, Array], exact: Mapping[str, int] = NO_EXACT
    ) -> "PeerVectors":
        """Check that all workers have vectors of the same sizes. `flat` is empty for those that lie elsewhere."""
        for dtype, size in sizes.items():
            check_resident(dtype, wire)
            self._compare(CollectiveCall("reside", dtype, size, wire=wire))
        self._registered += 1
        return PeerVectors(self._link, sizes, flat, wire, tag=_RESIDENT_TAG + 2 * self._registered, exact=exact)

    def close(self) -> None:
        """Leave the group."""
        self._link.close()

    def _reduce(self, call: CollectiveCall, x: Array, out: Array | None) -> Round:
        calls, waited_s = self._compare(call)
        result = _result(call.op, calls, waited_s)
        if not result.weight and call.op == "mean":
            return result
        flat = x.copy() if out is None else out
        if flat is not x:
            np.copyto(flat, x)
        slices = _Slices(self._link, flat, call.wire, tag=_VALUES_TAG)
        self._link.finish(slices.exchange(), call.kind)
        slices.combine(call.op, counted([other.weight for other in calls]))
        self._link.finish(slices.spread(root=call.root if call.kind == "reduce" else None), call.kind)
        if out is not None:
            slices.unpack()
        return result

    def _broadcast(self, call: CollectiveCall, values: Array) -> None:
        """The root sends each worker a slice, which it sends to the others: none sends much more than `values`."""
        self._compare(call)
        link, root = self._link, call.root
        slices = [values[span] for span in _spans(values.size, link.size)]
        own = slices[self.rank]
        if self.rank == root:
            messages = link.post(_VALUES_TAG, send=[(peer, slices[peer]) for peer in link.others])
        else:
            messages = link.post(_VALUES_TAG, receive=[(root, own)])
        link.finish(messages, call.kind)
        lacking = [peer for peer in link.others if peer != root]
        missing = [] if self.rank == root else [(peer, slices[peer]) for peer in link.others]
        link.finish(link.post(_VALUES_TAG, receive=missing, send=[(peer, own) for peer in lacking]), call.kind)

    def _collect(self, call: CollectiveCall, values: Array) -> dict[int, Array]:
        to = [call.root] if call.kind == "gather" else self.ranks
        return self._exchange(call, dict.fromkeys(to, values), is_taker=self.rank in to)

    def _scatter(self, call: CollectiveCall, parts: Sequence[Array]) -> Array:
        return self._exchange(call, dict(enumerate(parts)), is_taker=True)[call.root]

    def _exchange_pairs(self, call: CollectiveCall, values: Array) -> Array | None:
        link, partner = self._link, call.root
        check_root(partner, self.ranks)
        calls, _ = self._compare(call)
        if partner == self.rank:
            return None
        received = empty_packed(calls[partner].size, call.dtype, call.wire)
        link.finish(link.post(_VALUES_TAG, receive=[(partner, received)], send=[(partner, values)]), call.kind)
        return received

    def _exchange(self, call: CollectiveCall, outgoing: dict[int, Array], *, is_taker: bool) -> dict[int, Array]:
        """Send each worker what `outgoing` has for it; gives what all have sent to this one, by rank."""
        link, nothing = self._link, np.empty(0, np.uint8)
        calls, _ = self._compare(call, [outgoing.get(peer, nothing).size or call.size for peer in self.ranks])
        sizes = [other.size if is_taker else 0 for other in calls]
        found = {peer: empty_packed(size, call.dtype, call.wire) for peer, size in enumerate(sizes)}
        messages = link.post(
            _VALUES_TAG,
            receive=[(peer, found[peer]) for peer in link.others],
            send=[(peer, outgoing[peer]) for peer in link.others if peer in outgoing],
        )
        link.finish(messages, call.kind)
        if self.rank in outgoing:
            found[self.rank][:] = outgoing[self.rank]
        return found

    def _compare(self, call: CollectiveCall, sizes: Sequence[int] | None = None) -> tuple[list[CollectiveCall], float]:
        self._link.check()
        self._calls += 1
        return _compare_calls(self._link, call, self._calls, _CALL_TAG, sizes)


class PeerVectors:
    """Vectors that are reduced in place (`contracts.ResidentVectors`). The call travels with the first values."""

    def __init__(
        self,
        link: "PeerLink",
        sizes: dict[str, int],
        flat: dict[str, Array],
        wire: str,
        *,
        tag: int,
        exact: Mapping[str, int] = NO_EXACT,
    ) -> None:
        self._link, self._wire, self._tag = link, wire, tag
        self._dtype, self._size = next(iter(sizes), "float32"), sum(sizes.values())
        self.flat: dict[str, Any] = dict(flat)
        self._slices = [
            slices
            for dtype, array in flat.items()
            for slices in _slices_of(link, array, wire, tag=tag, exact=exact.get(dtype, 0))
        ]
        self._rounds = 0
        self._sent: list[PeerMessage] = []

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the vectors by the reduction of all workers' vectors."""
        self.send(op, weight=weight)
        return self.finish(op, weight=weight)

    def send(self, op: str, *, weight: float = 1.0) -> None:
        """Begin a round: send the others their slices of these vectors, which must not change any more."""
        self._link.check()
        for dtype in self.flat:
            check_resident_reduction(op, dtype, self._wire)
        contributes = op != "mean" or weight > 0
        self._sent = [message for slices in self._slices for message in slices.exchange(contributes=contributes)]

    def finish(self, op: str, *, weight: float = 1.0) -> Round:
        """Receive from the others, and combine."""
        messages, self._sent = self._sent, []
        try:
            result, weights = self.compare(op, weight)
        except CallMismatch:
            self._link.finish(messages, "an all_reduce")  # nothing of this round is left for the next
            raise
        self._link.finish(messages, "an all_reduce")
        if not result.weight and op == "mean":
            return result
        result.size_bytes = sum(slices.sent_bytes for slices in self._slices)
        for slices in self._slices:
            slices.combine(op, weights)
        self._link.finish([message for slices in self._slices for message in slices.spread()], "an all_reduce")
        for slices in self._slices:
            slices.unpack()
        return result

    def compare(self, op: str, weight: float) -> tuple[Round, Sequence[float]]:
        """Compare the next round's call with those of the others; gives their weights, by rank."""
        self._rounds += 1
        call = CollectiveCall("resident", self._dtype, self._size, op, 0, self._wire, weight)
        calls, waited_s = _compare_calls(self._link, call, self._rounds, self._tag + 1)
        return _result(op, calls, waited_s), counted([other.weight for other in calls])


class BucketedPeerVectors:
    """Vectors whose parts travel while the worker computes the next (`contracts.BucketedVectors`).

    A thread finishes the parts in order; whatever it waits for has the link's deadline.
    """

    def __init__(self, flat: dict[str, Any], parts: Sequence[PeerVectors]) -> None:
        self.flat = flat
        self._parts = parts
        self._begun = 0
        self._tasks: SimpleQueue[tuple[PeerVectors, str, float] | None] = SimpleQueue()
        self._results: SimpleQueue[Round | Exception] = SimpleQueue()
        # A daemon: a worker that fails in the middle of a round ends without waiting for the others.
        threading.Thread(target=self._work, name="maniple parts", daemon=True).start()

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """Send the next part, which is complete."""
        part = self._parts[self._begun]
        part.send(op, weight=weight)
        self._tasks.put((part, op, weight))
        self._begun += 1

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Send the parts that are left, and wait for all."""
        while self._begun < len(self._parts):
            self.begin(op, weight=weight)
        start = time.monotonic()
        results = [self._results.get() for _ in self._parts]
        blocked_s = time.monotonic() - start
        self._begun = 0
        rounds: list[Round] = []
        for result in results:
            if isinstance(result, Exception):
                raise result
            rounds.append(result)
        waited_s = min(blocked_s, sum(one.waited_s for one in rounds))
        # Values that are not finite are known with the last part at the latest.
        size_bytes = sum(one.size_bytes for one in rounds)
        return Round(rounds[0].ranks, rounds[0].weight, waited_s, rounds[-1].nonfinite, size_bytes)

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            part, op, weight = task
            try:
                self._results.put(part.finish(op, weight=weight))
            except Exception as error:  # raised again by all_reduce, in the thread of the caller
                self._results.put(error)


@dataclass(slots=True)
class PeerMessage:
    """A message under way. Its memory must live until it has arrived."""

    peer: int
    data: Array
    work: Any  # the library's own handle


class PeerLink:
    """The messages of one group, with a deadline. After a failure it cannot be used again.

    Libraries derive from it; as it is, it has no peers. Messages between two workers with the same tag arrive in the
    order of sending.

    Attributes:
        awaited: the ranks whose messages are waited for, as far as it is known. They may themselves wait for another.
    """

    def __init__(self, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.others = [peer for peer in range(size) if peer != rank]
        self.awaited: set[int] = set()
        self._failure: ManipleError | None = None
        self._under_way: dict[int, PeerMessage] = {}  # keeps memory alive that may still be written to after a failure
        self._waiting_since: float | None = None  # in the thread that makes the calls
        self._is_closed = threading.Event()

    def begin_send(self, peer: int, data: Array, tag: int) -> Any:
        """Begin to send; gives the library's handle."""
        raise NotImplementedError

    def begin_receive(self, peer: int, data: Array, tag: int) -> Any:
        """Begin to receive into `data`; gives the library's handle."""
        raise NotImplementedError

    def wait(self, messages: Sequence[PeerMessage]) -> tuple[set[int], set[int]]:
        """Wait until all have arrived; gives the ranks that are certainly lost, and those that are late."""
        raise NotImplementedError

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        """The same, once the others were asked for whom they wait: a late worker may only wait for another."""
        return lost, late

    def report_long_waits(self, on_report: OnLongWait) -> None:
        """Report waits that take unusually long; from a thread, since the transport may wait outside of Python."""

        def look() -> None:
            wait, since = LongWait(), None
            wait.on_report = on_report
            while not self._is_closed.wait(_CHECK_S):
                before, since = since, self._waiting_since
                if before is not None and since != before:
                    wait.end(time.monotonic() - before)
                if since is not None:
                    wait.check(lambda: sorted(self.awaited), time.monotonic() - since)

        threading.Thread(target=look, name="maniple waits", daemon=True).start()

    def post(
        self, tag: int, *, receive: Iterable[tuple[int, Array]] = (), send: Iterable[tuple[int, Array]] = ()
    ) -> list[PeerMessage]:
        """Begin to receive and to send; empty arrays need no message."""
        messages = [PeerMessage(p, data, self.begin_receive(p, data, tag)) for p, data in receive if data.size]
        messages += [PeerMessage(p, data, self.begin_send(p, data, tag)) for p, data in send if data.size]
        self._under_way.update({id(message): message for message in messages})
        return messages

    def check(self) -> None:
        """Raise the error by which the link has failed, if it has."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def finish(self, messages: list[PeerMessage], phase: str) -> float:
        """Wait for all messages. Returns the seconds; PeerLost or WaitedTooLong name the missing workers."""
        begin = time.monotonic()
        if messages:
            self._waiting_since = begin
            try:
                lost, late = self.wait(messages)
            finally:
                self._waiting_since = None
            if lost or late:
                self._fail(*self.blame(lost, late), phase, time.monotonic() - begin)
        for message in messages:
            del self._under_way[id(message)]
        return time.monotonic() - begin

    def close(self) -> None:
        """Close the connections."""
        self._failure = self._failure or PeerLost(
            "these collectives are closed: their worker has left the run. Make all calls before worker.leave()."
        )
        self._is_closed.set()

    def _fail(self, lost: set[int], late: set[int], phase: str, after_s: float) -> NoReturn:
        ranks = sorted(lost or late)
        names = ", ".join(map(str, ranks))
        who = f"worker {names} has" if len(ranks) == 1 else f"workers {names} have"
        if lost:
            self._failure = PeerLost(
                f"{who} been lost: the connection broke or the process ended ({phase}, noticed by worker "
                f"{self.rank} after {after_s:.1f} s). The others cannot continue without it: look at its log, and "
                "start the run again."
            )
        else:
            self._failure = WaitedTooLong(
                f"{who} not arrived within {after_s:.1f} s (limit {self.deadline_s:g} s) at {phase}, where worker "
                f"{self.rank} waits. Look at its log; raise --collectives-deadline if its steps take longer."
            )
        raise self._failure


class _Slices:
    """One vector of this worker, reduced in place: each worker combines one slice of everybody's vectors."""

    def __init__(self, link: PeerLink, flat: Array, wire: str, *, tag: int) -> None:
        self._link, self._flat, self._wire, self._tag = link, flat, wire, tag
        self._is_packed = is_packed(flat, wire)
        # The memory that travels: values in half precision, or the vector itself.
        self._travel = empty_packed(flat.size, str(flat.dtype), wire) if self._is_packed else flat
        self._slices = [self._travel[span] for span in _spans(flat.size, link.size)]
        self._own = self._slices[link.rank]
        self._received = {peer: np.empty_like(self._own) for peer in link.others}

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker sends in a round."""
        return sum(self._slices[peer].nbytes + self._own.nbytes for peer in self._link.others)

    def exchange(self, *, contributes: bool = True) -> list[PeerMessage]:
        """Send the others their slices of this vector, and receive this worker's slice of theirs."""
        del contributes  # values without weight are sent too
        if self._is_packed:
            get_codec(self._wire).pack(self._flat, self._travel.view(np.uint8))
        return self._link.post(self._tag, receive=self._received.items(), send=self._of_others())

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Combine this worker's slices, once those of all have arrived."""
        pieces = [self._received.get(rank, self._own) for rank in range(self._link.size)]
        if not self._is_packed:
            combine(op, pieces, weights, self._own)
            return
        pieces = [opened(piece, "float32", self._wire) for piece in pieces]
        combine(op, pieces, weights, pieces[0])
        get_codec(self._wire).pack(pieces[0], self._own.view(np.uint8))

    def spread(self, *, root: int | None = None) -> list[PeerMessage]:
        """Send the result to all, or to `root` alone."""
        to = self._link.others if root is None else {root} - {self._link.rank}
        received = self._of_others() if root in {None, self._link.rank} else ()
        return self._link.post(self._tag, receive=received, send=[(peer, self._own) for peer in to])

    def unpack(self) -> None:
        """Unpack the result into the vector."""
        if self._is_packed:
            get_codec(self._wire).unpack(self._travel.view(np.uint8), self._flat)

    def _of_others(self) -> list[tuple[int, Array]]:
        return [(peer, self._slices[peer]) for peer in self._link.others]


def _slices_of(
    link: PeerLink, flat: Array, wire: str, *, tag: int, exact: int
) -> Iterator[_Slices | CompressedSlices | GatheredVector]:
    """How one vector is reduced: in slices; with a codec that keeps errors and is sparse, as a whole; `exact` values at
    its end are not compressed."""
    codec = get_codec(wire)
    if not codec.keeps_errors or not is_packed(flat, wire):
        yield _Slices(link, flat, wire, tag=tag)
        return
    load_kernels_in_background(wire, size_bytes=flat.nbytes)
    coarse, rest = flat[: flat.size - exact], flat[flat.size - exact :]
    if codec.is_sparse:
        yield GatheredVector(link, coarse, codec, tag=tag)
    else:
        yield CompressedSlices(link, coarse, codec, _spans(coarse.size, link.size), tag=tag)
    if exact:
        yield _Slices(link, rest, "float32", tag=tag)


def _spans(size: int, parts: int) -> list[slice]:
    return [slice(size * k // parts, size * (k + 1) // parts) for k in range(parts)]


def _compare_calls(
    link: PeerLink, call: CollectiveCall, number: int, tag: int, sizes: Sequence[int] | None = None
) -> tuple[list[CollectiveCall], float]:
    """Tell all workers `call`, and compare theirs: by rank, and the seconds of waiting.

    Args:
        sizes: of what each worker is sent, where they differ.
    """
    mine = np.zeros((link.size, 1), CALL)
    mine[:] = call.record(number)
    if sizes is not None:
        mine["size"][:, 0] = sizes
    found = mine.copy()
    messages = link.post(
        tag,
        receive=[(peer, found[peer]) for peer in link.others],
        send=[(peer, mine[peer]) for peer in link.others],
    )
    waited_s = link.finish(messages, call.kind if call.kind != "resident" else "an all_reduce")
    calls = [CollectiveCall.from_record(record) for record in found[:, 0].tolist()]
    compare(link.rank, dict(enumerate(calls)))
    return calls, waited_s


def _result(op: str, calls: Sequence[CollectiveCall], waited_s: float) -> Round:
    return round_result(op, range(len(calls)), [call.weight for call in calls], waited_s)
