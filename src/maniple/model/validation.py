"""Validation: each worker looks at its part of the data, and the means over all parts are put together.

None waits for it: each tells the controller what it has found, and who comes last gets the means over all. Only where
another launcher has started the workers, and there is no controller, do they meet for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from maniple.decisions import combined
from maniple.errors import InvalidArgument
from maniple.model.contract import Model
from maniple.worker import Worker

VALIDATION = ("loss", "top1_error", "top5_error")
TRAINING = ("loss", "error")
_SAMPLES = "samples"

Means = dict[str, float]


def measured(result: Any, names: Sequence[str], method: str) -> dict[str, Any]:
    """What a method has given, by names: a dict as it is, a number or a tuple of them by their places."""
    if isinstance(result, Mapping):
        found = dict(cast(Mapping[str, Any], result))
    elif isinstance(result, tuple | list):
        found = dict(zip(names, cast(Sequence[Any], result), strict=False))
    else:
        found = {names[0]: result}
    if any(value is None for value in found.values()) or "loss" not in found:
        raise InvalidArgument(
            f"{method} has given {result!r}, where a loss is needed. Return the loss, {' and '.join(names)} as a "
            "tuple, or a dict of numbers that has `loss`."
        )
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in found.items()}


def validate(model: Model, recorder: Any, counts: Iterable[int]) -> tuple[Means, float, int]:
    """The means over the validation batches `counts`, the number of their samples, and their own number."""
    usual = float(getattr(model.data, "batch_size", 1))
    parts: list[tuple[Means, float]] = []
    for count in counts:
        found = measured(model.val_iter(count, recorder), VALIDATION, "val_iter")
        weight = float(found.pop(_SAMPLES, usual))
        parts.append(({name: float(value) for name, value in found.items()}, weight))
    return combined(parts), sum(weight for _, weight in parts), len(parts)


def together(worker: Worker, means: Means, weight: float) -> Means:
    """The means over all workers, who meet for it."""
    names = sorted(means)
    values = np.array([means[name] for name in names])
    return dict(zip(names, worker.all_reduce(values, op="mean", weight=weight).tolist(), strict=True))


def top_errors(logits: Any, labels: Any, k: int = 5) -> tuple[float, float]:
    """The top-1 and the top-k error: the share of samples whose label is not the first, not among the first k.

    Args:
        logits: a row of scores per sample, NumPy or torch; of equal scores the earlier one stands first.
        labels: the right column of each row.
    """
    scores, right = _array(logits), _array(labels).astype(np.int64).reshape(-1, 1)
    own = np.take_along_axis(scores, right, axis=1)
    is_ahead = ~(scores <= own) | ((scores == own) & (np.arange(scores.shape[1]) < right))  # NaN is never right
    place = is_ahead.sum(axis=1)
    return float(np.mean(place >= 1)), float(np.mean(place >= k))


def _array(values: Any) -> np.ndarray[Any, Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values)
