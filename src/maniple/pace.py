"""The pace: when an exchange is due. Pure: time comes in as an argument, in seconds from the first step on.

A pace is asked after each step and told about each exchange:

    expect(cost_s, size_bytes)       a first guess, before anything was exchanged
    due(steps, now)                  steps since the last exchange
    exchanged(cost_s, size_bytes)
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

from maniple.errors import Conflict, InvalidArgument

_DECAY = 0.2  # the weight of the newest cost in the estimate of the next one


class Pace(Protocol):
    """When an exchange is due."""

    def expect(self, cost_s: float, size_bytes: int) -> None: ...
    def due(self, steps: int, now: float) -> bool: ...
    def exchanged(self, cost_s: float, size_bytes: int) -> None: ...


class Every:
    """An exchange every `n` steps."""

    def __init__(self, n: int = 10) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Every({n!r}) is no pace: the number of steps is 1 or more. Write Every(10).")
        self.n = n

    def expect(self, cost_s: float, size_bytes: int) -> None:
        """Nothing to expect."""

    def due(self, steps: int, now: float) -> bool:
        """`steps` have passed since the last exchange."""
        del now
        return steps >= self.n

    def exchanged(self, cost_s: float, size_bytes: int) -> None:
        """Nothing to learn."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Every) and other.n == self.n

    def __hash__(self) -> int:
        return hash(self.n)

    def __repr__(self) -> str:
        return f"Every({self.n})"


class RateLimit:
    """As many exchanges as fit into a share of wall time, and no more.

    With `spent` seconds in exchanges after `elapsed` seconds, the next one, expected to cost `e`, is due when

        (spent + e) / (elapsed + e) <= maximum_rate

    so that the share is within the limit when it ends, from the first exchange on. `e` is smoothed
    (`e += 0.2 (cost - e)`), so that one delay does not spoil it; when exchanges cost twice as much, they
    come half as often. `bytes_per_s` limits the traffic in the same way.

    Args:
        maximum_rate: the share, above 0 and up to 1; 0.25 if neither limit is given.
        bytes_per_s: the traffic, averaged from the start.
    """

    def __init__(self, maximum_rate: float | None = None, *, bytes_per_s: float | None = None) -> None:
        if maximum_rate is None:
            maximum_rate = 0.25 if bytes_per_s is None else 1.0
        if not 0 < maximum_rate <= 1:
            raise InvalidArgument(
                f"RateLimit({maximum_rate!r}) is no share of time: it lies above 0 and up to 1. "
                "A usual value is 0.5 divided by the number of workers."
            )
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise InvalidArgument(f"bytes_per_s={bytes_per_s!r} must be above 0. Leave it out for no such limit.")
        self.maximum_rate = float(maximum_rate)
        self.bytes_per_s = None if bytes_per_s is None else float(bytes_per_s)
        self._spent_s = 0.0
        self._cost_s = 0.0
        self._sent_bytes = 0
        self._next_bytes = 0
        self._begin: float | None = 0.0  # from when on time counts; None: from the next question on

    def again(self, maximum_rate: float) -> "RateLimit":
        """Another share, of the time from the next question on: what was spent before counts no more."""
        other = RateLimit(maximum_rate, bytes_per_s=self.bytes_per_s)
        other.expect(self._cost_s, self._next_bytes)
        other._begin = None
        return other

    def expect(self, cost_s: float, size_bytes: int) -> None:
        """A first guess, without which the very first exchange would come at once and break the limit."""
        if not self._sent_bytes:
            self._cost_s, self._next_bytes = cost_s, size_bytes

    def due(self, steps: int, now: float) -> bool:
        """One more exchange would keep the share."""
        if steps < 1:
            return False
        self._begin = now if self._begin is None else self._begin
        now -= self._begin
        if self._spent_s + self._cost_s > self.maximum_rate * (now + self._cost_s):
            return False
        return self.bytes_per_s is None or self._sent_bytes + self._next_bytes <= self.bytes_per_s * now

    def exchanged(self, cost_s: float, size_bytes: int) -> None:
        """Learn what the exchange cost."""
        self._spent_s += cost_s
        self._sent_bytes += size_bytes
        self._next_bytes = size_bytes
        self._cost_s += _DECAY * (cost_s - self._cost_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RateLimit) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        limit = "" if self.bytes_per_s is None else f", bytes_per_s={self.bytes_per_s}"
        return f"RateLimit({self.maximum_rate}{limit})"


def parse_pace(text: str) -> Pace:
    """The pace that the launcher wrote: `every:10` or `rate:0.25`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "every":
            return Every(int(value))
        if kind == "rate":
            return RateLimit(float(value))
    except ValueError as error:
        raise InvalidArgument(f"the pace {text!r} cannot be read: {error}") from None
    raise InvalidArgument(f"the pace {text!r} cannot be read. Write every:10 or rate:0.25.")


def change_pace(pace: Pace, wish: Mapping[str, Any]) -> Pace:
    """The pace that a person wishes while training goes on, `every` or `maximum_rate`; without a wish, the same one."""
    if len(wish) > 1:
        raise Conflict(f"{' and '.join(sorted(wish))} are two kinds of pace. Give one of them.")
    if "every" in wish:
        return Every(wish["every"])
    if "maximum_rate" not in wish:
        return pace
    share = wish["maximum_rate"]
    if isinstance(share, bool) or not isinstance(share, Real):
        raise InvalidArgument(f"maximum_rate={share!r} is no share of time. Write maximum_rate=0.1.")
    return (pace if isinstance(pace, RateLimit) else RateLimit()).again(float(share))
