"""The calls that every engine is tried with: the same list for the ranks that make them and the test that looks."""

import itertools
import zlib
from dataclasses import dataclass

import numpy as np

SIZES = [0, 1, 2, 3, 5, 1000, 300_001]
OPS = ["sum", "mean", "min", "max", "prod"]
FLOATS = ["float32", "float64", "float16"]
WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
HALVES = ["float16", "bfloat16"]


@dataclass(frozen=True)
class Case:
    kind: str
    op: str = "sum"
    dtype: str = "float32"
    wire: str = "float32"
    size: int = 5
    weights: str = "even"
    is_ragged: bool = False
    is_last_root: bool = False

    def root(self, world: int) -> int:
        return world - 1 if self.is_last_root else 0

    def partner(self, rank: int, world: int) -> int:
        """The neighbour, or the rank counted from the end; the last or the middle one of an odd world has none."""
        other = world - 1 - rank if self.is_last_root else rank ^ 1
        return other if other < world else rank

    def weight(self, rank: int) -> float:
        return {"even": 1.0, "uneven": [3.0, 0.0, 2.5, 7.0][rank], "none": 0.0}[self.weights]

    def values(self, rank: int) -> np.ndarray:
        """What rank `rank` gives."""
        rng = np.random.default_rng([zlib.crc32(repr(self).encode()), rank])
        size = self.size + rank * 2 if self.is_ragged else self.size
        if self.dtype in WHOLE:
            return rng.integers(1, 4, size).astype(self.dtype)
        values = rng.standard_normal(size).astype(self.dtype)
        return values + 1j * rng.standard_normal(size).astype(values.real.dtype) if "complex" in self.dtype else values


CASES = [
    *(Case("all_reduce", op, dtype) for op in OPS for dtype in FLOATS),
    *(Case("all_reduce", op, dtype, size=13) for op in OPS if op != "mean" for dtype in WHOLE),
    *(Case("all_reduce", op, "complex64") for op in ("sum", "mean", "prod")),
    *(Case("all_reduce", "sum", size=size) for size in SIZES),
    *(Case("all_reduce", op, d, wire, 777) for op in OPS for d in ("float32", "float64") for wire in HALVES),
    *(Case("all_reduce", "mean", d, wire=w, weights="uneven", size=41)
      for d in ("float32", "float64") for w in ("float32", *HALVES)),
    Case("all_reduce", "mean", weights="none"),
    *(Case("reduce", op, size=size, wire=wire, is_last_root=is_last) for op, size, wire, is_last in itertools.product(
        ("sum", "mean"), (2, 999), ("float32", "bfloat16"), (False, True))),
    Case("reduce", "mean", weights="none"),
    Case("reduce", "mean", weights="uneven", size=300_001),
    *(Case("broadcast", size=size, wire=wire, is_last_root=wire == "float32")
      for size in SIZES for wire in ("float32", "float16")),
    Case("broadcast", dtype="int16"),
    *(Case(kind, dtype=dtype, wire=wire, size=size, is_ragged=is_ragged, is_last_root=is_ragged)
      for kind in ("gather", "all_gather", "scatter") for dtype, wire, size, is_ragged in (
          ("float32", "float32", 0, True), ("float32", "float32", 100_000, True), ("int64", "float32", 3, False),
          ("float64", "bfloat16", 3, True), ("float32", "float16", 1000, False), ("int16", "float16", 3, True))),
    *(Case("exchange_pairs", dtype=dtype, wire=wire, size=size, is_ragged=is_ragged, is_last_root=is_ragged)
      for dtype, wire, size, is_ragged in (
          ("float32", "float32", 3_000_000, False), ("float32", "float32", 0, True), ("uint8", "float32", 7, True),
          ("float64", "bfloat16", 1000, True), ("float32", "float16", 0, False), ("int64", "float32", 5, False))),
    *(Case("resident", op, wire=wire, weights=weights, size=1001) for op, wire, weights in (
        ("sum", "float32", "even"), ("mean", "float32", "uneven"), ("mean", "bfloat16", "uneven"),
        ("max", "float16", "even"), ("mean", "float32", "none"))),
]  # fmt: skip


def cases(world: int) -> list[Case]:
    """All calls for 4 ranks, and each third for fewer, to save time."""
    return CASES if world == 4 else CASES[world % 3 :: 3]


def groups() -> list[str]:
    """The kinds of calls, each a test of its own."""
    return list(dict.fromkeys(group(case) for case in CASES))


def group(case: Case) -> str:
    kind = f"{case.kind}-{case.op}" if case.kind in {"all_reduce", "reduce", "resident"} else case.kind
    return f"{kind}-{'half' if case.wire != 'float32' else 'plain'}"
