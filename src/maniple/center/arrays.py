"""Named arrays: the files that hold them, and flat positions of their elements."""

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt

from maniple.center.shared import ARRAY_FILE, SharedCenter
from maniple.contracts import Array, Entry
from maniple.errors import BadFrame, InvalidArgument
from maniple.layout import Layout
from maniple.memory.segment import Segment

ARRAY = "array:"  # prefix of an array's name where messages name a center
DAMAGED = (InvalidArgument, msgspec.MsgspecError, ValueError, TypeError, IndexError)  # raised for a damaged file
_CENTER = re.compile("center-[0-9]{1,4}")


class GivenValues:
    """A read-only model, from which a center can be created. `value(i)` returns entry i as a flat array."""

    def __init__(self, entries: Sequence[Entry], value: Callable[[int], Array]) -> None:
        self.entries = tuple(entries)
        self._value = value

    def begin(self) -> None:
        """Do nothing: values are read when they are needed."""

    def array(self, i: int) -> Array:
        """Return the value of entry i."""
        return self._value(i)

    def commit(self, i: int) -> None:
        """Do nothing: the values do not change."""

    def flat_vectors(self) -> None:
        """None: the values are separate arrays."""


def single_array(entry: Entry, value: Array) -> GivenValues:
    """A model that consists of one array."""
    dtype = Layout([entry], is_numeric=True).places[0][0]
    return GivenValues([entry], lambda _: np.ascontiguousarray(value, dtype).reshape(-1))


def array_file(name: str) -> str:
    """The file name for a named array: a digest, since the name may contain any character."""
    return ARRAY_FILE + hashlib.sha256(name.encode()).hexdigest()[:24]


def center_file(name: str) -> str:
    """The file name for a center or array as messages name it; BadFrame if the name is invalid."""
    if name.startswith(ARRAY):
        return array_file(name.removeprefix(ARRAY))
    if not _CENTER.fullmatch(name):
        raise BadFrame(f"{name!r} cannot name a center.")
    return name


def array_names(segment: Segment) -> list[str]:
    """The names of all arrays in a segment."""
    names: list[str] = []
    for path in segment.path.glob("array-*"):  # opened one by one: there may be more than a process may open
        with suppress(*DAMAGED):
            if (center := SharedCenter.open(segment, path)) is not None:
                names.append(center.layout.entries[0].name)
                center.close()
    return sorted(names)


def grid_positions(entry: Entry, indices: Sequence[Sequence[int]]) -> Array:
    """Flat positions of the elements `A[np.ix_(*indices)]`: one list of indices per axis."""
    axes = len(entry.shape)
    if len(indices) != axes:
        raise InvalidArgument(
            f"{len(indices)} lists of indices were given for the {axes} axes of {entry}. Give one list per axis."
        )
    lists = [_nonnegative(entry, axis, np.asarray(one)) for axis, one in enumerate(indices)]
    for axis, one in enumerate(lists):
        if one.ndim != 1:
            raise InvalidArgument(f"the indices of axis {axis} of {entry} have {one.ndim} axes. Give a flat list.")
    if not lists or 0 in entry.shape:
        return np.zeros([one.size for one in lists], np.int64)
    return np.asarray(np.ravel_multi_index(np.ix_(*lists), entry.shape))


def point_positions(entry: Entry, coordinates: npt.ArrayLike) -> Array:
    """Flat positions of k elements, given as k rows of one index per axis."""
    rows = np.asarray(coordinates)
    if rows.size == 0 and rows.ndim < 2:
        rows = rows.reshape(0, len(entry.shape))
    if rows.ndim != 2 or rows.shape[1] != len(entry.shape):
        raise InvalidArgument(
            f"coordinates of shape {list(rows.shape)} do not fit {entry}: give k rows of {len(entry.shape)} indices."
        )
    if not len(entry.shape):
        return np.zeros(len(rows), np.int64)
    columns = [_nonnegative(entry, axis, rows[:, axis]) for axis in range(rows.shape[1])]
    return np.zeros(0, np.int64) if not len(rows) else np.asarray(np.ravel_multi_index(columns, entry.shape))


def _nonnegative(entry: Entry, axis: int, indices: Array) -> Array:
    """Check the indices of one axis, and count negative ones from its end."""
    size = entry.shape[axis]
    if indices.size == 0:
        return indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise InvalidArgument(f"indices of axis {axis} of {entry} are {indices.dtype}. Give integers.")
    if indices.min() < -size or indices.max() >= size:
        wrong = indices.min() if indices.min() < -size else indices.max()
        raise InvalidArgument(f"index {wrong} lies outside of axis {axis} of {entry}, which has {size} elements.")
    wide = indices.astype(np.int64)  # a short dtype might not hold the sum
    return np.where(wide < 0, wide + size, wide)
