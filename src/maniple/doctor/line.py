"""What suits a line to a host: rule, period and compression, by the time that an exchange takes.

    exchange = round trip + bytes / up + bytes / down        an upper bound: exchanges use both directions at once
    cost     = exchange / (H steps + exchange)

An exchange that overlaps with training costs nothing while it is shorter than H steps. The values of H are those at
which the rules have been studied: up to 100 steps for DiLoCo, 500 in its paper (https://arxiv.org/abs/2311.08105).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from maniple.text import count
from maniple.wire.codecs import CODECS

MAX_COST = 0.05  # of the time
STEP_TIMES_S = (0.05, 0.2, 1.0)  # for a step time that is not known
WIRES = ("float32", "bfloat16", "int8", "int4")  # the least compression first
_DENSE_WIRES = WIRES[:2]  # of rules that exchange often
_EASGD_EVERY = 10
_LONGEST = (100, 500)
_MARGIN = 2  # an exchange that overlaps may take half of the H steps, since lines have slow moments


@dataclass(frozen=True)
class LineSpeed:
    """A line to a host, as measured from a worker's machine."""

    round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float

    def exchange_s(self, parameters: float, wire: str = WIRES[0]) -> float:
        """The seconds of an exchange with a center of so many parameters, 4 bytes each."""
        names = (wire, CODECS[wire].for_values)  # what a center returns is values
        up, down = (CODECS[name].size_bytes(round(parameters), 4) for name in names)
        return self.round_trip_s + up / self.up_bytes_per_s + down / self.down_bytes_per_s


@dataclass(frozen=True)
class Suggestion:
    """A rule, the steps between exchanges, the compression, and why.

    Attributes:
        exchange_s: seconds of one exchange.
        cost: share of the time that exchanges take; what overlaps with training is not counted.
    """

    rule: str
    every: int
    wire: str
    overlap: bool
    exchange_s: float
    cost: float
    reason: str

    @property
    def options(self) -> str:
        """The options of `maniple serve` and `maniple run`. Workers that join and leave need `sync=false`."""
        rule = f"diloco:every={self.every},sync=false" if self.rule == "diloco" else self.rule
        wire = "" if self.wire == WIRES[0] else f" --wire {self.wire}"
        return f"--rule {rule}{wire}{' --overlap' if self.overlap else ''}"


def suggest(line: LineSpeed, parameters: float, step_s: float) -> Suggestion:
    """The least compression, and with it the smallest H, with which exchanges take at most `MAX_COST` of the time.

    Rules that exchange often come first, since they need fewer steps; at the end is what hides an exchange if nothing
    makes it short.

    Args:
        line: the line between a worker and the host.
        parameters: of the model, 4 bytes each.
        step_s: seconds of one step of a worker.
    """
    plain_s = line.exchange_s(parameters)
    for rule, wire, every, overlap in _candidates(line, parameters, step_s):
        exchange_s = line.exchange_s(parameters, wire)
        cost = 0.0 if overlap else exchange_s / (every * step_s + exchange_s)
        window = f"{'a step' if every == 1 else count(every, 'step')} of {step_s:.3g} s"
        reason = f"an exchange takes {exchange_s:.2g} s"
        if wire != WIRES[0]:
            reason += f" ({plain_s:.2g} s without compression)"
        reason += f" and overlaps with {window}" if overlap else f", {100 * cost:.2g} % of the time with {window}"
        if every > _LONGEST[-1]:
            reason += "; so long a period has not been studied: a larger batch or a smaller model needs a shorter one"
        return Suggestion(rule, every, wire, overlap, exchange_s, cost, reason)
    raise AssertionError("the last candidate always suits")


def _candidates(line: LineSpeed, parameters: float, step_s: float) -> Iterator[tuple[str, str, int, bool]]:
    """What suits, the best first: rule, wire, steps between exchanges, overlap."""

    def needed(wire: str, *, overlap: bool = False) -> float:
        exchange_s = line.exchange_s(parameters, wire)
        return exchange_s / step_s * (_MARGIN if overlap else 1 / MAX_COST - 1)

    for rule, every in (("bsp", 1), ("easgd", _EASGD_EVERY)):
        for wire in _DENSE_WIRES:
            if needed(wire) <= every:
                yield rule, wire, every, False
    for longest in _LONGEST:
        for wire in WIRES:
            for overlap in (False, True):
                if needed(wire, overlap=overlap) <= longest:
                    yield "diloco", wire, _in_tens(needed(wire, overlap=overlap)), overlap
    quickest = min(WIRES, key=lambda wire: line.exchange_s(parameters, wire))
    yield "diloco", quickest, _in_tens(needed(quickest, overlap=True)), True


def _in_tens(steps: float) -> int:
    return max(10, 10 * math.ceil(steps / 10))
