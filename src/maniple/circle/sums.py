"""Sums: arrays of all workers put together in the order of their ranks, block by block.

Each element is computed by one worker alone, and always in the same order: all get the same bits, in every run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maniple.contracts import Array
from maniple.rules.kernels import compiled

JOURNAL_BYTES = 1 << 18
_BLOCK = 1 << 16  # values; what is added up and then divided stays in the cache
_FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def evened(weights: Sequence[float]) -> list[float]:
    """Weights that are all alike count 1 each, so that nothing is multiplied in vain; 0 stays 0."""
    used = {weight for weight in weights if weight}
    return [1.0 if weight else 0.0 for weight in weights] if len(used) == 1 else list(weights)


def combine(op: str, pieces: Sequence[Array], weights: Sequence[float], out: Array) -> None:
    """Set `out`, which may be one of the pieces, to what `op` makes of them.

    A mean is sum(w x) / sum(w); a piece of weight 0 is left out of it, whatever it holds.
    """
    weights = evened(weights) if op == "mean" else [1.0] * len(pieces)
    used = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
    scratch = np.empty(min(_BLOCK, out.size), out.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _BLOCK):
            target = out[start : start + _BLOCK]
            _fold(op, [(piece[start : start + _BLOCK], weight) for piece, weight in used], target, scratch)
            if op == "mean":
                np.divide(target, target.dtype.type(sum(weights)), out=target)


def _fold(op: str, blocks: Sequence[tuple[Array, float]], out: Array, scratch: Array) -> None:
    # `out` may be a block that is read later on: then all but the last are put together elsewhere.
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


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """`size` elements in as many parts, in whole cache lines but for the last."""
    step = -(-size // max(1, parts))
    step += -step % 16
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def combine_slice(
    op: str,
    vectors: Sequence[Array],
    weights: Sequence[float],
    part: tuple[int, int],
    *,
    block: Array,
    progress: Array,
    base: int,
) -> None:
    """Combine a part of all vectors, and write it to all, in steps that can be repeated.

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
            combine(op, [vector[low:high] for vector in vectors], weights, result)
            progress[0] += 1
        for vector in vectors:
            vector[low:high] = result
        progress[0] += 1


def block_bytes() -> int:
    """How much is computed at a time: half of the first cache, or in NumPy what is worth the cost of a call."""
    return JOURNAL_BYTES if _fused() is None else JOURNAL_BYTES // 16


class Part:
    """One worker's part of all workers' vectors of a dtype, to be combined in place (`combine_slice`) in each round.

    Args:
        part: where it begins and ends.
        block, progress, base: the values under way, the count of steps, and how many blocks others have before these.
    """

    def __init__(
        self, vectors: Sequence[Array], part: tuple[int, int], *, block: Array, progress: Array, base: int = 0
    ) -> None:
        self._vectors, self._part, self._block, self._progress, self._base = vectors, part, block, progress, base
        self._fused = _fused() if block.dtype.name in {"float32", "float64"} else None
        self._addresses = np.array([vector.ctypes.data for vector in vectors], np.uint64)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return -(-(self._part[1] - self._part[0]) // self._block.size)

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Combine it, from where `progress` stands; compiled where it can be."""
        part, block, progress, base = self._part, self._block, self._progress, self._base
        if self._fused is None or op not in {"sum", "mean"}:
            combine_slice(op, self._vectors, weights, part, block=block, progress=progress, base=base)
            return
        weights = evened(weights) if op == "mean" else [1.0] * len(weights)
        total = sum(weights) if op == "mean" else 1.0
        self._fused.combine_slice(self._addresses, weights, total, part, block=block, progress=progress, base=base)


def warm_up(dtypes: Sequence[str]) -> None:
    """Compile or load the kernels now, so that the first round is as fast as the rest."""
    for dtype in dtypes:
        vector, block = np.zeros(1, dtype), np.zeros(1, dtype)
        Part([vector], (0, 1), block=block, progress=np.zeros(1, np.int64)).combine("sum", [1.0])


def _fused() -> Any:
    return compiled("maniple.circle.fused")
