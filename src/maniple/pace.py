"""The pace: when an exchange is due. Pure: time comes in as an argument."""

import statistics
from collections import deque
from collections.abc import Mapping
from numbers import Real
from typing import Any

from maniple.errors import Conflict, InvalidArgument

_DECAY = 0.2  # the weight of the newest cost in the estimate of the next one
_STEPS = 5  # their median is the usual step: one or two pauses among them do not change it
_RETRY_S = 0.25  # after a failed exchange: a host that returns is found at once, and a try without it costs nothing
_AT_ONCE_S = 0.01  # an exchange that fails so soon had no connection, and has sent nothing


class Pace:
    """When an exchange is due. `due` is called after each step, `exchanged` after each exchange."""

    def expect(self, cost_s: float, size_bytes: int) -> None:
        """Set a first estimate of the cost, before anything was exchanged."""

    def due(self, steps: int, now: float) -> bool:
        """Whether an exchange is due, `steps` after the last one and `now` seconds after the replica was shared."""
        raise NotImplementedError

    def exchanged(self, cost_s: float, size_bytes: int) -> None:
        """Note an exchange that was made."""

    def failed(self, cost_s: float, spread: float) -> None:
        """Note that the host could not be reached. `spread`, from 0 to 1, differs between workers."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class Every(Pace):
    """An exchange every `n` steps."""

    def __init__(self, n: int = 10) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Every({n!r}) is no pace: the number of steps is 1 or more. Write Every(10).")
        self.n = n

    def due(self, steps: int, now: float) -> bool:
        del now
        return steps >= self.n

    def __repr__(self) -> str:
        return f"Every({self.n})"


class RateLimit(Pace):
    """As many exchanges as fit into a share of wall time, and no more, in any stretch of a few exchanges.

    An exchange that began at `b` and cost `c` seconds is followed by the next one no earlier than

        b + c / maximum_rate

    so the share holds between any two exchanges, and a pause does not save up time for later: after it, one exchange is
    due, and the one after that at the usual distance. Only the wait for the end of a step is made up for, so that
    the share is reached though exchanges come after whole steps.

    The first one waits until its expected cost is within the share when it ends. The expected cost is smoothed
    (`e += 0.2 (cost - e)`, where a single delay counts as `2 e` at most); if it grows, the next exchange waits for
    the difference. `bytes_per_s` limits the traffic, with `size / bytes_per_s` in place of
    `c / maximum_rate`. An exchange that fails counts with its cost, and with its traffic if there was a connection.

    Args:
        maximum_rate: the share, above 0 and up to 1; 0.25 if neither limit is given. With 0.5 / workers, the center is
            idle half of the time, so that exchanges of different workers rarely wait for each other.
        bytes_per_s: the traffic.
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
        self._cost_s, self._last_cost_s = 0.0, 0.0  # of the next exchange, as expected; of the last one
        self._size_bytes = 0
        self._has_exchanged = False
        self._begin: float | None = 0.0  # from when on time counts; None: from the next question on
        self._now = 0.0  # since then: the end of the last exchange, or the last question
        self._next = 0.0  # since then: when the next exchange is due
        self._reserved_s = 0.0  # how long exchanges were put off so that the expected cost was within the share
        self._steps = deque([0.0], _STEPS)  # the durations of the last steps

    def again(self, maximum_rate: float) -> "RateLimit":
        """Another share, of the time from the next question on: what was spent before counts no more."""
        other = RateLimit(maximum_rate, bytes_per_s=self.bytes_per_s)
        other.expect(self._cost_s, self._size_bytes)
        other._begin = None
        return other

    def expect(self, cost_s: float, size_bytes: int) -> None:
        """A first guess, without which the very first exchange would come at once and break the limit."""
        if not self._has_exchanged:
            self._cost_s, self._size_bytes = cost_s, size_bytes
            self._next = self._reserved_s = self._lead_s

    def due(self, steps: int, now: float) -> bool:
        """One more exchange would keep the share."""
        if steps < 1:
            return False
        self._begin = now if self._begin is None else self._begin
        now -= self._begin
        self._steps.append(now - self._now)
        self._now = now
        return now >= self._next

    def exchanged(self, cost_s: float, size_bytes: int) -> None:
        """Learn what the exchange cost."""
        if self._cost_s:
            usual_s = min(cost_s, max(2 * self._cost_s, self._last_cost_s))  # two delays in a row are no accident
            self._cost_s += _DECAY * (usual_s - self._cost_s)
        else:
            self._cost_s = cost_s
        self._last_cost_s, self._size_bytes, self._has_exchanged = cost_s, size_bytes, True
        self._put_off(cost_s, self._distance_s(cost_s, size_bytes))

    def failed(self, cost_s: float, spread: float) -> None:
        """An exchange failed: the next try is due within the share, after 0.25 s to 0.5 s by `spread`.

        Without that, all workers would try at each step, and meet at a host that returns.
        """
        size_bytes = 0 if cost_s < _AT_ONCE_S else self._size_bytes
        usual_s = self._distance_s(self._cost_s, self._size_bytes)
        self._put_off(cost_s, max(min(usual_s, _RETRY_S) * (1 + spread), self._distance_s(cost_s, size_bytes)))

    def _put_off(self, cost_s: float, distance_s: float) -> None:
        """The next exchange is due `distance_s` after the beginning of one that took `cost_s`."""
        late_s = min(statistics.median_low(self._steps), self._lead_s)  # as late as the end of a step makes it
        reserved_s = max(self._reserved_s, self._lead_s)
        self._next = max(self._next, self._now - late_s) + distance_s + reserved_s - self._reserved_s
        self._reserved_s = reserved_s
        self._now += cost_s

    @property
    def _lead_s(self) -> float:
        """How much time must have passed before an exchange of the expected cost."""
        return max(self._distance_s(self._cost_s, 0) - self._cost_s, self._distance_s(0.0, self._size_bytes))

    def _distance_s(self, cost_s: float, size_bytes: int) -> float:
        traffic_s = 0.0 if self.bytes_per_s is None else size_bytes / self.bytes_per_s
        return max(cost_s / self.maximum_rate, traffic_s)

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
    """The pace after a live change of `every` or `maximum_rate`; the same one without such a change."""
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
