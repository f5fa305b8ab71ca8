"""Synchronous values: all workers exchange parameters after every k steps (LocalSGD; EASGD and Downpour with sync)."""

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np

from maniple.clock import clock
from maniple.collectives.call import PassedOver
from maniple.contracts import Array, ExchangeInfo, ResidentVectors
from maniple.layout import Layout
from maniple.replica.synchronous import Synchronous
from maniple.wire.codecs import get_codec


class SynchronousValues(Synchronous):
    """Exchanges the parameters of all workers after every k steps: each offers values, all accept their reduction."""

    def _open_vectors(self) -> tuple[Layout, ResidentVectors]:
        is_coarse = get_codec(self._wire).keeps_errors
        # An error must not make a variance negative: only parameters are rounded coarsely.
        exact: dict[str, Any] = {"exact": self._layout.sizes_from(self._model.parameter_count)} if is_coarse else {}
        resident = self._collectives.reside(self._layout.sizes, wire=self._wire, **exact)
        self._offers = self._layout.views(resident.flat)
        is_local = self._rule.norm == "local"
        self._local = {i for i in range(len(self._offers)) if is_local and self._model.is_buffer(i)}
        self._shared = [i for i in range(len(self._offers)) if i not in self._local]
        # A codec rounds the changes since the last round far less than the values, so these are computed here.
        keeps_center = "center" in self._rule.worker_vectors
        self._sends_difference = is_coarse and keeps_center and not self._rule.offers_changes
        return self._layout, resident

    def step(self) -> None:
        replica = self.replica
        replica.is_exchanging = False
        replica.count_step()
        if replica.pace.due(replica.steps_since_exchange, clock.monotonic() - replica.start):
            self.exchange()

    def exchange(self) -> None:
        if self._is_finished:
            return
        replica = self.replica
        self._prepare_round()
        begin = clock.monotonic()
        replica.is_exchanging = True
        try:
            self._offer()
            weight = self._contributions.checked_weight(1.0, self._resident.flat)
            self._exchange_moments(max(0.0, weight))
            self._all_reduce(weight)
            if (error := self._contributions.check_round(self._last, replica.steps)) is not None:
                self._end_diverged(error)
            if self._collectives.rank in self._last.nonfinite:
                self._return_to_center()
            self._accept()
        finally:
            replica.is_exchanging = False
        replica.progress.round(len(self._last.ranks), self._last.size_bytes)
        replica.count_exchange(clock.monotonic() - begin, self._last.size_bytes)
        if self._is_first:
            self.publish()
        self._context.exit_if_signalled()

    def _offer(self) -> None:
        """Write what this worker contributes to the round."""
        self._model.begin()
        for i in self._local:  # each worker keeps its own; zeros, since what is there must be finite
            self._offers[i][:] = 0
        for i in self._shared:
            self._rule.offer(self._model.array(i), self._state_of(i), self._offers[i])
            if self._sends_difference:
                self._offers[i] -= self._state_of(i)["center"]

    def _accept(self) -> None:
        """Change the replica by the result of the round."""
        weight = self._last.weight
        # The step is computed from the rounds, so that schedules give the same value in all workers.
        info = ExchangeInfo(step=self.rounds * getattr(self.replica.pace, "n", 1), live=max(1, round(weight)))
        for i in self._shared if weight else ():
            total = self._offers[i]
            if self._rule.op == "sum":
                total *= total.dtype.type(weight)  # the round has computed the mean
            if self._sends_difference:
                total += self._state_of(i)["center"]
            self._rule.accept(self._model.array(i), total, self._state_of(i), info)
            self._model.commit(i)
        self._complete_round()

    def _return_to_center(self) -> None:
        """Start again from the last round: what this worker has trained since is not finite."""
        for i in self._shared:
            self._show(i, self._model.array(i))
            self._model.commit(i)
        self._model.begin()

    def _shown(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state is None else self._own_values_kept(self._show)

    def _show(self, i: int, value: Array) -> None:
        if i not in self._local:
            value[:] = self._rule.shared(value, self._state_of(i))

    def _finish_rounds(self) -> bool:
        if self.replica.is_center:
            return False
        if self.replica.steps_since_exchange:
            self.exchange()
        return True

    def _contribute_nothing(self) -> None:
        super()._contribute_nothing()
        self._exchange_moments(0.0)

    def _follow_round(self) -> bool:
        self._model.begin()
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
            self._model.reduce_moments(self._rule.momentum, average, gather)
