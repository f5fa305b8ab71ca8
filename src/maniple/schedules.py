"""Schedules of the learning rate, as functions of the epoch or the step, whichever you count in. Pure.

A schedule is any function lr(t); these make them, and each takes one apart from the others:

    lr = scaled(0.1, workers=4)                        0.4: with 4 workers a batch is 4 times as large
    schedule = warm_up(step(lr, at=(30, 60)), over=5, start=0.1)
    set_lr(optimizer, schedule(epoch))
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from maniple.errors import InvalidArgument

__all__ = ["Schedule", "cosine", "poly", "scaled", "set_lr", "step", "warm_up"]

Schedule = Callable[[float], float]

_SCALES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda _: 1.0}


def scaled(lr: float, *, workers: int, by: str = "linear") -> float:
    """The rate for `workers` times as large a batch: `lr * workers`, `lr * sqrt(workers)`, or `lr` for "none".

    Linear scaling (Goyal et al. 2017) is for rules that average, such as BSP, LocalSGD and EASGD, if each worker has
    the batch of one process. Downpour adds the workers' changes, and keeps the rate of one (docs/choose.md).
    """
    if by not in _SCALES:
        raise InvalidArgument(
            f"by={by!r} scales no learning rate (there are {', '.join(_SCALES)}). Choose one of them."
        )
    return lr * _SCALES[by](workers)


def step(lr: float, *, at: Sequence[float], factor: float = 0.1) -> Schedule:
    """`lr`, multiplied by `factor` at each time in `at`."""
    return lambda t: lr * factor ** sum(t >= time for time in at)


def poly(lr: float, *, total: float, power: float = 1.0, end: float = 0.0) -> Schedule:
    """From `lr` down to `end` at `total`, as `(1 - t / total) ** power`."""
    return lambda t: end + (lr - end) * (1 - _share(t, total)) ** power


def cosine(lr: float, *, total: float, end: float = 0.0) -> Schedule:
    """From `lr` down to `end` at `total`, as half a wave of the cosine."""
    return lambda t: end + (lr - end) * (1 + math.cos(math.pi * _share(t, total))) / 2


def warm_up(schedule: Schedule, *, over: float, start: float = 0.0) -> Schedule:
    """Another schedule, reached gradually: in a straight line from `start` (the rate of one worker, say) to `over`."""
    return lambda t: start + (schedule(t) - start) * _share(t, over)


def set_lr(optimizer: Any, lr: float) -> None:
    """Give a torch optimizer this rate, in all its groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _share(t: float, total: float) -> float:
    return min(1.0, max(0.0, t / total)) if total > 0 else 1.0
