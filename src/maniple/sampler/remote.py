"""Leases for workers elsewhere: what such a worker asks for, and how its host grants it."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from maniple.center.segment import Segment
from maniple.errors import HostAway, InvalidArgument, WaitedTooLong
from maniple.sampler.lease import Holder, Lease, Terms, Verdict
from maniple.sampler.position import is_looked_at
from maniple.sampler.table import MOST_LEASES, Table

TERMS, LEASE, EPOCH, LOOK = "maniple-terms", "maniple-lease", "maniple-epoch", "maniple-look"  # the questions
_MOST_SAMPLERS = 1 << 10  # each has a table of 450 KB in memory
_MOST_SAMPLES = 1 << 53

_OPEN_S = 60.0
_LEASE_S = 5.0  # for so long a worker waits for its next samples; then it trains on without a lease


class Ask(Protocol):
    """A question to the host."""

    def __call__(self, request: str, info: dict[str, Any], *, timeout_s: float) -> Any: ...


class Wish(msgspec.Struct, omit_defaults=True):
    """What a worker asks of its host; `Table.take` tells the meaning."""

    sampler: int
    terms: Terms
    epoch: int = -1
    most: int = 0
    held: list[int] = []
    drawn: list[int] = []
    done: list[int] = []
    back: list[int] = []


class Tables:
    """All tables of a run, as its host opens them for workers elsewhere."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._tables: dict[int, Table] = {}
        self._lock = threading.Lock()  # a table excludes other processes; this one's threads are for us to exclude

    def grant(self, question: str, info: Any, holder: Holder) -> Any:
        """The answer to one of the questions."""
        if question == LOOK:
            return is_looked_at(self._segment.path, has_looked=info == {"has_looked": True})
        try:
            wish = msgspec.convert(info, Wish)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{question!r} came with {error}. Worker and host must have one version.") from None
        slots = {*wish.held, *wish.drawn, *wish.done, *wish.back}
        is_sound = (
            0 <= wish.sampler < _MOST_SAMPLERS
            and -1 <= wish.epoch < 1 << 30
            and 0 <= wish.most < _MOST_SAMPLES
            and all(0 < number < _MOST_SAMPLES for number in (wish.terms.count, wish.terms.chunk))
        )
        if not is_sound or not all(0 <= slot < MOST_LEASES for slot in slots):
            raise InvalidArgument(f"{question!r} came with numbers that no sampler has: {info}.")
        with self._lock:
            table = self._opened(wish)
            if question == TERMS:
                return msgspec.to_builtins(table.terms)
            if question == EPOCH:
                return table.first_epoch(holder.rank, wish.most)
            if table.terms != wish.terms:  # the host began again from a snapshot before this sampler's time
                raise InvalidArgument(
                    f"sampler {wish.sampler} is cut into chunks of {table.terms.chunk} now, this worker's of "
                    f"{wish.terms.chunk}. Start this worker again."
                )
            news = {"held": wish.held, "drawn": wish.drawn, "done": wish.done, "back": wish.back}
            return msgspec.to_builtins(table.take(holder, wish.epoch, most=wish.most, **news))

    def _opened(self, wish: Wish) -> Table:
        table = self._tables.get(wish.sampler)
        if table is None:
            table = self._tables[wish.sampler] = Table.open(self._segment, wish.sampler, wish.terms)
        table.compare(wish.sampler, wish.terms)
        return table


class Borrower:
    """The lender of a worker elsewhere. The next lease is asked for while the one before is trained on."""

    def __init__(self, ask: Ask, number: int, terms: Terms, *, on_away: Callable[[], None]) -> None:
        self._ask, self._number, self._on_away = ask, number, on_away
        self.terms = terms
        self.terms = msgspec.convert(ask(TERMS, self._wish(), timeout_s=_OPEN_S), Terms)
        self._held: set[int] = set()
        self._news: dict[str, list[int]] = {"drawn": [], "done": [], "back": []}  # that the host has not heard yet
        self._lock = threading.Lock()  # over these two
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maniple-leases")
        self._ahead: tuple[int, Future[Lease | Verdict]] | None = None
        self._is_away = False

    def first_epoch(self, limit: int) -> int:
        """Where this worker begins, as the host knows."""
        return int(self._ask(EPOCH, self._wish(most=limit), timeout_s=_OPEN_S))

    def take(
        self,
        epoch: int,
        *,
        most: int = 0,
        drawn: Sequence[int] = (),
        done: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> Lease | Verdict:
        """The next lease. While the host is away, training goes on with samples that nobody has lent."""
        answer: Lease | Verdict = Verdict.END
        if self._ahead is not None:
            if self._is_away and epoch == self._ahead[0] and not self._ahead[1].done():
                self._note(drawn=drawn, done=done, back=back)
                return self._unlent(epoch, most)  # training does not wait for each new try
            (asked, future), self._ahead = self._ahead, None
            answer = future.result()
            if isinstance(answer, Lease) and (asked != epoch or 0 < most < answer.samples):  # the pass was left early
                back, answer = [*back, answer.slot], Verdict.END
        self._note(drawn=drawn, done=done, back=back)
        if not isinstance(answer, Lease):
            answer = self._fetch(epoch, most)  # by this thread: when a script has ended, no other can be started
        if isinstance(answer, Lease) and epoch >= 0 and most != answer.samples:
            self._ahead = epoch, self._thread.submit(self._fetch, epoch, most and most - answer.samples)
        return answer

    def _note(self, **news: Sequence[int]) -> None:
        """Keep news for the next question. Samples that nobody has lent have no slot."""
        with self._lock:
            for name, slots in news.items():
                self._news[name] += [slot for slot in slots if slot >= 0]
            self._held.difference_update(self._news["done"], self._news["back"])

    def _fetch(self, epoch: int, most: int) -> Lease | Verdict:
        with self._lock:
            news, self._news = self._news, {name: [] for name in self._news}
            wish = self._wish(epoch=epoch, most=most, held=sorted(self._held), **news)
        try:
            answer = self._ask(LEASE, wish, timeout_s=_LEASE_S)
        except (HostAway, WaitedTooLong):
            self._is_away = True
            with self._lock:
                self._news = {name: slots + self._news[name] for name, slots in news.items()}
            self._on_away()  # raises, if that has gone on for too long
            return Verdict.END if epoch < 0 else self._unlent(epoch, most)
        self._is_away = False
        if isinstance(answer, str):
            return Verdict(answer)
        lease = msgspec.convert(answer, Lease)
        with self._lock:
            self._held.add(lease.slot)
        return lease

    def _unlent(self, epoch: int, most: int) -> Lease:
        size = min(self.terms.chunk, self.terms.count, most or self.terms.count)
        start = random.randrange(self.terms.count - size + 1)
        return Lease(-1, epoch, start, start + size)

    def _wish(self, **values: Any) -> dict[str, Any]:
        return msgspec.to_builtins(Wish(self._number, self.terms, **values))
