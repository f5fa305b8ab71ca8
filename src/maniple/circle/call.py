"""A call: what a worker asks of its circle, told to all others before any value travels, so that calls that do not
fit together are an error for everybody, and not a hang or a wrong sum.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maniple.contracts import Array, Round
from maniple.errors import CallMismatch, InvalidArgument

DTYPES = (
    *("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)
OPS = ("sum", "mean", "min", "max", "prod")
WIRES = ("float32", "float16", "bfloat16")
_KINDS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather", "scatter", "barrier", "reside", "resident")
_SAME_SIZE = {"all_reduce", "reduce", "broadcast", "reside", "resident"}
_FIELDS = 8
NUMBER, SIZE = 4, 5  # where they stand among the words


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as it is told to the others."""

    kind: str
    number: int  # the calls of this circle so far
    dtype: str = "int64"
    size: int = 0
    op: str = "sum"
    root: int = 0
    wire: str = "float32"
    weight: float = 1.0

    def words(self, number: int) -> tuple[int, ...]:
        """The call as whole numbers, but for the weight."""
        return (*_numbered(self.kind, self.dtype, self.op, self.wire), number, self.size, self.root)

    @classmethod
    def of_words(cls, words: Sequence[int], weight: float) -> "Call":
        """The call that `words` tell."""
        kind, dtype, op, wire, number, size, root = (int(word) for word in words)
        return cls(_KINDS[kind], number, DTYPES[dtype], size, OPS[op], root, WIRES[wire], weight)

    def pack(self) -> Array:
        """The call as 64 bytes."""
        words = np.zeros(_FIELDS, np.int64)
        words[:7] = self.words(self.number)
        words[7:].view(np.float64)[:] = self.weight
        return words

    @classmethod
    def unpack(cls, words: Array) -> "Call":
        """The call that another worker has told."""
        return cls.of_words(words[:7].tolist(), float(words[7:].view(np.float64)[0]))

    def fits(self, other: "Call") -> bool:
        """Both are the same call, but for what may differ: weights, and the sizes of what is gathered."""
        mine, theirs = (
            (call.kind, call.number, call.dtype, call.op, call.root, call.wire, call.size * (call.kind in _SAME_SIZE))
            for call in (self, other)
        )
        return mine == theirs

    def __str__(self) -> str:
        words = [f"{self.dtype}[{self.size}]"]
        words += [self.op] if self.kind in {"all_reduce", "reduce", "resident"} else []
        words += [f"root={self.root}"] if self.kind in {"reduce", "broadcast", "gather", "scatter"} else []
        words += [f"wire={self.wire}"] if self.wire != "float32" else []
        return f"call {self.number}, {self.kind}({', '.join(words if self.kind != 'barrier' else ())})"


@functools.cache
def _numbered(kind: str, dtype: str, op: str, wire: str) -> tuple[int, int, int, int]:
    return _KINDS.index(kind), DTYPES.index(dtype), OPS.index(op), WIRES.index(wire)


def empty_words() -> Array:
    """Room for a call of another worker."""
    return np.empty(_FIELDS, np.int64)


def compare(rank: int, calls: Mapping[int, Call]) -> None:
    """Raise CallMismatch if the workers' calls, by their ranks, do not fit together; if so, then for every worker."""
    for other, call in calls.items():
        if not calls[rank].fits(call):
            raise CallMismatch(
                f"worker {rank} made {calls[rank]}, but worker {other} made {call}. All workers make the same calls "
                "in the same order, with the same dtype and size: look for a call that only some of them reach."
            )


def check_reduction(op: str, dtype: str, wire: str) -> None:
    """Raise InvalidArgument for what cannot be reduced."""
    if op not in OPS:
        raise InvalidArgument(f"op={op!r} is no way to put values together (one of {', '.join(OPS)}).")
    check_values(dtype, wire)
    if op == "mean" and dtype[0] in "iu":
        raise InvalidArgument(f"{dtype} values have no mean of their own kind. Convert them to float64, or use sum.")
    if op in {"min", "max"} and dtype.startswith("complex"):
        raise InvalidArgument(f"{dtype} values have no order, so no {op}. Use sum, mean or prod.")


def check_root(root: int, ranks: Sequence[int]) -> None:
    """Raise InvalidArgument for a root that is not there."""
    if root not in ranks:
        there = ", ".join(map(str, ranks))
        raise InvalidArgument(f"root={root!r} is no worker of this circle (its ranks are {there}). Give one of them.")


def check_parts(parts: Sequence[Array] | None, world: int) -> None:
    """Raise InvalidArgument unless a root has a part for each worker."""
    if parts is None or len(parts) != world:
        given = "none" if parts is None else len(parts)
        raise InvalidArgument(f"scatter got {given} parts for {world} workers. Give one for each.")


def nonfinite_weight(entry: int) -> float:
    """The weight that tells all workers of a round that this worker's values are not finite, and in which entry.

    Weights travel with every round anyway, so a round costs no additional message for it.
    """
    return -1.0 - entry


def counted(weights: Sequence[float]) -> list[float]:
    """How often each worker's values count in a mean: not at all if they are not finite."""
    return [max(0.0, weight) for weight in weights]


def done(op: str, ranks: Sequence[int], weights: Sequence[float], waited_s: float) -> Round:
    """What a round did; those without weight are not in a mean."""
    used = tuple(rank for rank, weight in zip(ranks, weights, strict=True) if weight > 0 or op != "mean")
    nonfinite = {rank: int(-weight) - 1 for rank, weight in zip(ranks, weights, strict=True) if weight < 0}
    return Round(used, float(sum(counted(weights))), waited_s, nonfinite)


def check_values(dtype: str, wire: str) -> None:
    """Raise InvalidArgument for what cannot travel."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"values of dtype {dtype} cannot be sent around (one of {', '.join(DTYPES)}).")
    if wire not in WIRES:
        raise InvalidArgument(f"wire={wire!r} is no way to send values in a circle (one of {', '.join(WIRES)}).")
