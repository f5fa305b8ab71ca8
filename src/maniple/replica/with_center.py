"""Sharing through a center: each worker exchanges with it at its own pace and waits for no other worker.

With `overlap`, exchanges run in the background (`in_background`). One is in flight at a time: while it is, none that
comes due begins, and its result is applied between two steps. Whatever needs the center, such as `pull()` and the end
of training, first waits for it.
"""

import functools
import math
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.clock import Deadline, clock
from maniple.contracts import Array, Center, ExchangeInfo, Outcome, State
from maniple.errors import HostAway, WaitedTooLong
from maniple.pace import Every
from maniple.replica.context import TrainingContext
from maniple.replica.in_background import BackgroundCall, ReplicaCopy
from maniple.replica.sharing import Sharing
from maniple.rules import Rule

if TYPE_CHECKING:
    from maniple.replica.replica import Replica, TrainingMark

_RESIDENT_BYTES = 32 << 20  # of the center that `center()` keeps mapped in: a large model must fit in memory only once
_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly spread, for any number of workers
_MIN_SPEED = 0.01  # of the fast workers: the measurement of a worker that pauses falls to 0
_RESEND_S = 0.25  # after a failed exchange in the background: each try copies the replica
_RETRY_S = 0.1  # between two tries of the last exchange with a host that is away
_MEASURED = (10, 60)  # the first and the last exchange between which the cost is measured: the first ones load kernels
_MAX_SHARE = 0.2  # of the time; beyond it, exchanges at every step cost more than they gain
_GATED_LIMIT = 3  # in a row: one or two may be a bad batch
_UNANNOUNCED_S = 1.0  # absence of the host that is worth no warning: a lost packet, or a restart of the server


class WithCenter(Sharing):
    """Exchanges one replica with a center.

    An exchange that fails because the host is away is tried again when the pace says so; training continues, and ends
    with HostAway only after the host deadline.
    """

    _center: Center
    _away_since: float | None = None  # while exchanges fail
    _is_announced = False
    _next_send = 0.0  # when an exchange may be sent again, after one that has failed
    _sending_s = 0.0  # that the exchange in flight has held up training
    _has_warned = False  # about parameters whose lock cannot be taken
    _measured_from = (0.0, 0.0)  # the time, and the seconds spent in exchanges until then
    _flight: BackgroundCall[Outcome] | None = None
    _copy: ReplicaCopy | None = None  # allocated with the first exchange in the background
    _is_unresolved = (
        False  # an exchange of the copy has failed: what the host has applied of it comes into the copy later
    )

    def __init__(self, center: Center, *, has_gate: bool = False) -> None:
        super().__init__(center)
        self._has_gate = has_gate
        self._gated_in_a_row = 0

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        self._attach_shared()
        if self._has_gate:
            replica.progress.gated = 0

    def begin(self) -> None:
        """Take the center's values; the creator too, since rules with state start from them."""
        self._pull_center()

    def step(self) -> None:
        replica, flight = self.replica, self._flight
        replica.count_step()
        if flight is not None and flight.is_done:
            self._land()
        now, steps = clock.monotonic(), replica.steps_since_exchange
        if self._rule.dynamic:  # the same time as the fast workers, in fewer steps
            steps = int(steps / max(_MIN_SPEED, self._context.host.relative_speed))
        if replica.pace.due(steps, now - replica.start) and self._flight is None:
            if not self._rule.overlap:
                self._exchange()
            elif now >= self._next_send:
                self._send()

    def exchange(self) -> None:
        self.replica.refuse_inside_center("exchange() was called")
        self._land()
        self._exchange()
        self._context.exit_if_signalled()

    def _exchange(self, *, is_last: bool = False) -> None:
        if self._is_finished or self._context.host.is_over:
            return
        begin, copy = clock.monotonic(), None
        try:
            with self._without_look_ahead():
                if self._rule.overlap or self._is_unresolved:  # what broke, or breaks now, is resolved in the copy
                    copy = self._taken_copy()
                model = self._model if copy is None else copy
                act = functools.partial(self._center.exchange, model, *self._exchanged(is_last))
                outcome, cost_s = self.replica.timed("exchange", act)
        except HostAway as error:
            self._note_absence(error, begin, clock.monotonic() - begin)
            return
        finally:
            if copy is not None:
                copy.bring_back()
        self._is_unresolved = False
        self._note_exchange(outcome, cost_s)

    def _exchanged(self, is_last: bool = False) -> tuple[Rule, list[State] | None, ExchangeInfo]:
        """What the center needs for an exchange, beside the values."""
        info = ExchangeInfo(step=self.replica.steps, live=max(1, self._center.live), is_last=is_last)
        return self._rule, None if self._state is None else self._state.chunks, info

    def _without_look_ahead(self) -> AbstractContextManager[None]:
        """With Nesterov's momentum the optimizer keeps x + delta v, and x meets the center."""
        return nullcontext() if self._rule.nesterov is None else self._model.without_look_ahead()

    def _send(self) -> None:
        """Begin an exchange in the background."""
        if self._is_finished or self._context.host.is_over:
            return
        replica, begin = self.replica, clock.monotonic()
        replica.is_exchanging = True
        with self._without_look_ahead():
            copy = self._taken_copy()
        act = functools.partial(self._center.exchange, copy, *self._exchanged())
        self._flight = BackgroundCall(act, replica.mark())
        self._sending_s = clock.monotonic() - begin
        replica.is_exchanging = False

    def _land(self, timeout_s: float = math.inf) -> None:
        """Wait for the exchange in flight, if there is one, and apply its result."""
        if (flight := self._flight) is None:
            return
        assert self._copy is not None
        replica, begin, away, outcome = self.replica, clock.monotonic(), None, Outcome()
        replica.is_exchanging = True
        try:
            outcome = flight.result(timeout_s, "an exchange in the background", self._context.exit_if_overdue)
        except HostAway as error:  # parts of it may have been applied
            away, self._next_send = error, clock.monotonic() + _RESEND_S
        finally:
            waited_s = clock.monotonic() - begin
            if flight.is_done:  # else the wait for it was given up
                self._flight = None
                self._copy.bring_back()
            replica.is_exchanging = False
        self._is_unresolved = away is not None
        hidden_s = max(0.0, flight.duration_s - waited_s)
        replica.progress.hidden_s += hidden_s
        cost_s = self._sending_s + clock.monotonic() - begin
        if away is not None:
            replica.write_exchange("broken", flight.start, flight.duration_s, operation="exchange")
            self._note_absence(away, flight.begin, cost_s)
            return
        delay = replica.steps - flight.mark.steps
        replica.write_exchange("exchange", flight.start, flight.duration_s, outcome, hidden=hidden_s, delay=delay)
        self._note_exchange(outcome, cost_s, flight.mark)

    def _taken_copy(self) -> ReplicaCopy:
        """The copy, set to the replica."""
        copy = self._copy = self._copy or ReplicaCopy(self._model, self._layout)
        if self._is_unresolved:
            copy.bring_back()  # an exchange of another model may have resolved it
        copy.take()
        return copy

    def _drop_resolved(self) -> None:
        """The replica is the center now: what a failed exchange has turned out to have changed is obsolete."""
        if self._is_unresolved and self._copy is not None:
            self._copy.drop_changes()

    def _note_absence(self, error: HostAway, begin: float, cost_s: float) -> None:
        """Count an exchange that has failed since the host is away."""
        replica = self.replica
        replica.spent_s += cost_s
        # Workers retry at different times, so that they do not all reach a returning host at once.
        replica.pace.failed(cost_s, self._context.environment.rank * _GOLDEN % 1)
        self._away_since = begin if self._away_since is None else self._away_since
        if not self._is_announced and clock.monotonic() - self._away_since > _UNANNOUNCED_S:
            self._is_announced = True
            self._context.events.write("away", reason=str(error))
            warnings.warn(f"{error}. Training continues; exchanges are tried again", stacklevel=4)
        self._context.check_host(replica)

    def _note_exchange(self, outcome: Outcome, cost_s: float, mark: "TrainingMark | None" = None) -> None:
        """Count an exchange that was made, with what was learned until `mark`; report what was left out of it."""
        replica, samples = self.replica, self._context.samples
        self._away_since, self._is_announced = None, False
        replica.progress.exchange(outcome)
        replica.count_exchange(cost_s, outcome.size_bytes, mark)
        if replica.progress.exchanges in _MEASURED:
            self._measure_cost(max(1, self._center.live))
        if replica.is_primary and samples.shards:
            samples.write_position(replica, is_common=False)
        if outcome.refused or self._refusals.in_a_row:
            self._refusals.check(outcome)
        if self._has_gate:
            self._check_gated(outcome)
        if outcome.locked and not self._has_warned:
            self._has_warned = True
            names = f"{outcome.locked[0]!r}" + (f" and {len(outcome.locked) - 1} more" if outcome.locked[1:] else "")
            warnings.warn(
                f"{names} could not be exchanged: a worker that is stopped, or makes no progress, holds the lock. "
                "Training continues, and later exchanges include it once that worker goes on or has ended",
                stacklevel=4,
            )

    def _check_gated(self, outcome: Outcome) -> None:
        """Warn if the gate has clipped or refused several contributions in a row: others may be right, and this worker
        wrong."""
        self._gated_in_a_row = self._gated_in_a_row + 1 if outcome.gated else 0
        if self._gated_in_a_row == _GATED_LIMIT:
            what = "refused" if not outcome.factor else "clipped"
            warnings.warn(
                f"the gate has {what} contributions of this worker in {_GATED_LIMIT} exchanges in a row, now of "
                f"{outcome.gated[0]!r} (smallest share {outcome.factor:.2g}). Look at its data and its learning rate; "
                "if it is right and the others differ, raise k of the gate",
                stacklevel=5,
            )

    def _measure_cost(self, live: int) -> None:
        """Warn once if exchanges at every step take a large share of the time."""
        replica, now = self.replica, clock.monotonic()
        first, last = _MEASURED
        if replica.progress.exchanges == first:
            self._measured_from = now, replica.spent_s
            return
        begin, before_s = self._measured_from
        share = (replica.spent_s - before_s) / max(1e-9, now - begin)
        if replica.pace == Every(1) and share > _MAX_SHARE:
            warnings.warn(
                f"exchanges at every step took {share:.0%} of the time, over {last - first} exchanges (more than "
                f"{_MAX_SHARE:.0%} rarely pays). Exchange less often, with --every 10, or limit their share of the "
                f"time, with --maximum-rate {min(_MAX_SHARE, 0.5 / live):.2g}",
                stacklevel=5,
            )

    def pull(self) -> None:
        if not self._is_finished:
            self._land()
            self._pull_center()
            self._drop_resolved()

    def push(self) -> None:
        if self._is_finished:
            return
        self._land()
        with self._context.requiring_host(self.replica):
            self.replica.timed("push", self._center.push, self._model, self._remember)
        self._drop_resolved()
        self._context.exit_if_signalled()

    @contextmanager
    def center(self) -> Generator[None]:
        if self._is_finished:
            yield
            return
        self._land()
        replica, center, unreleased = self.replica, self._center, 0

        def release(_: int, value: Array) -> None:
            nonlocal unreleased
            unreleased += value.nbytes
            if unreleased > _RESIDENT_BYTES:
                center.release()
                unreleased = 0

        # The replica's copy and the center are never both resident in full beside the model.
        center.release()
        with self._own_values_kept():
            replica.is_center = True
            try:
                with self._context.requiring_host(replica):
                    replica.timed("look", functools.partial(center.pull, peek=True), self._model, release)
                center.release()
                yield
            finally:
                replica.is_center = False

    def publish(self) -> None:
        """Exchange, unless the center has all of this worker's steps."""
        self._land()
        if self.replica.steps_since_exchange:
            self.exchange()

    def _finish(self, timeout_s: float) -> None:
        """Make the last exchange, waiting for a host that is away."""
        try:
            self._land(timeout_s)
        except WaitedTooLong as error:  # the host applies it as a whole or not at all
            warnings.warn(f"{error} This worker leaves without its last steps", stacklevel=2)
            return
        if (self.replica.steps_since_exchange or self._center.has_unsent) and not self.replica.is_center:
            self._exchange(is_last=True)
            deadline = Deadline(timeout_s)
            while self._away_since is not None and not self._context.host.is_over and not deadline.is_over():
                clock.sleep(_RETRY_S)
                self._exchange(is_last=True)
