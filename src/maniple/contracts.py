"""The seams between the layers: what a model, a rule and a center must offer to each other."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

Array = npt.NDArray[Any]
OnValue = Callable[[int, Array], None]  # sees entry i's value while it is copied


@dataclass(frozen=True, slots=True)
class Entry:
    """One named array of a model, as every worker must have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(slots=True)
class Moment:
    """What a rule may know of the instant of an exchange."""

    step: int = 0  # optimizer steps this worker has made
    live: int = 1  # p, the workers alive now
    staleness: int = 0  # exchanges by others on this parameter since this worker's last one


@dataclass(slots=True)
class Outcome:
    """What one exchange, pull or push did."""

    size_bytes: int = 0
    staleness: float = 0.0  # mean over the parameters
    refused: list[str] = field(default_factory=list[str])  # parameters with non-finite offers
    torn: list[str] = field(default_factory=list[str])  # parameters another worker died in the middle of
    live: int = 0  # p when it ended, where the host has told
    wire_bytes: int = 0  # what went through the socket, headers and all; 0 in shared memory


@dataclass(frozen=True, slots=True)
class Act:
    """What the host does with a value that a worker has sent, and how a rule is told over the wire.

    elastic      d = x - c;  x -= b d;  c += a d
    blend        c = a c + b x;  x = c
    compensated  the same, with b divided by staleness + 1
    replace      c = x, if all of x is finite
    swap         the same, if nobody has written since the version that the worker saw
    """

    name: str
    a: float = 1.0
    b: float = 1.0
    is_change: bool = False  # x is what the worker changed since it last took the center's value


class Model(Protocol):
    """A model seen as named flat arrays. Adapters make one of a framework's model.

    `begin()` comes before a pass over the entries; `array(i)` then holds entry i in the center's dtype,
    flat and contiguous (the parameter's own memory where possible); `commit(i)` writes it back.
    """

    @property
    def entries(self) -> Sequence[Entry]: ...
    def begin(self) -> None: ...
    def array(self, i: int) -> Array: ...
    def commit(self, i: int) -> None: ...


class Exchanger(Protocol):
    """The part of a rule that a center calls, once per parameter, under that parameter's lock."""

    def act(self, moment: Moment) -> Act | None:
        """The rule as an act of the host; None if only `exchange` knows it."""
        ...

    def rounded(self, x: Array, memory: Array) -> None:
        """Called after an exchange with what a replica in half precision holds of it."""
        ...

    def exchange(self, x: Array, c: Array, memory: Array | None, moment: Moment) -> bool:
        """Change replica `x` and center `c` in place; False if some offered values were not finite."""
        ...


class Center(Protocol):
    """The shared parameters. One suite, `tests/contract/test_center.py`, holds for every implementation."""

    @property
    def live(self) -> int: ...
    def exchange(self, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment) -> Outcome: ...
    def pull(self, model: Model, on_value: OnValue | None = None, *, is_look: bool = False) -> Outcome: ...
    def push(self, model: Model, on_value: OnValue | None = None) -> Outcome: ...
    def release(self) -> None:
        """Let go of what can come back when it is needed."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Round:
    """What one meeting of the circle did."""

    ranks: tuple[int, ...]  # whose values are in it
    weight: float = 1.0  # the sum of their weights; 0: all have come to their end
    waited_s: float = 0.0  # for the others
    nonfinite: dict[int, int] = field(default_factory=dict[int, int])  # whose values were left out, and the entry


class Resident(Protocol):
    """Flat vectors that live where the circle reduces them, one per dtype, so that nothing is copied."""

    @property
    def flat(self) -> dict[str, Any]:
        """NumPy arrays; torch tensors if they were asked for on a device."""
        ...

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the vectors by what all workers' vectors make together: the same bits for everybody."""
        ...


Part = tuple[str, int, int]  # a dtype, and where the part begins and ends in its vector


class Parted(Resident, Protocol):
    """Flat vectors whose parts go out one after the other, in an order that is the same for all workers."""

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """The next part is complete: let it go out. `all_reduce` sends those that are left, and waits for all."""
        ...


class Circle(Protocol):
    """The workers as equals. One suite, `tests/contract/test_circle.py`, holds for every implementation.

    Arrays are flat, contiguous and numeric. `op` is sum, mean, min, max or prod; a mean counts each worker's values
    `weight` times. `wire` is float32 (as they are), float16 or bfloat16: how floating-point values travel; they are
    added up in float32, and all workers get the same bits. All workers make the same calls in the same order: another
    call, dtype or size on the other side is a CallMismatch that names both.
    """

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that belong to it now, in the order of their ranks."""
        ...

    @property
    def name(self) -> str:
        """shared, torch or mpi."""
        ...

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round: ...
    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """As all_reduce, but only worker `root` gets `out`; None elsewhere."""
        ...

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`, in place."""
        ...

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays in the order of `ranks`, for worker `root`; lengths may differ."""
        ...

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]: ...
    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """The own one of worker `root`'s `parts`, one per worker in the order of `ranks`; lengths may differ."""
        ...

    def barrier(self) -> None: ...
    def whole(self) -> AbstractContextManager[None]:
        """The calls in this block are one: nobody enters in between."""
        ...

    def reside(self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu") -> Resident: ...
    def report_long_waits(self, on_report: Callable[[Sequence[int], float, bool], None]) -> None:
        """Call `on_report` with whom this worker waits for, for how long, and whether it is over: if it is long."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Background(Protocol):
    """A circle that carries values while its worker computes."""

    def reside_in_parts(
        self, sizes: dict[str, int], parts: Sequence[Part], *, wire: str = "float32", device: str = "cpu"
    ) -> Parted:
        """Vectors as of `reside`; the parts, all of them together, are the vectors."""
        ...
