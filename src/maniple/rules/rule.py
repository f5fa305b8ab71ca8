"""A rule: what an exchange between a replica and the center does. Maths only."""

from numbers import Real
from typing import Any, ClassVar

from maniple.contracts import Act, Array, Moment
from maniple.errors import InvalidArgument
from maniple.rules import blocks


class Rule:
    """The base of rules. A rule of your own needs one method:

        class Halfway(maniple.Rule):
            def mix(self, x, c, memory):
                middle = (x + c) / 2
                return middle, middle          # the new replica, the new center

    `mix` sees one block of one parameter at a time, as NumPy arrays that it must not change. With
    `memory = True`, it also gets the same block of a private vector, of zeros at first, that it may change.
    """

    every: ClassVar[int] = 10  # the default pace, in steps
    memory: ClassVar[bool] = False  # keeps one private vector of the model's size per worker

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

    def remember(self, c: Array, memory: Array) -> None:
        """Called with the center's value when the replica is set to it, for rules with `memory`."""

    def rounded(self, x: Array, memory: Array) -> None:
        """Called after an exchange with what a replica in half precision holds of it, for rules with `memory`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        settings = [f"{name.lstrip('_')}={value!r}" for name, value in vars(self).items()]
        return f"{type(self).__name__}({', '.join(settings)})"


def checked_share(rule: str, name: str, value: Any) -> float:
    """`value` if it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise InvalidArgument(
            f"{rule} has {name}={value!r}, but {name} is a share from 0 to 1. "
            f"Beyond 1 an exchange overshoots and the center diverges; a usual value is 0.5."
        )
    return float(value)
