"""Reductions: arrays of all workers combined in the order of their ranks, block by block.

Each element is computed by one worker alone, and always in the same order: all workers get the same bits, in every run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maniple.compiled import compiled
from maniple.contracts import Array

JOURNAL_BYTES = 1 << 18
_BLOCK = 1 << 16  # values: a sum stays in the cache until it is divided
_FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


class SlicePart:
    """One worker's part of all workers' vectors of a dtype, combined in place in each round.

    Args:
        span: where the part begins and ends.
        block: the journal, memory for the block that is being combined.
        progress: counts steps (see `combine`).
        base: the number of blocks in parts before this one that have the same `progress`.
        is_compiled: sums and means of floating-point values use the compiled kernel, where there is one.
    """

    def __init__(
        self,
        vectors: Sequence[Array],
        span: tuple[int, int],
        block: Array,
        progress: Array,
        *,
        base: int = 0,
        is_compiled: bool = True,
    ) -> None:
        self._vectors, self._span, self._block, self._progress, self._base = vectors, span, block, progress, base
        self._kernel = _kernel() if is_compiled and block.dtype.name in {"float32", "float64"} else None
        self._addresses = np.array([vector.ctypes.data for vector in vectors], np.uint64)
        self.blocks = -(-(span[1] - span[0]) // block.size)

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Combine the part and write it to all vectors, in steps that can be repeated, from where `progress` stands.

        Each block is computed into `block` and then copied to all vectors; `progress` counts both steps. If the process
        dies, either `block` holds the values of the block under way, or the vectors are as they were.
        """
        block, progress, (start, stop) = self._block, self._progress, self._span
        if self._kernel is not None and op in {"sum", "mean"}:
            weights = normalized(op, weights)
            total = sum(weights) if op == "mean" else 1.0
            self._kernel.combine_slice(
                self._addresses, weights, total, self._span, block=block, progress=progress, base=self._base
            )
            return
        for number in range(self.blocks):
            done = int(progress[0]) - 2 * (self._base + number)
            if done >= 2:
                continue
            low, high = start + number * block.size, min(stop, start + (number + 1) * block.size)
            result = block[: high - low]
            if done < 1:
                combine(op, [vector[low:high] for vector in self._vectors], weights, result)
                progress[0] += 1
            for vector in self._vectors:
                vector[low:high] = result
            progress[0] += 1


def combine(op: str, pieces: Sequence[Array], weights: Sequence[float], out: Array) -> None:
    """Set `out`, which may be one of the pieces, to their reduction by `op`.

    A mean is sum(w x) / sum(w); a piece of weight 0 is left out of it, whatever it holds. Values of half precision are
    combined in float32.
    """
    if out.dtype == np.float16:
        total = np.empty(out.size, np.float32)
        combine(op, [piece.astype(np.float32) for piece in pieces], weights, total)
        with np.errstate(all="ignore"):
            out[:] = total
        return
    weights = normalized(op, weights)
    used = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
    scratch = np.empty(min(_BLOCK, out.size), out.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _BLOCK):
            target = out[start : start + _BLOCK]
            _fold(op, [(piece[start : start + _BLOCK], weight) for piece, weight in used], target, scratch)
            if op == "mean":
                np.divide(target, target.dtype.type(sum(weights)), out=target)


def _fold(op: str, blocks: Sequence[tuple[Array, float]], out: Array, scratch: Array) -> None:
    # `out` may be a block that is read later on: then all but the last are combined in `scratch`.
    is_read = any(block.ctypes.data == out.ctypes.data for block, _ in blocks[1:])
    total = scratch[: out.size] if is_read and len(blocks) > 2 else out
    if all(weight == 1.0 for _, weight in blocks):
        if len(blocks) == 1:
            np.copyto(out, blocks[0][0])
        for i, (block, _) in enumerate(blocks[1:]):
            last = out if i == len(blocks) - 2 else total
            _FOLDS[op](blocks[0][0] if i == 0 else total, block, out=last)
        return
    terms = [block * block.dtype.type(weight) for block, weight in blocks]
    for term in terms[1:]:
        np.add(terms[0], term, out=terms[0])
    np.copyto(out, terms[0])


def normalized(op: str, weights: Sequence[float]) -> Sequence[float]:
    """Weights by which to multiply: 1 where all that count are equal, so that no multiplication is needed; 0 stays 0.

    Only a mean has weights.
    """
    if op != "mean":
        return [1.0] * len(weights)
    used = {*weights} - {0.0}
    if len(used) != 1:
        return weights
    return [1.0] * len(weights) if all(weights) else [1.0 if weight else 0.0 for weight in weights]


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Where each of `parts` parts of `size` elements begins and ends: in whole cache lines, except for the last."""
    step = -(-size // max(1, parts))
    step += -step % 16
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def block_bytes() -> int:
    """The size of a block: half of the L1 cache for the kernel; for NumPy, enough to outweigh the cost of its calls."""
    return JOURNAL_BYTES if _kernel() is None else JOURNAL_BYTES // 16


def warm_up(dtypes: Sequence[str]) -> None:
    """Compile or load the kernels now, so that the first round is as fast as the rest."""
    for dtype in dtypes:
        vector, block = np.zeros(1, dtype), np.zeros(1, dtype)
        SlicePart([vector], (0, 1), block, np.zeros(1, np.int64)).combine("sum", [1.0])


def _kernel() -> Any:
    return compiled("maniple.collectives.reductions_compiled")
