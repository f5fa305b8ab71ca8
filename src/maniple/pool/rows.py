"""Rows: which of a data set a call uses, and who takes which of them: a `range`, or an array of indices."""

import operator
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from maniple.circle.values import is_tensor
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.pool.box import LINE, is_plain
from maniple.rules.kernels import compiled

Rows = range | Array
_MANY = 1 << 24  # bytes


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
    least, most = (int(indices.min()), int(indices.max())) if len(indices) else (0, -1)
    if not -length <= least <= most + 1 <= length:
        wrong = least if least < -length else most
        raise InvalidArgument(f"batch has the row {wrong}, but there are {length} ({-length} to {length - 1}).")
    indices = np.ascontiguousarray(indices, np.int64)
    return np.where(indices < 0, indices + length, indices) if least < 0 else indices


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
        array = cast(Array, values)
        if _is_streaming(array, len(indices)) and (streams := compiled("maniple.pool.streams")) is not None:
            return streams.take(array, indices)
        return array.take(indices, axis=0, mode="clip")  # all are there: they need not be checked again
    if is_tensor(values):
        torch = sys.modules["torch"]
        if values.device.type == "cpu" and is_plain(values) and _is_streaming(values.numpy(), len(indices)):
            return torch.from_numpy(_gathered(values.numpy(), indices))
        return values.index_select(0, torch.from_numpy(indices).to(values.device))  # faster than values[indices]
    return values[indices]


def _is_streaming(array: Array, count: int) -> bool:
    """They are more than a cache holds, and lie there so that they can be taken line by line."""
    size = array.nbytes // max(1, len(array))
    return size * count >= _MANY and size % LINE == 0 and array.flags.c_contiguous and not array.dtype.hasobject


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


def in_parts(batch: Any, length: int, parts: int) -> Rows:
    """The rows of a set of so many that `batch` selects in each of its parts."""
    each: list[Array] = []
    for k in range(parts):
        rows = part(range(length), parts, k)
        of_part = selected(of_worker(batch, k, parts), len(rows))
        each.append(np.asarray(rows, np.int64)[np.asarray(of_part, np.int64)])
    return np.concatenate(each)


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
