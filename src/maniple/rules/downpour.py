"""Downpour: push what this worker changed, take the center."""

import numpy as np

from maniple.contracts import Act, Array, Moment
from maniple.rules.kernels import kernels
from maniple.rules.rule import Rule, checked_flag, checked_nonfinite


class Downpour(Rule):
    """Asynchronous SGD with accumulated differences.

        c += s (x - x_old);    x = c;    x_old = c

    where s is 1, or 1 / (staleness + 1) with `compensate=True`. The center ends up with the sum of all
    workers' changes: nothing is lost and nothing averaged away, so it learns fastest at short periods and
    diverges at long ones, where the sum of many stale steps overshoots. Dean et al.: Large scale
    distributed deep networks, 2012; Zhang et al. (arXiv:1511.05950) for the division by staleness.

    With `sync=True` all workers meet at once: `c += sum_i (x_i - c); x_i = c`. Then `nonfinite` says what
    happens when a worker's contribution is not finite: as in BSP.
    """

    every = 1
    memory = True
    op = "sum"

    def __init__(self, *, compensate: bool = False, sync: bool = False, nonfinite: str = "stop") -> None:
        self.compensate = checked_flag("Downpour", "compensate", compensate)
        self.sync = checked_flag("Downpour", "sync", sync)
        self.nonfinite = checked_nonfinite("Downpour", nonfinite, is_sync=sync)

    @property
    def meets(self) -> str:
        """In the circle, if it is synchronous."""
        return "values" if self.sync else "center"

    def offer(self, x: Array, memory: Array | None, out: Array) -> None:
        """What this worker has changed."""
        assert memory is not None
        np.subtract(x, memory, out=out)

    def accept(self, x: Array, total: Array, memory: Array | None, moment: Moment) -> None:
        """Take the center with all changes."""
        del moment
        assert memory is not None
        memory += total
        x[:] = memory

    def exchange(self, x: Array, c: Array, memory: Array | None, moment: Moment) -> bool:
        assert memory is not None
        scale = 1.0 / (moment.staleness + 1) if self.compensate else 1.0
        return kernels().difference(x, c, memory, scale)

    def act(self, moment: Moment) -> Act:
        del moment
        return Act("compensated" if self.compensate else "blend", 1.0, 1.0, is_change=True)

    def shared(self, x: Array, memory: Array | None) -> Array:
        """The center with all changes."""
        return x if memory is None else memory

    def remember(self, c: Array, memory: Array) -> None:
        memory[:] = c

    def rounded(self, x: Array, memory: Array) -> None:
        memory[:] = x  # else the next exchange would push the rounding as if it were a change
