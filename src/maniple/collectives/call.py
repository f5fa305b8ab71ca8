"""Collective calls as records, and the checks of their arguments.

Every worker shows its call to the others before any value travels, so that calls that do not match are an error on all
sides, and not a hang or a wrong sum.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maniple.contracts import Array, Round
from maniple.errors import CallMismatch, InvalidArgument

DTYPES = (
    *("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)
OPS = ("sum", "mean", "min", "max", "prod")
WIRES = ("float32", "float16", "bfloat16")
RESIDENT_WIRES = (*WIRES, "int8", "int4", "topk")  # of vectors that are reduced again and again: errors are kept
_KINDS = (
    *("all_reduce", "reduce", "broadcast", "gather", "all_gather", "scatter", "barrier", "reside", "resident"),
    "exchange_pairs",
)
_SAME_SIZE = {"all_reduce", "reduce", "broadcast", "reside", "resident"}
_INTEGERS = ("kind", "dtype", "op", "wire", "number", "size", "root")
CALL = np.dtype([*((name, "<i8") for name in _INTEGERS), ("weight", "<f8")])  # a call in memory and in messages


class CollectiveCall(NamedTuple):
    """One call of one worker.

    Attributes:
        number: the calls of this group so far.
        root: the worker that gives or gets values; in exchange_pairs, this worker's partner.
        weight: how often this worker's values count in a mean; below 0, they are not finite (`nonfinite_weight`).
    """

    kind: str
    dtype: str = "int64"
    size: int = 0
    op: str = "sum"
    root: int = 0
    wire: str = "float32"
    weight: float = 1.0
    number: int = 0

    def record(self, number: int) -> tuple[float, ...]:
        """The call as an element of dtype CALL."""
        return (*_codes(self.kind, self.dtype, self.op, self.wire), number, self.size, self.root, self.weight)

    @classmethod
    def from_record(cls, record: Sequence[float]) -> "CollectiveCall":
        """The inverse of `record`."""
        kind, dtype, op, wire, number, size, root = (int(value) for value in record[:7])
        return cls(_KINDS[kind], DTYPES[dtype], size, OPS[op], root, RESIDENT_WIRES[wire], float(record[7]), number)

    def matches(self, other: "CollectiveCall") -> bool:
        """Whether both are the same call. Weights and partners may differ, and the sizes of what is not reduced."""
        size = self.size if self.kind in _SAME_SIZE else other.size
        root = other.root if self.kind == "exchange_pairs" else self.root
        return self._replace(size=size, root=root, weight=other.weight) == other

    def __str__(self) -> str:
        arguments = [f"{self.dtype}[{self.size}]"]
        arguments += [self.op] if self.kind in {"all_reduce", "reduce", "resident"} else []
        arguments += [f"root={self.root}"] if self.kind in {"reduce", "broadcast", "gather", "scatter"} else []
        arguments += [f"partner={self.root}"] if self.kind == "exchange_pairs" else []
        arguments += [f"wire={self.wire}"] if self.wire != "float32" else []
        return f"call {self.number}, {self.kind}({', '.join(arguments if self.kind != 'barrier' else ())})"


@functools.cache
def _codes(kind: str, dtype: str, op: str, wire: str) -> tuple[int, int, int, int]:
    return _KINDS.index(kind), DTYPES.index(dtype), OPS.index(op), RESIDENT_WIRES.index(wire)


def compare(rank: int, calls: Mapping[int, CollectiveCall]) -> None:
    """Raise CallMismatch unless the workers' calls, by rank, match; every worker then raises it."""
    for other, call in calls.items():
        if not calls[rank].matches(call):
            raise CallMismatch(
                f"worker {rank} made {calls[rank]}, but worker {other} made {call}. All workers make the same calls "
                "in the same order, with the same dtype and size: look for a call that only some of them reach."
            )
    for one, call in calls.items() if calls[rank].kind == "exchange_pairs" else ():
        partner = calls.get(call.root)
        if partner is not None and partner.root != one:
            raise CallMismatch(
                f"worker {one} exchanges with worker {call.root}, but that one with worker {partner.root}. Both must "
                "name each other: compute all pairs from what all workers know, such as the ranks and a common seed."
            )


def check_values(dtype: str, wire: str) -> None:
    """Raise InvalidArgument for values that cannot be sent."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"values of dtype {dtype} cannot be sent (one of {', '.join(DTYPES)}). Convert them.")
    if wire in RESIDENT_WIRES[len(WIRES) :]:
        raise InvalidArgument(
            f"wire={wire!r} adds the errors of one round to the next, and a single call has no next one. Use one of "
            f"{', '.join(WIRES)}, or share a model with it."
        )
    if wire not in WIRES:
        raise InvalidArgument(f"wire={wire!r} is no wire format of collectives. Use one of {', '.join(WIRES)}.")


def check_resident(dtype: str, wire: str) -> None:
    """Raise InvalidArgument for vectors that cannot be reduced again and again."""
    if wire not in RESIDENT_WIRES:
        raise InvalidArgument(
            f"wire={wire!r} is no wire format of collectives. Use one of {', '.join(RESIDENT_WIRES)}."
        )
    check_values(dtype, "float32")


def check_resident_reduction(op: str, dtype: str, wire: str) -> None:
    """Raise InvalidArgument for vectors that cannot be reduced by `op`."""
    check_resident(dtype, wire)
    check_reduction(op, dtype, "float32")
    if wire not in WIRES and op not in {"sum", "mean"}:
        raise InvalidArgument(
            f"wire={wire!r} keeps errors, which sums and means have, and {op} has none. Use bfloat16."
        )


def check_reduction(op: str, dtype: str, wire: str) -> None:
    """Raise InvalidArgument for values that cannot be reduced by `op`."""
    if op not in OPS:
        raise InvalidArgument(f"op={op!r} is no reduction. Use one of {', '.join(OPS)}.")
    check_values(dtype, wire)
    if op == "mean" and dtype[0] in "iu":
        raise InvalidArgument(f"{dtype} values have no mean of their own kind. Convert them to float64, or use sum.")
    if op in {"min", "max"} and dtype.startswith("complex"):
        raise InvalidArgument(f"{dtype} values have no order, so no {op}. Use sum, mean or prod.")


def check_root(root: int, ranks: Sequence[int]) -> None:
    """Raise InvalidArgument for a root that is no member."""
    if root not in ranks:
        there = ", ".join(map(str, ranks))
        raise InvalidArgument(f"root={root!r} is no worker of this group (its ranks are {there}). Give one of them.")


def check_parts(parts: Sequence[Array] | None, world: int) -> None:
    """Raise InvalidArgument unless a root has a part for each worker."""
    if parts is None or len(parts) != world:
        given = "none" if parts is None else len(parts)
        raise InvalidArgument(f"scatter got {given} parts for {world} workers. Give one for each.")


def nonfinite_weight(entry: int) -> float:
    """The weight that tells all workers of a round that this worker's values are not finite, and in which entry.

    Weights travel with every round anyway, so this costs no additional message.
    """
    return -1.0 - entry


def counted(weights: Sequence[float]) -> Sequence[float]:
    """How often each worker's values count in a mean: not at all if they are not finite."""
    return weights if min(weights) >= 0 else [max(0.0, weight) for weight in weights]


def round_result(op: str, ranks: Sequence[int], weights: Sequence[float], waited_s: float) -> Round:
    """What a round did. Workers without weight are not part of a mean."""
    if min(weights) > 0:
        return Round(tuple(ranks), float(sum(weights)), waited_s)
    used = tuple(rank for rank, weight in zip(ranks, weights, strict=True) if weight > 0 or op != "mean")
    nonfinite = {rank: int(-weight) - 1 for rank, weight in zip(ranks, weights, strict=True) if weight < 0}
    return Round(used, float(sum(counted(weights))), waited_s, nonfinite)


REPORT_S = 2.0  # a wait of this length is unusual enough for a row, and for another one after as long again
OnLongWait = Callable[[Sequence[int], float, bool], None]  # the ranks waited for, seconds so far, whether it is over


class PassedOver(Exception):
    """The others have removed this worker from the group and gone on without it; it may join again."""


class LongWait:
    """Reports waits that take long, one after the other."""

    def __init__(self) -> None:
        self.on_report: OnLongWait = lambda _, __, ___: None
        self._reported_s = 0.0
        self._ranks: Sequence[int] = ()

    def check(self, find_missing: Callable[[], Sequence[int]], waited_s: float) -> None:
        """Report the wait if it has become long; to be called while it lasts."""
        if waited_s < self._reported_s:  # a new one: the one before was given up
            self._reported_s = 0.0
        if waited_s - self._reported_s >= REPORT_S:
            self._reported_s, self._ranks = waited_s, find_missing()
            self.on_report(self._ranks, waited_s, False)

    def end(self, waited_s: float) -> None:
        """Report the end of a wait that was reported."""
        if self._reported_s:
            self._reported_s = 0.0
            self.on_report(self._ranks, waited_s, True)
