"""Sharing through a center: each worker exchanges with it at its own pace and waits for no other worker."""

import functools
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.clock import Deadline, clock
from maniple.contracts import Array, Center, ExchangeInfo
from maniple.errors import HostAway
from maniple.pace import Every
from maniple.replica.context import TrainingContext
from maniple.replica.sharing import Sharing

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

_RESIDENT_BYTES = 32 << 20  # of the center that `center()` keeps mapped in: a large model must fit in memory only once
_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly spread, for any number of workers
_RETRY_S = 0.1  # between two tries of the last exchange with a host that is away
_MEASURED = (10, 60)  # the first and the last exchange between which the cost is measured: the first ones load kernels
_MAX_SHARE = 0.2  # of the time; beyond it, exchanges at every step cost more than they gain
_UNANNOUNCED_S = 1.0  # absence of the host that is worth no warning: a lost packet, or a restart of the server


class WithCenter(Sharing):
    """Exchanges one replica with a center.

    An exchange that fails because the host is away is tried again when the pace says so; training continues, and ends
    with HostAway only after the host deadline.
    """

    _center: Center
    _away_since: float | None = None  # while exchanges fail
    _is_announced = False
    _has_warned = False  # about parameters whose lock cannot be taken
    _measured_from = (0.0, 0.0)  # the time, and the seconds spent in exchanges until then

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        self._attach_shared()

    def begin(self) -> None:
        """Take the center's values; the creator too, since rules with state start from them."""
        self._pull_center()

    def step(self) -> None:
        replica = self.replica
        replica.count_step()
        if replica.pace.due(replica.steps_since_exchange, clock.monotonic() - replica.start):
            self._exchange()

    def exchange(self) -> None:
        self.replica.refuse_inside_center("exchange() was called")
        self._exchange()
        self._context.exit_if_signalled()

    def _exchange(self, *, is_last: bool = False) -> None:
        if self._is_finished or self._context.host.is_over:
            return
        replica, samples, begin = self.replica, self._context.samples, clock.monotonic()
        info = ExchangeInfo(step=replica.steps, live=max(1, self._center.live), is_last=is_last)
        state = None if self._state is None else self._state.chunks
        try:
            outcome, cost_s = replica.timed("exchange", self._center.exchange, self._model, self._rule, state, info)
        except HostAway as error:
            cost_s = clock.monotonic() - begin
            replica.spent_s += cost_s
            # Workers retry at different times, so that they do not all reach a returning host at once.
            replica.pace.failed(cost_s, self._context.environment.rank * _GOLDEN % 1)
            self._away_since = begin if self._away_since is None else self._away_since
            if not self._is_announced and clock.monotonic() - self._away_since > _UNANNOUNCED_S:
                self._is_announced = True
                self._context.events.write("away", reason=str(error))
                warnings.warn(f"{error}. Training continues; exchanges are tried again", stacklevel=4)
            self._context.check_host(replica)
            return
        self._away_since, self._is_announced = None, False
        replica.progress.exchange(outcome)
        replica.count_exchange(cost_s, outcome.size_bytes)
        if replica.progress.exchanges in _MEASURED:
            self._measure_cost(info.live)
        if replica.is_primary and samples.shards:
            samples.write_position(replica, is_common=False)
        if outcome.refused or self._refusals.in_a_row:
            self._refusals.check(outcome)
        if outcome.locked and not self._has_warned:
            self._has_warned = True
            names = f"{outcome.locked[0]!r}" + (f" and {len(outcome.locked) - 1} more" if outcome.locked[1:] else "")
            warnings.warn(
                f"{names} could not be exchanged: a worker that is stopped, or makes no progress, holds the lock. "
                "Training continues, and later exchanges include it once that worker goes on or has ended",
                stacklevel=4,
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
            self._pull_center()

    def push(self) -> None:
        if self._is_finished:
            return
        with self._context.requiring_host(self.replica):
            self.replica.timed("push", self._center.push, self._model, self._remember)
        self._context.exit_if_signalled()

    @contextmanager
    def center(self) -> Generator[None]:
        if self._is_finished:
            yield
            return
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
        if self.replica.steps_since_exchange:
            self.exchange()

    def _finish(self, timeout_s: float) -> None:
        """Make the last exchange, waiting for a host that is away."""
        if (self.replica.steps_since_exchange or self._center.has_unsent) and not self.replica.is_center:
            self._exchange(is_last=True)
            deadline = Deadline(timeout_s)
            while self._away_since is not None and not self._context.host.is_over and not deadline.is_over():
                clock.sleep(_RETRY_S)
                self._exchange(is_last=True)
