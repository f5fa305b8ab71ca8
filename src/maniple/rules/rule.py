"""Rules: what an exchange between a replica and the center computes. No I/O."""

import copy
import functools
import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from maniple.contracts import Array, ExchangeInfo, Operation, State, StateNames
from maniple.errors import InvalidArgument
from maniple.rules.kernels import numpy_kernels as blocks

NONFINITE = ("stop", "skip")


class Rule:
    """The base of rules. A rule of your own needs one method, that of an exchange with the center:

        class Halfway(maniple.Rule):
            def mix(self, x, c, state):
                middle = (x + c) / 2
                return middle, middle          # the new replica, the new center

    `mix` sees one block of the flat vector at a time, as NumPy arrays that it must not change.

    A synchronous rule, by which all workers exchange at the same step, needs one too. It is called with one parameter
    at a time and changes `x` in place:

        class HalfMean(maniple.Rule):
            is_synchronous = True

            def accept(self, x, total, state, moment):
                x += (total - x) / 2           # total: the mean of what all workers offer, their replicas

    `offer` says what a worker contributes, if not its replica; `op = "sum"` adds the contributions; `shared` says what
    the center shows, if not the first worker's replica. Derived from `LocalSGD`, `state["center"]` is what the center
    shows, the same in all workers.

    A rule may keep state by name, of zeros at first: vectors of the model's size, and scalars, each at every worker or
    at the center. `state["momentum"]` is then the same block of that vector, or an array with the one number, and
    `mix` may change it:

        class Heavy(maniple.Rule):
            center_vectors = ("momentum",)

            def mix(self, x, c, state):
                state["momentum"] *= 0.9
                state["momentum"] += 0.5 * (x - c)
                return c + state["momentum"], c + state["momentum"]

    There is one number of each scalar per chunk of parameters, since chunks are exchanged one by one; with scalars,
    `mix` sees whole chunks. A synchronous rule has vectors only; each worker has a copy of those at the center, which
    stay equal if they are computed from `total`. State at the center is saved in snapshots, state at the worker with
    its optimizer state.
    """

    every: int = 10  # the default pace, in steps
    is_synchronous: bool = False  # all workers exchange at the same step, by collectives; else each with the center
    averages_gradients: bool = False  # a synchronous rule averages gradients before each step, else values after some
    offers_changes: bool = False  # what `offer` writes is a change, which a codec may round coarsely, and not a value
    has_peers: bool = False  # each worker exchanges with random peers instead of the center
    mailbox_vectors: tuple[str, ...] = ()  # names of what a worker publishes for its peers, of the model's size
    worker_vectors: tuple[str, ...] = ()  # names of what each worker keeps
    worker_scalars: tuple[str, ...] = ()
    center_vectors: tuple[
        str, ...
    ] = ()  # names of what the center keeps; a copy is in each worker of a synchronous rule
    center_scalars: tuple[str, ...] = ()
    saves_worker_state: bool = True  # False if `remember` restores it from the center
    op: str = "mean"  # the reduction of the workers' contributions: mean or sum
    quorum: int = 0  # how many workers are waited for in a round; 0: all
    norm: str = "averaged"  # the running statistics of normalisation layers: averaged, local or synchronised
    moments: str = "keep"  # what becomes of the optimizer's moments when values are averaged
    check_every: int = 0  # exchanges between two comparisons of all replicas; 0: none
    nonfinite: str = "stop"  # a contribution that is not finite: "stop" the run, or "skip" it
    overlap: bool = False  # exchange in the background while training continues; gradients during the backward pass
    fragments: int = 1  # parts of the model that are exchanged one after the other, for a synchronous rule
    delay: int | None = None  # the steps after which the result of a round in the background is applied
    own_share: float | None = None  # the weight of the worker's own value then; None: all of its steps are kept
    warm: int = 0  # synchronous rounds before a rule with a center is applied
    dynamic: bool = False  # slower workers make fewer steps between two exchanges with the center
    acts_alone: bool = False  # its synchronous form also changes the training of a single worker
    shares_buffers: bool = True  # running statistics are exchanged as parameters are
    nesterov: float | None = None  # the Nesterov momentum that the optimizer must have

    @property
    def meets(self) -> str:
        """What an exchange is with: gradients or values of all workers, the center, or peers."""
        if self.is_synchronous:
            return "gradients" if self.averages_gradients else "values"
        return "peers" if self.has_peers else "center"

    @property
    def worker_state(self) -> StateNames:
        """What each worker keeps."""
        return StateNames(self.worker_vectors, self.worker_scalars)

    @property
    def center_state(self) -> StateNames:
        """What the center keeps."""
        return StateNames(self.center_vectors, self.center_scalars)

    def mix(self, x: Array, c: Array, state: State) -> tuple[Array, Array]:
        """The new replica and the new center."""
        raise NotImplementedError(f"{type(self).__name__} must define mix(self, x, c, state)")

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        """Change `x`, `c` and `state` in place; return the positions of refused non-finite values, None if there are
        none."""
        del moment
        return blocks.mixed(x, c, state, self.mix)

    def operation(self, moment: ExchangeInfo) -> Operation | None:
        """The host's operation that is equivalent to `exchange`. None: the worker computes, the host swaps values."""
        del moment
        return None

    def offer(self, x: Array, state: State, out: Array) -> None:
        """Write what this worker contributes to a round to `out`: by default its replica."""
        del state
        out[:] = x

    def accept(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Change the replica `x` and `state` by `total`, the mean of all contributions, or the sum if `op` says so."""
        raise NotImplementedError(f"{type(self).__name__} must define accept(self, x, total, state, moment)")

    def accept_buffer(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Do the same for the running statistics of a normalisation layer."""
        self.accept(x, total, state, moment)

    def shared(self, x: Array, state: State) -> Array:
        """What the center shows, for a synchronous rule: by default the replica, that of the first worker."""
        del state
        return x

    def remember(self, c: Array, state: State) -> None:
        """Called with the center's value when the replica is set to it, for rules with state at the worker."""

    def rounded(self, x: Array, state: State) -> None:
        """Called after an exchange with what a replica in half precision holds, for rules with state at the worker."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        settings = [f"{name}={getattr(self, name)!r}" for name in settings_of(type(self)) if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(settings)})"


class CenterMemory(Rule):
    """The base of rules that may keep `state["center"]`: the center as this worker last saw it."""

    saves_worker_state = False
    offers_changes = True

    def offer(self, x: Array, state: State, out: Array) -> None:
        """What this worker has changed: its distance from the center."""
        np.subtract(x, state["center"], out=out)

    def shared(self, x: Array, state: State) -> Array:
        return state.get("center", x)

    def remember(self, c: Array, state: State) -> None:
        state["center"][:] = c


@functools.cache
def is_operation_known(rule: type) -> bool:
    """Whether `operation` describes what `exchange` does: a subclass may override `exchange` alone."""

    def definer(method: str) -> type:
        return next(kind for kind in rule.__mro__ if method in vars(kind))

    return issubclass(definer("operation"), definer("exchange"))


def settings_of(rule: type[Rule]) -> list[str]:
    """The names of a rule's settings."""
    return list(inspect.signature(rule).parameters)


def changed(rule: Rule, settings: Mapping[str, Any]) -> Rule:
    """A copy of `rule` with other settings; InvalidArgument if training cannot continue with it."""
    known = {name: getattr(rule, name) for name in settings_of(type(rule)) if hasattr(rule, name)}
    made = type(rule)(**known | dict(settings))
    if _mechanism(made) != _mechanism(rule):
        raise InvalidArgument(
            f"{made!r} cannot replace {rule!r} while training: it shares in another way, keeps other state, or needs "
            "another momentum. Start a run with it."
        )
    return made


def with_overlap(rule: Rule) -> Rule:
    """A copy of `rule` whose exchanges run in the background."""
    if "overlap" in settings_of(type(rule)):
        return changed(rule, {"overlap": True})
    if rule.is_synchronous or rule.has_peers:
        raise InvalidArgument(
            f"--overlap with {rule!r}, whose exchanges cannot run in the background. Leave it out, or use a rule of "
            "the center, localsgd, diloco or bsp."
        )
    other = copy.copy(rule)
    other.overlap = True
    return other


def _mechanism(rule: Rule) -> tuple[bool, bool, StateNames, StateNames, float | None]:
    """What a replica was built for, which no setting can change while it trains."""
    return rule.is_synchronous, rule.averages_gradients, rule.worker_state, rule.center_state, rule.nesterov


def checked_share(rule: str, name: str, value: Any) -> float:
    """`value` if it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise InvalidArgument(
            f"{rule} has {name}={value!r}, but {name} is a share from 0 to 1. "
            f"Beyond 1 an exchange overshoots and the center diverges; a usual value is 0.5."
        )
    return float(value)


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """`value` if it is one of those known."""
    if value not in known:
        raise InvalidArgument(f"{name}={value!r} is none of {', '.join(known)}. Write {name}={known[0]!r}.")
    return value


def checked_nonfinite(rule: str, value: str, *, is_sync: bool = True) -> str:
    """`value` if it says what a synchronous rule does with a contribution that is not finite."""
    if not is_sync and value != NONFINITE[0]:
        raise InvalidArgument(
            f"{rule} has nonfinite={value!r}, which is for synchronous rules; without sync=True the center "
            "refuses values that are not finite. Add sync=True, or leave it out."
        )
    return one_of("nonfinite", value, NONFINITE)


def checked_flag(rule: str, name: str, value: Any) -> bool:
    """`value` if it is true or false."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{rule} has {name}={value!r}, which is neither true nor false.")
    return value


def checked_count(name: str, value: Any, least: int) -> int:
    """`value` if it is a whole number of at least `least`; from the command line it comes as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or float(value) % 1 or value < least:
        raise InvalidArgument(f"{name}={value!r} is no whole number of {least} or more. Write {name}={max(1, least)}.")
    return int(float(value))
