"""Synchronous rounds at the beginning of asynchronous training: how many were made is kept at the center.

WarmUp       looks at the center, and hands over to one of the two that follow
WarmRounds   the first `rule.warm` rounds, of all workers by collectives
WithCenter   everything after that
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.collectives.call import PassedOver
from maniple.contracts import Center, Collectives
from maniple.errors import InvalidArgument
from maniple.replica.context import TrainingContext
from maniple.replica.sharing import OpenCollectives, Sharing
from maniple.replica.synchronous_values import SynchronousValues
from maniple.replica.with_center import WithCenter

if TYPE_CHECKING:
    from maniple.replica.replica import Replica


class WarmUp(Sharing):
    """Decides whether synchronous rounds are left to be made: a worker may come, or come back, after them."""

    copies_center_state = True

    def __init__(self, center: Center, open_collectives: OpenCollectives, *, wire: str, has_gate: bool = False) -> None:
        super().__init__(center)
        self._open_collectives, self._wire, self._has_gate = open_collectives, wire, has_gate

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        self._attach_shared()

    def begin(self) -> None:
        """Hand over to the way of sharing that comes next."""
        self._pull_center()
        assert self._state is not None and self._center is not None
        if self._state.chunks[0]["rounds"][0] >= self._rule.warm:
            self.hand_over(WithCenter(self._center, has_gate=self._has_gate))
            return
        try:
            collectives = self._open_collectives()
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{self._rule!r} begins with {self._rule.warm} synchronous rounds, which are not over, and this worker "
                f"cannot take part in them: {error} Or start it again after these rounds."
            ) from error
        self.hand_over(WarmRounds(self._center, collectives, wire=self._wire, has_gate=self._has_gate))


class WarmRounds(SynchronousValues):
    """The synchronous rounds. After the last one, all workers go on with the center."""

    def __init__(self, center: Center, collectives: Collectives, *, wire: str, has_gate: bool) -> None:
        super().__init__(center, collectives, wire=wire)
        self._kept, self._has_gate, self._may_go_on = center, has_gate, True

    def begin(self) -> None:
        super().begin()
        self._go_on()  # a worker that has joined may have come with the last round

    def step(self) -> None:
        super().step()
        self._go_on()

    def exchange(self) -> None:
        super().exchange()
        self._go_on()

    @property
    def _has_background(self) -> bool:
        return False

    def _finish_rounds(self) -> bool:
        self._may_go_on = False  # training ends here
        return super()._finish_rounds()

    @property
    def _are_rounds_over(self) -> bool:
        assert self._state is not None
        return bool(self._state.chunks[0]["rounds"][0] >= self._rule.warm)

    def _shadow(self) -> bool:
        """After the last round the others wait for this worker too, and go on with the center without it."""
        is_newest = super()._shadow()
        if not self._are_rounds_over:
            return is_newest
        self._collectives.barrier()
        return False

    @property
    def _publishes_last(self) -> bool:
        """After the last round the center is up to date, and others may have changed it since."""
        return not self._are_rounds_over and super()._publishes_last

    def _complete_round(self) -> None:
        super()._complete_round()
        assert self._state is not None
        for (
            state
        ) in self._state.chunks:  # with those before the run was resumed; newcomers get it with the others' state
            state["rounds"][0] += 1

    def _go_on(self) -> None:
        """Hand over to exchanges with the center once all rounds are made."""
        if not self._are_rounds_over or not self._may_go_on:
            return
        self._may_go_on = False
        with suppress(PassedOver):
            self._collectives.barrier()  # until the first worker has brought the center up to date
        self._collectives.close()
        self.hand_over(WithCenter(self._kept, has_gate=self._has_gate))
