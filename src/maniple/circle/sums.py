"""Sums: arrays of all workers put together in the order of their ranks, block by block."""

from collections.abc import Sequence

import numpy as np

from maniple.contracts import Array

_BLOCK = 1 << 16  # values; what is added up and then divided stays in the cache
_FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def evened(weights: Sequence[float]) -> list[float]:
    """Weights that are all alike count 1 each, so that nothing is multiplied in vain; 0 stays 0."""
    used = {weight for weight in weights if weight}
    return [1.0 if weight else 0.0 for weight in weights] if len(used) == 1 else list(weights)


def combine(op: str, pieces: Sequence[Array], weights: Sequence[float], out: Array) -> None:
    """Set `out`, which may be one of the pieces, to what `op` makes of them; the other pieces are used up.

    A mean is sum(w x) / sum(w); a piece of weight 0 is left out of it, whatever it holds.
    """
    if op != "mean":
        weights = [1.0] * len(pieces)
    weights = evened(weights)
    used = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
    for start in range(0, out.size, _BLOCK):
        blocks = [(piece[start : start + _BLOCK], weight) for piece, weight in used]
        target = out[start : start + _BLOCK]
        _fold(op, blocks, target)
        if op == "mean":
            np.divide(target, target.dtype.type(sum(weights)), out=target)


def _fold(op: str, blocks: Sequence[tuple[Array, float]], out: Array) -> None:
    for block, weight in blocks:
        if weight != 1.0:
            np.multiply(block, block.dtype.type(weight), out=block)
    total = blocks[0][0]
    for block, _ in blocks[1:-1]:
        _FOLDS[op](total, block, out=total)
    if len(blocks) > 1:
        _FOLDS[op](total, blocks[-1][0], out=out)
    elif total is not out:
        np.copyto(out, total)
