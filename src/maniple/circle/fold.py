"""Folding: several workers' values made one. In NumPy, in blocks that stay in cache.

The order of the additions is that of the ranks, and each element is computed by one worker alone: all get the same
bits, in every run.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument

OPS = ("sum", "mean", "min", "max", "prod")
JOURNAL_BYTES = 1 << 18
_TWO: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}

Fold = Callable[..., None]


def check_op(op: str) -> None:
    """Raise InvalidArgument unless `op` is one."""
    if op not in OPS:
        raise InvalidArgument(f"op={op!r} is no way to make one value of many. Choose one of {', '.join(OPS)}.")


def shares(weights: Sequence[float], op: str, dtype: Any) -> Array:
    """What each worker's values are multiplied by: w_k / sum(w) in a mean, else 1."""
    real = np.float64 if np.dtype(dtype).kind in "iub" else dtype
    if op != "mean":
        return np.ones(len(weights), real)
    return (np.array(weights, np.float64) / sum(weights)).astype(np.result_type(real, np.float32))


def fold(values: Sequence[Array], out: Array, op: str, weights: Array) -> None:
    """Make `out` of all `values`, which it may be one of."""
    with np.errstate(all="ignore"):
        if op == "mean" and len(set(weights.tolist())) > 1:
            total = values[0] * weights[0]
            for value, weight in zip(values[1:], weights[1:], strict=True):
                total += value * weight
            out[:] = total
            return
        if len(values) == 1:
            np.copyto(out, values[0])
        else:
            # The first two into a new block, if `out` is read later on.
            is_read_later = any(np.may_share_memory(out, value) for value in values[2:])
            target = np.empty_like(out) if is_read_later else out
            _TWO[op](values[0], values[1], out=target)
            for value in values[2:]:
                _TWO[op](target, value, out=target)
            if target is not out:
                out[:] = target
        if op == "mean" and len(values) > 1:
            np.multiply(out, weights[0], out=out, casting="unsafe")


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """`size` elements in as many parts, in whole cache lines but for the last."""
    step = -(-size // max(1, parts))
    step += -step % 16
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def fold_slice(
    vectors: list[Array], weights: Array, part: tuple[int, int], block: Array, progress: Array, *, base: int, op: str
) -> None:
    """Make one of a part of all vectors, and write it to all, in steps that can be repeated.

    Each block is computed into `block` and then copied to all vectors; `progress` counts both. If the process dies, the
    values of the block under way are in `block`, or the vectors are as they were.
    """
    start, stop = part
    for number in range(-(-(stop - start) // block.size)):
        done = int(progress[0]) - 2 * (base + number)
        if done >= 2:
            continue
        low, high = start + number * block.size, min(stop, start + (number + 1) * block.size)
        result = block[: high - low]
        if done < 1:
            fold([vector[low:high] for vector in vectors], result, op, weights)
            progress[0] += 1
        for vector in vectors:
            vector[low:high] = result
        progress[0] += 1


@functools.cache
def _fused() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("maniple.circle.fused")


def block_bytes() -> int:
    """How much is computed at a time: compiled it fits the first cache, in NumPy it is worth the cost of a call."""
    return JOURNAL_BYTES if _fused() is None else JOURNAL_BYTES // 8


def fold_in_place(
    vectors: list[Array], weights: Array, part: tuple[int, int], block: Array, progress: Array, *, base: int, op: str
) -> None:
    """`fold_slice`, compiled where it can be."""
    if op in {"sum", "mean"} and block.dtype.name in {"float32", "float64"} and (fused := _fused()) is not None:
        fused.fold_slice(vectors, weights.astype(block.dtype), part, block, progress, base=base)
    else:
        fold_slice(vectors, weights, part, block, progress, base=base, op=op)


def warm_up(dtypes: Sequence[str]) -> None:
    """Compile or load the kernels now, so that the first round is as fast as the rest."""
    for dtype in dtypes:
        vector, block = np.zeros(1, dtype), np.zeros(1, dtype)
        fold_in_place([vector], np.ones(1), (0, 1), block, np.zeros(1, np.int64), base=0, op="sum")
