"""Validation: metrics over all validation data, of which each worker evaluates a part, and of saved models.

No worker waits for another: each reports its part to the controller, and the last one gets the means over all parts.
Workers of another launcher without a controller combine their parts by an all-reduce.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from maniple.adapters import adapt
from maniple.center.snapshot import read_arrays
from maniple.contracts import Array
from maniple.controller import combined
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.model.contract import Model, shareable
from maniple.worker import Worker

VALIDATION_METRICS = ("loss", "top1_error", "top5_error")
TRAINING_METRICS = ("loss", "error")

Means = dict[str, float]


def metrics_of(result: Any, names: Sequence[str], method: str) -> dict[str, Any]:
    """The metrics that a method of the model returned: a dict, or a number or tuple in the order of `names`."""
    if isinstance(result, Mapping):
        metrics = dict(cast(Mapping[str, Any], result))
    elif isinstance(result, tuple | list):
        metrics = dict(zip(names, cast(Sequence[Any], result), strict=False))
    else:
        metrics = {names[0]: result}
    if any(value is None for value in metrics.values()) or "loss" not in metrics:
        raise InvalidArgument(
            f"{method} returned {result!r}, but a loss is required. Return the loss, {' and '.join(names)} as a "
            "tuple, or a dict of numbers that has `loss`."
        )
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}


def validate(model: Model, recorder: Any, counts: Iterable[int]) -> tuple[Means, float, int]:
    """The means over the validation batches `counts`, their number of samples, and how many batches there were."""
    default = float(getattr(model.data, "batch_size", 1))
    parts: list[tuple[Means, float]] = []
    for count in counts:
        metrics = metrics_of(model.val_iter(count, recorder), VALIDATION_METRICS, "val_iter")
        weight = float(metrics.pop("samples", default))
        parts.append(({name: float(value) for name, value in metrics.items()}, weight))
    return combined(parts), sum(weight for _, weight in parts), len(parts)


def all_reduce_means(worker: Worker, means: Means, weight: float) -> Means:
    """The means over all workers, which must all call this."""
    names = sorted(means)
    values = np.array([means[name] for name in names])
    return dict(zip(names, worker.all_reduce(values, op="mean", weight=weight).tolist(), strict=True))


def top_errors(logits: Any, labels: Any, k: int = 5) -> tuple[float, float]:
    """The top-1 and the top-k error: the share of samples whose label is not the first, or not among the first k.

    Args:
        logits: a row of scores per sample, NumPy or torch; of equal scores the earlier one ranks first.
        labels: the right column of each row.
    """
    scores, right = _array(logits), _array(labels).astype(np.int64).reshape(-1, 1)
    own = np.take_along_axis(scores, right, axis=1)
    is_ahead = ~(scores <= own) | ((scores == own) & (np.arange(scores.shape[1]) < right))  # NaN is never right
    place = is_ahead.sum(axis=1)
    return float(np.mean(place >= 1)), float(np.mean(place >= k))


def validate_saved(model: Model, paths: Sequence[Path], other: Path | None, steps: int) -> None:
    """Print the validation metrics of saved models; with `other`, at points on the line from the first to it."""
    if not model.data.n_batch_val:
        raise InvalidArgument(
            f"{type(model).__name__} has data.n_batch_val = 0, so nothing can be validated. Give it validation data."
        )
    saved = SavedModels(model)
    if other is None:
        for path in paths:
            _print_means(str(path), saved.validate(saved.read(path)))
        return
    if steps < 2 or len(paths) != 1:
        raise InvalidArgument(
            f"--with takes one --validate (given: {len(paths)}) and 2 --steps or more (given: {steps}). "
            "Write --validate A --with B --steps 5."
        )
    print(f"from {paths[0]} (0) to {other} (1):")
    for share, means in saved.interpolate(saved.read(paths[0]), saved.read(other), steps):
        _print_means(f"{share:.3g}", means)


class SavedModels:
    """Validates a model with saved parameters."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._adapter = adapt(shareable(model.params))

    def read(self, path: Path) -> dict[str, Array]:
        """The parameters in a snapshot's folder or in a file."""
        file = path / "center-0.safetensors" if path.is_dir() else path
        values = read_arrays(file)
        for entry in self._adapter.entries:
            there = values.get(entry.name)
            if there is None or there.shape != entry.shape:
                what = "nothing" if there is None else f"an array of {list(there.shape)}"
                raise InvalidArgument(
                    f"{file} has {what} for parameter {entry}. Give a snapshot that was made with this class."
                )
        return values

    def validate(self, values: dict[str, Array]) -> Means:
        """The metrics with these parameters."""
        adapter = self._adapter
        adapter.begin()
        dtypes = [dtype for dtype, _, _ in Layout(adapter.entries).places]
        for i, entry in enumerate(adapter.entries):
            adapter.array(i)[:] = values[entry.name].reshape(-1).astype(dtypes[i], copy=False)
            adapter.commit(i)
        return validate(self._model, None, range(self._model.data.n_batch_val))[0]

    def interpolate(self, one: dict[str, Array], other: dict[str, Array], steps: int) -> Iterator[tuple[float, Means]]:
        """The metrics at `steps` points on the straight line between two models, with the share of the other."""
        for share in np.linspace(0.0, 1.0, steps).tolist():
            names = [entry.name for entry in self._adapter.entries]
            yield share, self.validate({name: _mixed(one[name], other[name], share) for name in names})


def _mixed(one: Array, other: Array, share: float) -> Array:
    return one if share == 0 else other if share == 1 else (1 - share) * one + share * other


def _print_means(what: str, means: Means) -> None:
    print(f"{what}: {', '.join(f'{name} {value:.6g}' for name, value in means.items())}", flush=True)


def _array(values: Any) -> np.ndarray[Any, Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values)
