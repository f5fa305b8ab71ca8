"""A rule: what an exchange between a replica and the center does. Maths only."""

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

from maniple.contracts import Act, Array, Moment
from maniple.errors import InvalidArgument
from maniple.rules import blocks

NONFINITE = ("stop", "skip")


class Rule:
    """The base of rules. A rule of your own needs one method:

        class Halfway(maniple.Rule):
            def mix(self, x, c, memory):
                middle = (x + c) / 2
                return middle, middle          # the new replica, the new center

    `mix` sees one block of one parameter at a time, as NumPy arrays that it must not change. With
    `memory = True`, it also gets the same block of a private vector, of zeros at first, that it may change.
    """

    every: int = 10  # the default pace, in steps
    memory: bool = False  # keeps one private vector of the model's size per worker
    op: ClassVar[str] = "mean"  # what the circle makes of the workers' offers
    quorum: int = 0  # how many workers are waited for in a round; 0: all
    norm: str = "averaged"  # the running statistics of normalisation layers: averaged, local or synchronised
    momentum: str = "keep"  # what becomes of the optimizer's moments when values are averaged
    check_every: int = 0  # exchanges between two looks whether the replicas are the same
    nonfinite: str = "stop"  # a contribution to the circle that is not finite: "stop" the run, or "skip" it
    overlap: bool = False  # gradients go out during the backward pass, where the circle can carry them meanwhile

    @property
    def meets(self) -> str:
        """Where: "center"; or in the circle, with "gradients" before each step or with "values" after some."""
        return "center"

    def mix(self, x: Array, c: Array, memory: Array | None) -> tuple[Array, Array]:
        """The new replica and the new center."""
        raise NotImplementedError(f"{type(self).__name__} must define mix(self, x, c, memory)")

    def exchange(self, x: Array, c: Array, memory: Array | None, moment: Moment) -> bool:
        """Change `x` and `c` in place; False if some proposed values were not finite (they are left out)."""
        del moment
        return blocks.mixed(x, c, memory, self.mix)

    def act(self, moment: Moment) -> Act | None:
        """The rule in the words of the wire. None: the worker computes it, and the host swaps the values."""
        del moment
        return None

    def offer(self, x: Array, memory: Array | None, out: Array) -> None:
        """Write to `out` what this worker gives to the circle."""
        raise NotImplementedError(f"{type(self).__name__} does not meet in the circle")

    def accept(self, x: Array, total: Array, memory: Array | None, moment: Moment) -> None:
        """Change the replica `x` by what the circle has made of all offers."""
        raise NotImplementedError(f"{type(self).__name__} does not meet in the circle")

    def shared(self, x: Array, memory: Array | None) -> Array:
        """What the center shows, of a rule that meets in the circle."""
        del memory
        return x

    def remember(self, c: Array, memory: Array) -> None:
        """Called with the center's value when the replica is set to it, for rules with `memory`."""

    def rounded(self, x: Array, memory: Array) -> None:
        """Called after an exchange with what a replica in half precision holds of it, for rules with `memory`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        settings = [f"{name}={getattr(self, name)!r}" for name in settings_of(type(self)) if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(settings)})"


def settings_of(rule: type[Rule]) -> list[str]:
    """The names of a rule's settings."""
    return list(inspect.signature(rule).parameters)


def changed(rule: Rule, settings: Mapping[str, Any]) -> Rule:
    """A rule like `rule`, made with other settings; an error if training cannot go on with it."""
    known = {name: getattr(rule, name) for name in settings_of(type(rule)) if hasattr(rule, name)}
    made = type(rule)(**known | dict(settings))
    if made.meets != rule.meets or made.memory != rule.memory:
        raise InvalidArgument(
            f"{made!r} cannot take the place of {rule!r} while training goes on: it meets elsewhere, or keeps "
            "something else. Start a run with it."
        )
    return made


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
    """`value` if it says what to do with a contribution that is not finite, of a rule whose workers meet at once."""
    if not is_sync and value != NONFINITE[0]:
        raise InvalidArgument(
            f"{rule} has nonfinite={value!r}, which is for workers that meet at once; without sync=True the center "
            "refuses values that are not finite. Add sync=True, or leave it out."
        )
    return one_of("nonfinite", value, NONFINITE)


def checked_flag(rule: str, name: str, value: Any) -> bool:
    """`value` if it is true or false."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{rule} has {name}={value!r}, which is neither true nor false.")
    return value
