"""Synchronous values: all workers exchange parameters after every k steps (LocalSGD, DiLoCo; EASGD and Downpour with
sync), as a whole or one fragment after the other, at once or in the background.
"""

import functools
import math
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from maniple.clock import clock
from maniple.collectives.call import PassedOver
from maniple.contracts import Array, ExchangeInfo, ResidentVectors, Round
from maniple.layout import Layout, fragments_of
from maniple.replica.in_background import BackgroundCall, add_since
from maniple.replica.nonfinite import is_finite
from maniple.replica.replica import TrainingMark
from maniple.replica.synchronous import Synchronous
from maniple.wire.codecs import get_codec


class Fragment:
    """Entries that are exchanged in one round.

    Attributes:
        which: the numbers of the entries that are exchanged; buffers may be left out.
        layout: of the vectors that are reduced.
        offers: what this worker contributes, by entry: views of these vectors.
        sent: the replica's values when the round in the background began, by entry.
        mark: how far training was when the last round began.
    """

    def __init__(self, which: Sequence[int], local: Collection[int], layout: Layout, resident: ResidentVectors) -> None:
        self.layout, self.resident = layout, resident
        views = dict(zip(which, layout.views(resident.flat), strict=True))
        self.local = [views[i] for i in which if i in local]
        self.which = [i for i in which if i not in local]
        self.offers = {i: views[i] for i in self.which}
        self.sent: dict[int, Array] = {}
        self.mark: TrainingMark | None = None


class SynchronousValues(Synchronous):
    """Exchanges the parameters of all workers after every k steps: each offers values, all accept their reduction.

    With fragments, round r exchanges fragment r modulo P. With overlap or a delay, its collective call runs in the
    background, and its result is accepted by a copy of what was sent, whose change the replica then takes over.
    """

    def _open_vectors(self) -> tuple[Layout, ResidentVectors]:
        rule, model, entries = self._rule, self._model, self._layout.entries
        is_coarse = get_codec(self._wire).keeps_errors
        local = {i for i in range(len(entries)) if rule.norm == "local" and model.is_buffer(i)}
        self._fragments: list[Fragment] = []
        for which in fragments_of(entries, rule.fragments):
            layout = self._layout if rule.fragments == 1 else Layout([entries[i] for i in which])
            # An error must not make a variance negative: only parameters are rounded coarsely.
            parameters = sum(i < model.parameter_count for i in which)
            exact: dict[str, Any] = {"exact": layout.sizes_from(parameters)} if is_coarse else {}
            resident = self._collectives.reside(layout.sizes, wire=self._wire, **exact)
            self._fragments.append(Fragment(which, local, layout, resident))
        self._exchanged = {i for fragment in self._fragments for i in fragment.which}
        self._fragment = self._fragments[0]  # of the round that comes next, or is in flight
        self._flight: BackgroundCall[Round] | None = None
        self._weight = 1.0  # of this worker in the round in flight
        # A codec rounds the changes since the last round far less than the values, so these are computed here.
        self._sends_difference = is_coarse and "center" in rule.worker_vectors and not rule.offers_changes
        self._since_round = 0  # steps
        self._sending_s = 0.0  # that the round in flight has held up training
        return self._fragment.layout, self._fragment.resident

    def step(self) -> None:
        replica, flight = self.replica, self._flight
        replica.is_exchanging = False
        replica.count_step()
        self._since_round += 1
        if flight is not None and self._is_due_to_land(flight):
            self._land()
        if self._is_round_due():
            self._begin_round(in_background=self._has_background)

    @property
    def _has_background(self) -> bool:
        """Rounds that come due run in the background."""
        return self._rule.overlap or bool(self._rule.delay)

    def _is_round_due(self) -> bool:
        pace, count = self.replica.pace, len(self._fragments)
        if count == 1:
            return pace.due(self._since_round, clock.monotonic() - self.replica.start)
        k, q = getattr(pace, "n", 1), (self.rounds + (self._flight is not None)) % count
        return self._since_round >= (q + 1) * k // count - q * k // count

    def _is_due_to_land(self, flight: "BackgroundCall[Round]") -> bool:
        delay = self._rule.delay
        return flight.is_done if delay is None else self.replica.steps - flight.mark.steps >= delay

    def exchange(self) -> None:
        """Exchange all fragments."""
        for _ in self._fragments:
            if self._is_finished:
                return
            self._begin_round()
        self._context.exit_if_signalled()

    def _begin_round(self, *, in_background: bool = False) -> None:
        """Begin a round with the next fragment; end it too, unless it goes on in the background."""
        self._land()
        if self._is_finished:
            return
        replica, begin = self.replica, clock.monotonic()
        self._select_fragment()
        self._prepare_round()
        replica.is_exchanging, self._since_round, mark = True, 0, replica.mark()
        fragment = self._fragment
        try:
            self._offer()
            self._weight = self._contributions.checked_weight(1.0, fragment.resident.flat)
            if in_background:
                self._copy_replica(fragment)
                self._collectives.set_background(True)
                self._sending_s = clock.monotonic() - begin
                self._flight = BackgroundCall(self._call_round(self._weight), mark)
            else:
                self._exchange_moments(max(0.0, self._weight))
                self._all_reduce(self._weight)
                self._end_round(mark)
        finally:
            replica.is_exchanging = False
        if in_background:
            if self._rule.delay == 0:
                self._land()
            return
        self._note_round(clock.monotonic() - begin)

    def _land(self) -> None:
        """Wait for the round in flight, if there is one, and accept its result."""
        if (flight := self._flight) is None:
            return
        replica, begin = self.replica, clock.monotonic()
        replica.is_exchanging = True
        try:
            flight.wait(self._look_after_signals)  # if that raises, the round is still in flight
            self._flight = None
            try:
                self._last = flight.result(math.inf, "a round in the background")
                self.rounds += 1
            except PassedOver:
                self._join_again()
            finally:
                self._collectives.set_background(False)
            waited_s = clock.monotonic() - begin
            self.waited_s += waited_s
            self._end_round(flight.mark, is_late=True)
        finally:
            replica.is_exchanging = False
        replica.progress.hidden_s += max(0.0, flight.duration_s - waited_s)
        self._note_round(self._sending_s + clock.monotonic() - begin)

    def await_round(self) -> None:
        """Wait for the end of the round in flight: elastic members take one that waits elsewhere for one that does not
        arrive here.
        """
        if self._flight is not None and self._elastic is not None:
            self._flight.wait(self._look_after_signals)

    def rest(self) -> None:
        """Take no part until the next round, but in one that is in flight; called again while this worker waits."""
        if self._flight is None or self._flight.is_done:
            super().rest()

    @contextmanager
    def center(self) -> Generator[None]:
        """Let the model hold the result of the last round, for which workers wait that have it still in flight."""
        self._land()
        with super().center():
            yield

    def _look_after_signals(self) -> None:
        """End a wait for a round in flight as that of a round at once ends: elastic members continue by themselves."""
        if self._elastic is not None:
            self._context.exit_if_signalled()
        self._context.exit_if_overdue()

    def _join_again(self) -> None:
        """The others have gone on without this worker's round in flight: take over their state, and follow them."""
        self._enter_again()
        self._contribute_nothing()
        self._weight = 0.0
        self._all_reduce(0.0)
        self._copy_replica(self._fragment)

    def _end_round(self, mark: "TrainingMark", *, is_late: bool = False) -> None:
        """Check what the round has left out, and accept its result."""
        if (error := self._contributions.check_round(self._last, self.replica.steps)) is not None:
            self._end_diverged(error)
        if self._collectives.rank in self._last.nonfinite:
            self._return_to_center()
        self._fragment.mark = mark
        self._accept(is_late=is_late)

    def _note_round(self, cost_s: float) -> None:
        """Count a round that was made; the first worker of a round brings the center up to date."""
        replica, size_bytes = self.replica, self._last.size_bytes
        replica.progress.round(len(self._last.ranks), size_bytes)
        marks = [fragment.mark for fragment in self._fragments]
        oldest = None if None in marks else min(marks, key=lambda one: one.steps if one else 0)
        replica.count_exchange(
            cost_s, size_bytes, oldest or TrainingMark(replica.steps - replica.steps_since_exchange, None)
        )
        if self._is_first and self._fragment is self._fragments[-1]:
            self.publish()
        if self._context.exit_code is not None:
            self._context.exit_if_signalled()

    def _select_fragment(self) -> None:
        """Make the fragment of the next round the one that is exchanged."""
        if len(self._fragments) > 1:
            self._fragment = self._fragments[self.rounds % len(self._fragments)]
            self._resident, self._contributions.layout = self._fragment.resident, self._fragment.layout

    def _call_round(self, weight: float) -> Callable[[], Round]:
        quorum = {"quorum": self._rule.quorum} if self._rule.quorum else {}
        return functools.partial(self._resident.all_reduce, "mean", weight=weight, **quorum)

    def _copy_replica(self, fragment: Fragment) -> None:
        """Keep what was sent, from which the result of the round is computed."""
        self._model.begin()
        for i in fragment.which:
            value = self._model.array(i)
            if i in fragment.sent:
                fragment.sent[i][:] = value
            else:
                fragment.sent[i] = value.copy()

    def _offer(self) -> None:
        """Write what this worker contributes to the round."""
        self._model.begin()
        fragment = self._fragment
        for offer in fragment.local:  # each worker keeps its own; zeros, since what is there must be finite
            offer[:] = 0
        for i, offer in fragment.offers.items():
            self._rule.offer(self._model.array(i), self._state_of(i), offer)
            if self._sends_difference:
                offer -= self._state_of(i)["center"]

    def _accept(self, *, is_late: bool = False) -> None:
        """Change the replica by the result of the round."""
        weight, rule, fragment = self._last.weight, self._rule, self._fragment
        # The step is computed from the rounds, so that schedules give the same value in all workers.
        info = ExchangeInfo(step=self.rounds * getattr(self.replica.pace, "n", 1), live=max(1, round(weight)))
        self._model.begin()
        for i, total in fragment.offers.items() if weight else ():
            if rule.op == "sum":
                total *= total.dtype.type(weight)  # the round has computed the mean
            if self._sends_difference:
                total += self._state_of(i)["center"]
            accept = rule.accept_buffer if self._model.is_buffer(i) else rule.accept
            value = self._model.array(i)
            if is_late:
                sent = fragment.sent[i]
                accept_copy = functools.partial(accept, sent, total, self._state_of(i), info)
                self._accept_late(value, sent, accept_copy, is_buffer=self._model.is_buffer(i))
            else:
                accept(value, total, self._state_of(i), info)
            self._model.commit(i)
        self._complete_round()

    def _accept_late(self, x: Array, s: Array, accept: Callable[[], None], *, is_buffer: bool) -> None:
        """Let `s`, which was sent, accept the result, and take the change over to `x`, which has trained since."""
        share = self._rule.own_share
        with np.errstate(invalid="ignore"):
            since = x - s
        accept()
        if share is None:
            if not is_finite(since):
                np.copyto(since, 0, where=~np.isfinite(since))
            add_since(since, s, x, is_buffer=is_buffer)
        else:
            x *= x.dtype.type(share)
            x += x.dtype.type(1 - share) * s

    def _return_to_center(self) -> None:
        """Start again from the last round: what this worker has trained since is not finite."""
        for i in self._fragment.which:
            value = self._model.array(i)
            self._show(i, value)
            self._model.commit(i)
            if i in self._fragment.sent:
                self._fragment.sent[i][:] = value
        self._model.begin()

    def _shown(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state is None else self._own_values_kept(self._show)

    def _show(self, i: int, value: Array) -> None:
        if i in self._exchanged:
            value[:] = self._rule.shared(value, self._state_of(i))

    def _finish_rounds(self) -> bool:
        if self.replica.is_center:
            return False
        self._land()
        if self.replica.steps_since_exchange:
            self.exchange()
        return True

    @property
    def _publishes_last(self) -> bool:
        """With a copy of the center, all workers publish the same, and the first one may have left in the last round.

        Else replicas may differ: if several workers published theirs at once, the center would be a mixture of them.
        """
        if "center" in self._rule.worker_vectors:
            return True
        return self._collectives.rank == min(self._last.ranks or self._collectives.ranks)

    def _contribute_nothing(self) -> None:
        self._select_fragment()
        super()._contribute_nothing()
        self._exchange_moments(0.0)

    def _follow_round(self) -> bool:
        self._accept()
        return True

    def _exchange_moments(self, weight: float) -> None:
        """Average or reset the optimizer's moments, as the rule says."""
        collectives = self._collectives

        def average(x: Array, counts: bool) -> None:
            collectives.all_reduce(x, x, "mean", weight=weight if counts else 0.0)

        def gather(mine: bytes) -> list[bytes]:
            return [one.tobytes() for one in collectives.all_gather(np.frombuffer(mine, np.uint8))]

        with suppress(PassedOver):  # the round finds it too, and takes over the others' state
            self._model.reduce_moments(self._rule.moments, average, gather)
