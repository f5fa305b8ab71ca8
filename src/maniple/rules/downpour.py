"""Downpour: push what this worker changed, take the center."""

from maniple.contracts import Act, Array, Moment
from maniple.errors import InvalidArgument
from maniple.rules.kernels import kernels
from maniple.rules.rule import Rule


class Downpour(Rule):
    """Asynchronous SGD with accumulated differences.

        c += s (x - x_old);    x = c;    x_old = c

    where s is 1, or 1 / (staleness + 1) with `compensate=True`. The center ends up with the sum of all
    workers' changes: nothing is lost and nothing averaged away, so it learns fastest at short periods and
    diverges at long ones, where the sum of many stale steps overshoots. Dean et al.: Large scale
    distributed deep networks, 2012; Zhang et al. (arXiv:1511.05950) for the division by staleness.
    """

    every = 1
    memory = True

    def __init__(self, *, compensate: bool = False) -> None:
        if not isinstance(compensate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Downpour has compensate={compensate!r}, which is neither true nor false.")
        self.compensate = compensate

    def exchange(self, x: Array, c: Array, memory: Array | None, moment: Moment) -> bool:
        assert memory is not None
        scale = 1.0 / (moment.staleness + 1) if self.compensate else 1.0
        return kernels().difference(x, c, memory, scale)

    def act(self, moment: Moment) -> Act:
        del moment
        return Act("compensated" if self.compensate else "blend", 1.0, 1.0, is_change=True)

    def remember(self, c: Array, memory: Array) -> None:
        memory[:] = c

    def rounded(self, x: Array, memory: Array) -> None:
        memory[:] = x  # else the next exchange would push the rounding as if it were a change
