"""Interfaces between the layers: what models, rules, centers and collectives offer to each other."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]
OnValue = Callable[[int, Array], None]  # receives the value of chunk k while it is copied
State = dict[str, Array]  # what a rule keeps of one chunk or entry, by name: vectors of its size, scalars of size 1


class StateNames(NamedTuple):
    """What a rule keeps beside the parameters, at each worker or at the center."""

    vectors: tuple[str, ...] = ()  # of the model's size
    scalars: tuple[str, ...] = ()  # one number per chunk, since each chunk is exchanged by itself


NO_STATE = StateNames()


@dataclass(frozen=True, slots=True)
class Entry:
    """One named array of a model. Every worker must have the same ones."""

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
class ExchangeInfo:
    """What a rule may depend on in one exchange."""

    step: int = 0  # optimizer steps this worker has made
    live: int = 1  # p, the workers alive now
    staleness: int = 0  # writes of this chunk by others since this worker's last exchange
    is_last: bool = False  # this worker's last exchange: chunks that others hold are waited for longer


@dataclass(slots=True)
class Outcome:
    """The result of one exchange, pull or push."""

    size_bytes: int = 0
    staleness: float = 0.0  # mean over the chunks
    refused: list[str] = field(default_factory=list[str])  # parameters with non-finite values, which were refused
    torn: list[str] = field(default_factory=list[str])  # parameters in chunks that a worker was writing when it died
    locked: list[str] = field(default_factory=list[str])  # left out, since the holder of their lock makes no progress
    gated: list[str] = field(default_factory=list[str])  # parameters in chunks that the gate has clipped or refused
    factor: float = 1.0  # the smallest by which it has clipped a chunk; 0: it has refused one
    weight: float = 1.0  # the smallest by which it has weighted a stale chunk
    live: int = 0  # p at the end, where the host reports it
    wire_bytes: int = 0  # bytes through the socket, headers included; 0 in shared memory

    def judge(self, names: list[str], factor: float, weight: float) -> None:
        """Note what the gate has made of one chunk, which has these parameters."""
        if factor < 1:
            self.gated += names
        self.factor, self.weight = min(self.factor, factor), min(self.weight, weight)

    def with_unique_names(self) -> "Outcome":
        """Name each parameter once, though it may lie in several chunks."""
        for names in (self.refused, self.torn, self.locked, self.gated):
            names[:] = dict.fromkeys(names)
        return self


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that the host applies to a worker's value x and the center's value c.

    elastic      d = x - c;  x -= b d;  c += a d
    blend        c = a c + b x;  x = c
    compensated  as blend, with b divided by staleness + 1
    nesterov     the outer step of asynchronous DiLoCo, with learning rate a, momentum b and a buffer of n arrivals
    replace      c = x, if all of x is finite
    swap         as replace, if c still has the version that the worker saw
    """

    name: str
    a: float = 1.0
    b: float = 1.0
    is_change: bool = False  # x is what the worker has changed since it last received c
    n: int = 0
    share: float = 1.0  # of the change, which counts; for operations that have no weight for it


class FlatModel(Protocol):
    """A model as named flat arrays. Adapters provide it for the models of a framework.

    `begin()` is called before a pass over the entries. `array(i)` then returns entry i in the center's dtype, flat and
    contiguous (the parameter's own memory where possible), and `commit(i)` writes it back. `flat_vectors()` returns
    flat vectors as in the layout and the number of entries, the first ones, that are views of them: a pass over chunks
    of such entries needs none of the other calls.
    """

    @property
    def entries(self) -> Sequence[Entry]: ...
    def begin(self) -> None: ...
    def array(self, i: int) -> Array: ...
    def commit(self, i: int) -> None: ...
    def flat_vectors(self) -> tuple[dict[str, Array], int] | None: ...


class Exchanger(Protocol):
    """The part of a rule that a center calls, under the locks, for each chunk or for several that follow each other."""

    def operation(self, moment: ExchangeInfo) -> Operation | None:
        """The operation of the host that is equivalent to `exchange`; None if there is none."""
        ...

    def rounded(self, x: Array, state: State) -> None:
        """Called after an exchange with the replica's value rounded to half precision."""
        ...

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        """Change replica `x`, center `c` and `state` in place; return the positions of refused values, or None."""
        ...


class Center(Protocol):
    """The shared parameters, in chunks (`Layout.chunks`). `tests/contract/test_center.py` tests every implementation.

    `state` has what the rule keeps of each chunk at this worker (None if nothing), and `on_value` receives the value of
    each. `exchange` gives the rule both this and what it keeps at the center (`Layout.state`); `pull` and `push` copy
    the latter to and from `state_copy`, for workers that have it too.
    """

    @property
    def live(self) -> int: ...
    def exchange(
        self, model: FlatModel, rule: Exchanger, state: Sequence[State] | None, moment: ExchangeInfo
    ) -> Outcome: ...
    def pull(
        self,
        model: FlatModel,
        on_value: OnValue | None = None,
        *,
        peek: bool = False,
        state_copy: Sequence[State] | None = None,
    ) -> Outcome: ...
    def push(
        self, model: FlatModel, on_value: OnValue | None = None, *, state_copy: Sequence[State] | None = None
    ) -> Outcome: ...
    @property
    def has_unsent(self) -> bool:
        """Whether exchanges have left out changes that only a last one (`ExchangeInfo.is_last`) sends completely."""
        ...

    def release(self) -> None:
        """Free memory that can be restored when it is needed."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Round:
    """What one all-reduce did."""

    ranks: tuple[int, ...]  # the workers whose values are in it
    weight: float = 1.0  # the sum of their weights; 0: all have finished training
    waited_s: float = 0.0  # for the others
    nonfinite: dict[int, int] = field(default_factory=dict[int, int])  # whose values were left out, and the entry
    size_bytes: int = 0  # of resident vectors: what this worker has sent; in shared memory, their size


class ResidentVectors(Protocol):
    """Flat vectors that live where they are reduced, one per dtype, so that nothing is copied."""

    @property
    def flat(self) -> dict[str, Any]:
        """NumPy arrays; torch tensors if they were requested on a device."""
        ...

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the vectors by the reduction of all workers' vectors: the same bits on all workers."""
        ...


NO_EXACT: Mapping[str, int] = MappingProxyType({})
Bucket = tuple[str, int, int]  # dtype, and start and end in the vector of that dtype


class BucketedVectors(ResidentVectors, Protocol):
    """Flat vectors whose parts are sent one after the other, in an order that is the same for all workers."""

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """Send the next part, which is complete. `all_reduce` sends those that are left, and waits for all."""
        ...


class ElasticMembership(Protocol):
    """Membership of a group whose workers may join and leave at any time."""

    @property
    def is_current(self) -> bool:
        """Whether the others have not gone on without this worker."""
        ...

    def join(self, write_state: Callable[[Path, int], None] | None = None) -> bool:
        """Become a member. True if the others were there already: then begin with `await_state()`.

        `write_state(path, barrier)` writes the state that newcomers of a barrier begin with.
        """
        ...

    def leave(self) -> None:
        """Take no part from the next call on."""
        ...

    def provide_state(self) -> None:
        """Write the state for newcomers, if there are any and it is this worker's turn. Call it before each round."""
        ...

    def await_state(self) -> Path | None:
        """The file with the others' state; None if no member is left to write it."""
        ...

    @property
    def dependents(self) -> "list[ElasticMembership]":
        """Groups that admit those for whom this worker waits here: they arrive here only once they are admitted."""
        ...

    def admit_awaited(self) -> None: ...
    def has_arrived(self, rank: int) -> bool: ...
    def awaits(self, rank: int) -> bool:
        """Whether this worker waits here for `rank`."""
        ...

    def blocks(self, rank: int) -> bool:
        """Whether `rank` waits here for this worker."""
        ...


class Collectives(Protocol):
    """A group of workers. One suite, `tests/contract/test_collectives.py`, holds for every implementation.

    Arrays are flat, contiguous and numeric. `op` is sum, mean, min, max or prod; a mean counts each worker's values
    `weight` times. `wire` is float32 (no compression), float16 or bfloat16: how floating-point values travel; they are
    added up in float32, and all workers get the same bits. Resident vectors may also travel by int8, int4 or topk,
    whose errors are added to the next round. All workers make the same calls in the same order: another call, dtype or
    size on the other side is a CallMismatch that names both.
    """

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]:
        """The current members, in order."""
        ...

    @property
    def name(self) -> str:
        """shared, torch, mpi or alone."""
        ...

    @property
    def elastic(self) -> ElasticMembership | None:
        """How workers join and leave; None where the members are fixed."""
        ...

    @property
    def background(self) -> "BackgroundCollectives | None":
        """How values are sent while the worker computes; None where they are not."""
        ...

    def set_background(self, in_background: bool) -> None:
        """Say whether a thread beside the training thread makes the calls: it takes no processor time in waits."""
        ...

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round: ...
    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """As all_reduce, but only worker `root` gets the result; `out` is None elsewhere."""
        ...

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`, in place."""
        ...

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays in the order of `ranks`, at worker `root`; lengths may differ."""
        ...

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]: ...
    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """This worker's part of worker `root`'s `parts`, one per worker in the order of `ranks`; lengths may differ."""
        ...

    def exchange_pairs(self, x: Array, partner: int, *, wire: str = "float32") -> Array | None:
        """The array of worker `partner`, who gets `x`; lengths may differ. All workers call it, also those without a
        partner, who give their own rank and get None; so does one whose partner is lost in the call.
        """
        ...

    def barrier(self) -> None: ...
    def one_call(self) -> AbstractContextManager[None]:
        """Admit no newcomers between the calls in this block."""
        ...

    def reserve(self, size: int) -> None:
        """Reserve what calls with arrays of up to `size` bytes need, while there is room; may need nothing."""
        ...

    def reside(
        self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu", exact: Mapping[str, int] = NO_EXACT
    ) -> ResidentVectors:
        """Vectors of these sizes, by dtype. By codecs that keep errors, the last `exact` values of each travel as they
        are: flags, and buffers such as variances, which an error must not make negative.
        """
        ...

    def report_long_waits(self, on_report: Callable[[Sequence[int], float, bool], None]) -> None:
        """Call `on_report` during and after long waits: the ranks waited for, seconds so far, whether it is over."""
        ...

    def close(self) -> None: ...


class BackgroundCollectives(Protocol):
    """Collectives that send values while the worker computes."""

    def reside_in_parts(
        self,
        sizes: dict[str, int],
        parts: Sequence[Bucket],
        *,
        wire: str = "float32",
        device: str = "cpu",
        exact: Mapping[str, int] = NO_EXACT,
    ) -> BucketedVectors:
        """Vectors as `reside` gives them; `parts` cover them completely."""
        ...
