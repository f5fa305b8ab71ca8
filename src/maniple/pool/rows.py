"""Rows: which of a data set a call uses, and who takes which of them: a `range`, or an array of indices."""

import operator
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from maniple.circle.values import is_tensor
from maniple.contracts import Array
from maniple.errors import InvalidArgument

Rows = range | Array


def selected(batch: Any, length: int) -> Rows:
    """The rows of a data set of so many that `batch` means: all (None), the first n, a slice, indices, or a mask."""
    if batch is None:
        return range(length)
    if isinstance(batch, slice):
        return range(length)[batch]
    if np.ndim(batch) == 0:
        return range(_first(batch, length))
    indices = np.asarray(batch, np.int64 if batch == [] else None) if isinstance(batch, list) else np.asarray(batch)
    if indices.ndim != 1 or indices.dtype.kind not in "iub" or (indices.dtype.kind == "b" and len(indices) != length):
        raise InvalidArgument(
            f"batch is an array {indices.dtype}{list(indices.shape)}, which selects no rows of {length}. Pass a list "
            "of whole numbers, a mask as long as the data, a slice, or how many of the first."
        )
    if indices.dtype.kind == "b":
        return np.flatnonzero(indices)
    if len(indices) and not -length <= int(indices.min()) <= int(indices.max()) < length:
        wrong = indices.min() if indices.min() < -length else indices.max()
        raise InvalidArgument(f"batch has the row {wrong}, but there are {length} ({-length} to {length - 1}).")
    indices = indices.astype(np.int64)
    return np.where(indices < 0, indices + length, indices)


def bounds(count: int, parts: int) -> list[int]:
    """Where `parts` parts of `count` rows begin, and the end; their sizes differ by at most one."""
    return [count * k // parts for k in range(parts + 1)]


def part(rows: Rows, parts: int, index: int) -> Rows:
    """One of several parts of the rows."""
    ends = bounds(len(rows), parts)
    return rows[ends[index] : ends[index + 1]]


def taken(values: Any, rows: Rows) -> Any:
    """These rows of an array: a view of it where they are evenly spaced, else a copy."""
    if not isinstance(rows, range):
        return _gathered(values, rows)
    if rows == range(len(values)):
        return values
    if rows.step < 0 and not isinstance(values, np.ndarray):  # tensors know no negative steps
        return _gathered(values, np.asarray(rows, np.int64))
    stop = rows.start + len(rows) * rows.step
    return values[rows.start : stop if stop >= 0 else None : rows.step]


def _gathered(values: Any, indices: Array) -> Any:
    if isinstance(values, np.ndarray):
        return cast(Array, values).take(indices, axis=0, mode="clip")  # all are there: they need not be checked again
    if is_tensor(values):  # twice as fast as values[indices]
        return values.index_select(0, sys.modules["torch"].from_numpy(indices).to(values.device))
    return values[indices]


def of_worker(batch: Any, rank: int, world: int) -> Any:
    """What worker `rank` selects, if `batch` has a selection of its own for each worker: a list of slices or lists."""
    if not isinstance(batch, (list, tuple)) or not batch:
        return batch
    each: Sequence[Any] = batch  # pyright: ignore[reportUnknownVariableType]
    if not all(isinstance(one, slice) or np.ndim(one) == 1 for one in each):
        return batch
    if len(each) != world:
        raise InvalidArgument(f"batch_s has selections for {len(each)} workers of {world}. Give one for all, or each.")
    return each[rank]


def _first(batch: Any, length: int) -> int:
    try:
        count = operator.index(batch)
    except TypeError:
        raise InvalidArgument(
            f"batch={batch!r} selects no rows. Pass how many of the first, a slice, or a list of row numbers."
        ) from None
    if not 0 <= count <= length:
        raise InvalidArgument(f"batch={count} rows are asked for, of {length}. Pass 0 to {length}, or a slice.")
    return count
