"""Leases for workers elsewhere: the requests of such a worker, and how its host grants them."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Unpack

import msgspec

from maniple.errors import HostAway, InvalidArgument, WaitedTooLong
from maniple.memory.segment import Segment
from maniple.sampler.leases import MAX_LEASES, Lease, LeaseReports, LeaseTable, LeaseTerms, NoLease
from maniple.sampler.position import is_looked_at

TERMS, LEASE, EPOCH, LOOK = "maniple-terms", "maniple-lease", "maniple-epoch", "maniple-look"  # the requests
_MAX_SAMPLERS = 1 << 10  # each has a table of 450 KB in memory
_MAX_SAMPLES = 1 << 53  # exact in JSON numbers

_OPEN_S = 60.0  # to open a sampler: a worker cannot begin without its terms
_LEASE_S = 5.0  # to get the next lease; after that the worker trains on without one

AskHost = Callable[..., Any]  # ask(request, info, timeout_s=...) sends a request to the host and returns its reply


class LeaseRequest(msgspec.Struct, omit_defaults=True):
    """The arguments of a request; `LeaseTable.take` has their meaning."""

    sampler: int
    terms: LeaseTerms
    epoch: int = -1
    most: int = 0
    held: list[int] = []
    drawn: list[int] = []
    done: list[int] = []
    back: list[int] = []


class LeaseTables:
    """All tables of a run, as its host opens them for workers elsewhere."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._tables: dict[int, LeaseTable] = {}
        self._lock = threading.Lock()  # a table's own lock excludes other processes only

    def grant(self, kind: str, info: Any, holder: tuple[int, int]) -> Any:
        """The reply to a request of this kind, from the worker of this rank and incarnation."""
        if kind == LOOK:
            return is_looked_at(self._segment.path, has_looked=info == {"has_looked": True})
        request = _checked(kind, info)
        with self._lock:
            table = self._tables.get(request.sampler)
            if table is None:
                table = self._tables[request.sampler] = LeaseTable.open(self._segment, request.sampler, request.terms)
            table.check_terms(request.sampler, request.terms)
            table.holder = holder
            if kind == TERMS:
                return msgspec.to_builtins(table.terms)
            if kind == EPOCH:
                return table.first_epoch(request.most)
            if table.terms != request.terms:  # the host was restored from a snapshot older than this sampler
                raise InvalidArgument(
                    f"sampler {request.sampler} has leases of {table.terms.lease_size} samples now, this worker's has "
                    f"{request.terms.lease_size}. Start this worker again."
                )
            slots = {"held": request.held, "drawn": request.drawn, "done": request.done, "back": request.back}
            return msgspec.to_builtins(table.take(request.epoch, most=request.most, **slots))


def _checked(kind: str, info: Any) -> LeaseRequest:
    """A request from the network; InvalidArgument if a value is out of range."""
    try:
        request = msgspec.convert(info, LeaseRequest)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"request {kind!r} is malformed: {error}. Use the same version of maniple for worker and host."
        ) from None
    slots = {*request.held, *request.drawn, *request.done, *request.back}
    is_valid = (
        0 <= request.sampler < _MAX_SAMPLERS
        and -1 <= request.epoch < 1 << 30
        and 0 <= request.most < _MAX_SAMPLES
        and all(0 < number < _MAX_SAMPLES for number in (request.terms.count, request.terms.lease_size))
        and all(0 <= slot < MAX_LEASES for slot in slots)
    )
    if not is_valid:
        raise InvalidArgument(f"request {kind!r} has numbers out of range, which no sampler sends: {info}.")
    return request


class RemoteLender:
    """Gets leases from the host. The next lease is requested while the one before is trained on."""

    def __init__(self, ask: AskHost, number: int, terms: LeaseTerms, *, on_away: Callable[[], None]) -> None:
        self._ask, self._number, self._on_away = ask, number, on_away
        self.terms = terms
        self.terms = msgspec.convert(ask(TERMS, self._request(), timeout_s=_OPEN_S), LeaseTerms)
        self._held: set[int] = set()
        self._unreported: dict[str, list[int]] = {"drawn": [], "done": [], "back": []}
        self._lock = threading.Lock()  # over these two
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maniple-leases")
        self._ahead: tuple[int, Future[Lease | NoLease]] | None = None  # the epoch, and the lease requested for it
        self._is_away = False

    def first_epoch(self, limit: int) -> int:
        """The pass in which this worker begins."""
        return int(self._ask(EPOCH, self._request(most=limit), timeout_s=_OPEN_S))

    def take(self, epoch: int, *, most: int = 0, **reports: Unpack[LeaseReports]) -> Lease | NoLease:
        """The next lease. While the host is away, training continues with random samples that are not leased."""
        answer: Lease | NoLease = NoLease.END
        if self._ahead is not None:
            if self._is_away and epoch == self._ahead[0] and not self._ahead[1].done():
                self._report_later(**reports)
                return self._unleased(epoch, most)  # do not wait for each new attempt
            (requested, future), self._ahead = self._ahead, None
            answer = future.result()
            is_stale = isinstance(answer, Lease) and (requested != epoch or 0 < most < answer.samples)
            if isinstance(answer, Lease) and is_stale:  # the pass was left early
                self._report_later(back=[answer.slot])
                answer = NoLease.END
        self._report_later(**reports)
        if not isinstance(answer, Lease):
            answer = self._fetch(epoch, most)  # in this thread: at the end of a script no other can be started
        if isinstance(answer, Lease) and epoch >= 0 and most != answer.samples:
            self._ahead = epoch, self._thread.submit(self._fetch, epoch, most and most - answer.samples)
        return answer

    def _report_later(self, **reports: Unpack[LeaseReports]) -> None:
        """Keep reports for the next request. Samples that are not leased have no slot."""
        with self._lock:
            for name, unreported in self._unreported.items():
                unreported += [slot for slot in reports.get(name, ()) if slot >= 0]
            self._held.difference_update(self._unreported["done"], self._unreported["back"])

    def _fetch(self, epoch: int, most: int) -> Lease | NoLease:
        with self._lock:
            reports, self._unreported = self._unreported, {name: [] for name in self._unreported}
            request = self._request(epoch=epoch, most=most, held=sorted(self._held), **reports)
        try:
            answer = self._ask(LEASE, request, timeout_s=_LEASE_S)
        except (HostAway, WaitedTooLong):
            self._is_away = True
            with self._lock:
                self._unreported = {name: slots + self._unreported[name] for name, slots in reports.items()}
            self._on_away()  # raises if the host has been away for too long
            return NoLease.END if epoch < 0 else self._unleased(epoch, most)
        self._is_away = False
        if isinstance(answer, str):
            return NoLease(answer)
        lease = msgspec.convert(answer, Lease)
        with self._lock:
            self._held.add(lease.slot)
        return lease

    def _unleased(self, epoch: int, most: int) -> Lease:
        size = min(self.terms.lease_size, self.terms.count, most or self.terms.count)
        start = random.randrange(self.terms.count - size + 1)
        return Lease(-1, epoch, start, start + size)

    def _request(self, **values: Any) -> dict[str, Any]:
        return msgspec.to_builtins(LeaseRequest(self._number, self.terms, **values))
