"""Downpour: push what this worker changed, take the center."""

from maniple.contracts import Array, ExchangeInfo, Operation, State
from maniple.rules import kernels
from maniple.rules.rule import CenterMemory, checked_flag, checked_nonfinite


class Downpour(CenterMemory):
    """Asynchronous SGD with accumulated differences.

        c += s (x - x_old);    x = c;    x_old = c

    where s is 1, or 1 / (staleness + 1) with `compensate=True`. The center ends up with the sum of all
    workers' changes: nothing is lost and nothing averaged away, so the learning rate of one process stays right at
    short periods. It diverges at long ones, where the sum of many stale steps overshoots. Dean et al.: Large scale
    distributed deep networks, 2012; Zhang et al. (arXiv:1511.05950) for the division by staleness.

    With `sync=True` all workers meet at once: `c += sum_i (x_i - c); x_i = c`. Then `nonfinite` says what
    happens when a worker's contribution is not finite: as in BSP. With `overlap`, exchanges run in the background while
    training continues: `x = c + (x - s)`, where `s` was sent.
    """

    every = 1
    worker_vectors = ("center",)
    op = "sum"

    def __init__(
        self, *, compensate: bool = False, sync: bool = False, nonfinite: str = "stop", overlap: bool = False
    ) -> None:
        self.compensate = checked_flag("Downpour", "compensate", compensate)
        self.sync = checked_flag("Downpour", "sync", sync)
        if self.sync:
            self.is_synchronous = True
        self.overlap = checked_flag("Downpour", "overlap", overlap)
        self.nonfinite = checked_nonfinite("Downpour", nonfinite, is_sync=sync)

    def accept(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Take the center with all changes."""
        del moment
        state["center"] += total
        x[:] = state["center"]

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        scale = 1.0 / (moment.staleness + 1) if self.compensate else 1.0
        return (kernels.active or kernels.activate()).difference(x, c, state["center"], scale)

    def operation(self, moment: ExchangeInfo) -> Operation:
        del moment
        return Operation("compensated" if self.compensate else "blend", 1.0, 1.0, is_change=True)

    def rounded(self, x: Array, state: State) -> None:
        state["center"][:] = x  # else the next exchange would push the rounding as if it were a change
