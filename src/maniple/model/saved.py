"""Models that were saved: validated again, and on the way from one to another."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maniple.adapters import adapt
from maniple.center.tensors import read_arrays
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.model.contract import Model, shareable
from maniple.model.validation import Means, validate

Values = dict[str, Array]


class Saved:
    """A model that can be set to what was saved of it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._adapter = adapt(shareable(model.params))

    def read(self, path: Path) -> Values:
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

    def errors(self, values: Values, recorder: Any = None) -> Means:
        """What validation finds with these parameters."""
        self._set(values)
        return validate(self._model, recorder, range(self._model.data.n_batch_val))[0]

    def between(self, one: Values, other: Values, steps: int) -> Iterator[tuple[float, Means]]:
        """What validation finds on the straight line from one model to the other, at `steps` points."""
        for share in np.linspace(0.0, 1.0, steps).tolist():
            mixed = {entry.name: _mixed(one[entry.name], other[entry.name], share) for entry in self._adapter.entries}
            yield share, self.errors(mixed)

    def _set(self, values: Values) -> None:
        adapter = self._adapter
        adapter.begin()
        dtypes = [dtype for dtype, _, _ in Layout(adapter.entries).places]
        for i, entry in enumerate(adapter.entries):
            adapter.array(i)[:] = values[entry.name].reshape(-1).astype(dtypes[i], copy=False)
            adapter.commit(i)


def validate_again(model: Model, paths: Sequence[Path], other: Path | None, steps: int) -> None:
    """Print what validation finds for each of the saved models; with `other`, on the way from the first to it."""
    if not model.data.n_batch_val:
        raise InvalidArgument(
            f"{type(model).__name__} has data.n_batch_val = 0, so nothing can be validated. Give it validation data."
        )
    saved = Saved(model)
    if other is None:
        for path in paths:
            _show(str(path), saved.errors(saved.read(path)))
        return
    if steps < 2 or len(paths) != 1:
        raise InvalidArgument(
            f"--with takes one --validate (given: {len(paths)}) and 2 --steps or more (given: {steps}). "
            "Write --validate A --with B --steps 5."
        )
    print(f"from {paths[0]} (0) to {other} (1):")
    for share, means in saved.between(saved.read(paths[0]), saved.read(other), steps):
        _show(f"{share:.3g}", means)


def _mixed(one: Array, other: Array, share: float) -> Array:
    return one if share == 0 else other if share == 1 else (1 - share) * one + share * other


def _show(what: str, means: Means) -> None:
    print(f"{what}: {', '.join(f'{name} {value:.6g}' for name, value in means.items())}", flush=True)
