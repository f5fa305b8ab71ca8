"""Positions: elements of an array as places in its flat memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument


def crossing(entry: Entry, indices: Sequence[Sequence[int]]) -> Array:
    """The flat positions at the crossing of one list of indices per axis."""
    axes = len(entry.shape)
    if len(indices) != axes:
        raise InvalidArgument(
            f"{len(indices)} lists of indices were given for the {axes} axes of {entry}. Give one each."
        )
    lists = [_inside(entry, axis, np.asarray(one)) for axis, one in enumerate(indices)]
    for axis, one in enumerate(lists):
        if one.ndim != 1:
            raise InvalidArgument(f"the indices of axis {axis} of {entry} are no list: they have {one.ndim} axes.")
    if not lists or 0 in entry.shape:
        return np.zeros([one.size for one in lists], np.int64)
    return np.asarray(np.ravel_multi_index(np.ix_(*lists), entry.shape))


def points(entry: Entry, coordinates: npt.ArrayLike) -> Array:
    """The flat positions of k rows of one index per axis."""
    rows = np.asarray(coordinates)
    if rows.size == 0 and rows.ndim < 2:
        rows = rows.reshape(0, len(entry.shape))
    if rows.ndim != 2 or rows.shape[1] != len(entry.shape):
        raise InvalidArgument(
            f"coordinates of shape {list(rows.shape)} do not fit {entry}: give k rows of {len(entry.shape)} indices."
        )
    if not len(entry.shape):
        return np.zeros(len(rows), np.int64)
    columns = [_inside(entry, axis, rows[:, axis]) for axis in range(rows.shape[1])]
    return np.zeros(0, np.int64) if not len(rows) else np.asarray(np.ravel_multi_index(columns, entry.shape))


def _inside(entry: Entry, axis: int, indices: Array) -> Array:
    """Indices of one axis, counted from its start."""
    size = entry.shape[axis]
    if indices.size == 0:
        return indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise InvalidArgument(f"indices of axis {axis} of {entry} are {indices.dtype}. Give whole numbers.")
    if indices.min() < -size or indices.max() >= size:
        wrong = indices.min() if indices.min() < -size else indices.max()
        raise InvalidArgument(f"index {wrong} lies outside of axis {axis} of {entry}, which has {size} elements.")
    whole = indices.astype(np.int64)  # before the sum, which a short dtype cannot hold
    return np.where(whole < 0, whole + size, whole)
