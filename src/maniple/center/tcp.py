"""The worker's half of the center over TCP. The host applies the rule; values flow both ways at once.

An exchange sends one offer per parameter and takes one answer each. If the connection breaks, the worker asks
which offers were applied, and makes a new exchange of those that were not: each is applied exactly once. If the
host cannot be reached at all, HostAway leaves the question open; the worker trains on and asks it the next time.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from maniple.center.batch import Batch, Trade
from maniple.center.link import Link
from maniple.center.locks import Patience
from maniple.center.remote import Remote
from maniple.center.trades import Changes, Swap, Values, Whole
from maniple.contracts import Array, Exchanger, Model, Moment, OnValue, Outcome
from maniple.errors import HostAway, ManipleError, WaitedTooLong
from maniple.layout import Layout
from maniple.wire.stream import TIMEOUT_S

T = TypeVar("T")
_PATIENCE_S = 60.0
_BLOCKED_S = TIMEOUT_S + 1.0  # a message may be waited for as long as TIMEOUT_S, before the next look at the time


class Tcp:
    """One worker's view of a center at a host."""

    def __init__(self, remote: Remote, *, rank: int, deadline_s: float, live: Callable[[], int] | None) -> None:
        self.layout = remote.layout
        self._remote, self._rank, self._deadline_s, self._live = remote, rank, deadline_s, live
        self._sent: list[Array] | None = None  # what is under way, of rules that offer changes

    @classmethod
    def open_or_create(
        cls,
        link: Link,
        name: str,
        model: Model,
        *,
        rank: int = 0,
        wire: str = "float32",
        note: str = "",
        deadline_s: float = 60.0,
        live: Callable[[], int] | None = None,
    ) -> tuple["Tcp", bool]:
        """The center `name` at the host, made from `model` if nobody has made it yet; True for its creator.

        `live` tells p where another connection knows it better.
        """
        remote = Remote(link, name, Layout(model.entries), wire=wire)
        created = insist(link, lambda: remote.open(model, note), deadline_s)
        return cls(remote, rank=rank, deadline_s=deadline_s, live=live), created

    @property
    def live(self) -> int:
        """p, the workers alive when the host last spoke."""
        return self._remote.live if self._live is None else self._live()

    def exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome:
        """Apply `rule` to every parameter of `model` and of the center. HostAway if the host is gone."""
        before = self._remote.link.wire_bytes
        outcome = self._exchange(model, rule, memory, moment)
        outcome.wire_bytes = self._remote.link.wire_bytes - before
        return outcome

    def _exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome:
        self._remote.link.stream()  # if the host is away, that is known before anything is done
        model.begin()
        self._settle()
        act = rule.act(moment) if _travels(rule) else None
        if act is None:
            return self._swap(Swap(self._remote, model, rule, memory, moment))
        if act.is_change:
            assert memory is not None
            if self._sent is None:
                self._sent = self.layout.views(self.layout.allocate())
            return self._offer(Changes(self._remote, model, rule, act, memory=memory, sent=self._sent))
        values = Values(self._remote, model, rule, memory, act)
        outcome = self._offer(values)
        try:
            self._remote.fetch(values.unclean, lambda i, c, _: _take_finite(model, i, c), is_plain=True)
        except ManipleError:
            raise
        except OSError as error:  # they are offered again, and refused again
            self._remote.link.drop(str(error))
        return outcome

    def push(self, model: Model, on_value: OnValue | None = None) -> Outcome:
        """Set the center to `model`, but for parameters that are not finite."""

        def push() -> Outcome:
            model.begin()
            self._settle()
            return self._offer(Whole(self._remote, model, on_value), ways=1)

        return insist(self._remote.link, push, self._deadline_s)

    def pull(self, model: Model, on_value: OnValue | None = None, *, is_look: bool = False) -> Outcome:
        """Set `model` to the center; `on_value` sees each parameter's value meanwhile."""
        remote, stale = self._remote, dict[int, int]()

        def take(i: int, value: Array, version: int) -> None:
            x = model.array(i)
            x[:] = value
            self.layout.round(i, x)
            stale.setdefault(i, max(0, version - remote.seen[i]) // 2)
            if not is_look:
                remote.seen[i] = version
            if on_value is not None:
                on_value(i, x)
            model.commit(i)

        def pull() -> list[str]:
            if not is_look:  # which is forgotten again, and must not settle anything
                self._settle()
            model.begin()
            return remote.fetch(self._order(), take)

        torn = insist(remote.link, pull, self._deadline_s)
        return Outcome(size_bytes=remote.size_bytes(), staleness=sum(stale.values()) / len(remote.seen), torn=torn)

    def release(self) -> None:
        """Nothing of the center is kept here."""

    def close(self) -> None:
        """Nothing to let go of: the link is the worker's."""

    def _offer(self, trade: Trade, *, ways: int = 2) -> Outcome:
        outcome = Outcome(size_bytes=ways * self._remote.size_bytes())
        waiting, patience = self._order(), Patience(_PATIENCE_S, slice_s=_BLOCKED_S)
        while waiting:
            left = self._run(trade, waiting, outcome)
            if len(left) < len(waiting):
                patience = Patience(_PATIENCE_S, slice_s=_BLOCKED_S)
            elif patience.is_over():
                raise HostAway(f"the connection to the host keeps breaking: {self._remote.link.reason}")
            waiting = left
        return outcome

    def _run(self, trade: Trade, parameters: list[int], outcome: Outcome) -> list[int]:
        """Offer some parameters; gives those that a break has left unapplied."""
        link = self._remote.link
        batch = Batch(link, self._remote.name, self.layout, parameters, trade)
        link.unsettled.append(batch.resolve)
        unapplied: list[int] = []
        try:
            batch.run(outcome, outcome.size_bytes)
        except ManipleError as error:
            link.drop(str(error))
            raise
        except OSError as error:
            link.drop(str(error))
            unapplied = self._resolve(batch.resolve)
        except BaseException:  # interrupted: what is still under way must not answer a later question
            link.drop("interrupted")
            raise
        link.unsettled.remove(batch.resolve)
        self._remote.live = outcome.live or self._remote.live
        return unapplied

    def _resolve(self, resolve: Callable[[], list[int]]) -> list[int]:
        link, patience = self._remote.link, Patience(_PATIENCE_S, slice_s=_BLOCKED_S)
        while True:
            try:
                return resolve()
            except HostAway:
                raise
            except (OSError, ManipleError) as error:
                link.drop(str(error))
                if not isinstance(error, OSError) or patience.is_over():
                    raise HostAway(f"the connection to the host keeps breaking: {error}") from error
            except BaseException:
                link.drop("interrupted")
                raise

    def _settle(self) -> None:
        """Answer the questions that the loss of the host has left open, of all centers on this link: the host
        remembers a worker's newest exchange only."""
        link = self._remote.link
        while link.unsettled:
            self._resolve(link.unsettled[0])
            link.unsettled.pop(0)

    def _swap(self, swap: Swap) -> Outcome:
        outcome = Outcome(size_bytes=2 * self._remote.size_bytes())
        for i in self._order():
            patience = Patience(_PATIENCE_S, slice_s=_BLOCKED_S)
            swap.is_done, torn = False, list[str]()
            while not swap.is_done:
                if patience.is_over():
                    raise WaitedTooLong(
                        f"waited {_PATIENCE_S:g} s to swap {self.layout.entries[i].name!r}, which others write "
                        "all the time. Exchange less often, or use a rule that the host knows (easgd, asgd, downpour)."
                    )
                try:
                    torn = swap.compute(i)
                except ManipleError:
                    raise
                except OSError as error:
                    self._remote.link.drop(str(error))
                    continue
                self._run(swap, [i], outcome)
            outcome.torn += torn
            outcome.staleness += swap.staleness / len(self.layout.entries)
            if not swap.is_clean:
                outcome.refused.append(self.layout.entries[i].name)
        return outcome

    def _order(self) -> list[int]:
        """Workers begin apart, so that they seldom wait for each other's locks."""
        count = len(self.layout.entries)
        start = self._rank * count // max(1, self.live) % count
        return [*range(start, count), *range(start)]


def insist(link: Link, act: Callable[[], T], deadline_s: float) -> T:
    """Do what a worker cannot go on without, again and again until `deadline_s` have passed."""
    patience = Patience(deadline_s, slice_s=_BLOCKED_S)
    while True:
        try:
            link.stream()
            return act()
        except HostAway as error:
            if patience.is_over():
                raise HostAway(
                    f"{error}. It was waited for {deadline_s:g} s. Is it running, and is this its address? After a "
                    "crash, start it again with `maniple serve --resume RUN`."
                ) from error
            time.sleep(0.02)
        except ManipleError as error:
            link.drop(str(error))
            raise
        except OSError as error:
            link.drop(str(error))
            if patience.is_over():
                raise HostAway(f"the connection to the host keeps breaking: {error}") from error
        except BaseException:  # interrupted: a late answer must not be taken for that of another question
            link.drop("interrupted")
            raise


def _travels(rule: Exchanger) -> bool:
    """The host knows the rule: what it says of itself (`act`) was written with what it does (`exchange`)."""

    def definer(method: str) -> type:
        return next(kind for kind in type(rule).__mro__ if method in vars(kind))

    return issubclass(definer("act"), definer("exchange"))


def _take_finite(model: Model, i: int, c: Array) -> None:
    x = model.array(i)
    np.copyto(x, c, where=~np.isfinite(x))
    model.commit(i)
