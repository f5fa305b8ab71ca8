"""Calling: what one process does of a call: takes its rows, cuts them into slices, and puts the outputs together."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from maniple.contracts import Circle
from maniple.errors import InvalidArgument
from maniple.pool.objects import Handle
from maniple.pool.outputs import Ops, Total, named_pair
from maniple.pool.rows import Rows, of_worker, part, selected, taken
from maniple.pool.training import Training

Key = int | str  # of an argument: its position or its name


@dataclass(frozen=True)
class Work:
    """A function, and how its outputs are put together."""

    function: Callable[..., Any]
    reduce: Ops
    update: dict[str, str] = field(default_factory=dict[str, str])  # ops of the handles that it gives new values
    training: Handle | None = None  # whose steps these are


@dataclass
class Call:
    """One call of it.

    Attributes:
        rows: those of the whole set that this call is about; None: nothing is scattered.
        scattered: the arguments that are whole sets; of each the process takes its part of the rows.
        resident: the arguments that are this process's own part of a set already; `batch_s` selects from them.
        passing: the scattered arguments that hold the selected rows alone, in memory that the next call needs.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    rows: Rows | None = None
    scattered: list[Key] = field(default_factory=list[Key])
    resident: list[Key] = field(default_factory=list[Key])
    passing: list[Key] = field(default_factory=list[Key])
    batch_s: Any = None
    slices: int = 1

    def told(self) -> tuple[Any, ...]:
        """What makes it again: a plain tuple travels faster."""
        return tuple(vars(self).values())

    def argument(self, key: Key) -> Any:
        """One argument."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def put(self, key: Key, value: Any) -> None:
        """Set one argument."""
        if isinstance(key, int):
            self.args[key] = value
        else:
            self.kwargs[key] = value


class Times:
    """Where the time of a process goes, in seconds."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.compute_s = self.copy_s = self.wait_s = self.idle_s = 0.0
        self.calls = 0

    def settle(self) -> None:
        """What is left of the time was idle."""
        self.idle_s = time.perf_counter() - self._begun - self.compute_s - self.copy_s - self.wait_s


@dataclass
class Done:
    """What a process has to say of a call."""

    output: Any
    weight: float
    updates: dict[str, Any]


def carry_out(
    work: Work,
    call: Call,
    *,
    rank: int,
    world: int,
    times: Times,
    tick: Callable[[int, int], None] = lambda _k, _n: None,
    training: Training | None = None,
    circle: Callable[[], Circle | None] = lambda: None,
) -> Done:
    """Call the function on this process's rows, slice by slice; `tick(k, n)`: the k-th of n slices is done.

    With `training`, the mean gradient is made of them, also by processes without rows. The step and the updates are
    left to who calls this.
    """
    begin = time.perf_counter()
    sets, count = _own(call, rank, world)
    times.copy_s += time.perf_counter() - begin
    total, updates = Total(work.reduce), Total(work.update)
    pieces = _pieces(call, count, rank)
    if training is not None:
        training.begin(count)
    for number, piece in enumerate(pieces):
        args, kwargs = _with(call, {key: taken(value, piece) for key, value in sets.items()})
        begin = time.perf_counter()
        output = work.function(*args, **kwargs) if training is None else training.learn(len(piece), *args, **kwargs)
        times.compute_s += time.perf_counter() - begin
        weight = float(max(1, len(piece)) if sets else 1)
        if work.update:
            output, new = named_pair(output, work.update, f"a function with update={work.update!r}")
            updates.add(new, weight, is_last=number + 1 == len(pieces))
        total.add(output, weight, is_last=number + 1 == len(pieces))
        tick(number + 1, len(pieces))
    if training is not None:
        begin = time.perf_counter()
        training.average(circle())
        times.compute_s += time.perf_counter() - begin
    times.calls += 1
    return Done(total.value(), total.weight, updates.value() or {})


def _own(call: Call, rank: int, world: int) -> tuple[dict[Key, Any], int]:
    """This process's rows of each set, and how many there are."""
    sets: dict[Key, Any] = {}
    if call.rows is not None:
        share = part(call.rows, world, rank)
        for key in call.scattered:
            if key in call.passing:
                value = taken(call.argument(key), part(range(len(call.rows)), world, rank))
                sets[key] = value.clone() if hasattr(value, "clone") else value.copy()
            else:
                sets[key] = taken(call.argument(key), share)
    for key in call.resident:
        value = call.argument(key)
        sets[key] = taken(value, selected(of_worker(call.batch_s, rank, world), len(value)))
    lengths = {key: len(value) for key, value in sets.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise InvalidArgument(
            f"worker {rank} has different numbers of rows of its arguments ({told}). Scatter sets of the same length, "
            "and select the same rows of them."
        )
    return sets, next(iter(lengths.values()), 0)


def _pieces(call: Call, count: int, rank: int) -> list[Rows]:
    if not call.scattered and not call.resident:
        return [range(0)]
    if not count:  # of no rows at all, one call tells what the function makes of nothing
        is_nothing = call.rows is not None and not len(call.rows) and rank == 0
        return [range(0)] if is_nothing else []
    slices = min(call.slices, count)
    return [part(range(count), slices, k) for k in range(slices)]


def _with(call: Call, values: dict[Key, Any]) -> tuple[list[Any], dict[str, Any]]:
    one = Call(list(call.args), dict(call.kwargs))
    for key, value in values.items():
        one.put(key, value)
    return one.args, one.kwargs
