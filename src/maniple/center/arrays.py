"""Named arrays: each is a center of one parameter, in a file of its own."""

import hashlib
import re

import numpy as np

from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.contracts import Array, Entry
from maniple.errors import BadFrame
from maniple.layout import Layout

_CENTER = re.compile("center-[0-9]{1,4}")
ARRAY = "array:"  # before the name of an array, where a center is named


def array_file(name: str) -> str:
    """The file of a named array, whose name may hold anything."""
    return "array-" + hashlib.sha256(name.encode()).hexdigest()[:24]


def center_file(name: str) -> str:
    """The file of a center, or of a named array, as the wire names it."""
    if name.startswith(ARRAY):
        return array_file(name.removeprefix(ARRAY))
    if not _CENTER.fullmatch(name):
        raise BadFrame(f"{name!r} cannot name a center.")
    return name


def array_names(segment: Segment) -> list[str]:
    """The names of all arrays in a segment."""
    opened = [Shared.open(segment, path) for path in segment.path.glob("array-*")]
    names: list[str] = []
    for center in filter(None, opened):
        names.append(center.layout.entries[0].name)
        center.close()
    return sorted(names)


class Brought:
    """An array that somebody has brought, as a model."""

    def __init__(self, entry: Entry, value: Array) -> None:
        self.layout = Layout([entry], is_numeric=True)
        self.entries = self.layout.entries
        self._dtype = self.layout.places[0][0]
        self._value = value

    def begin(self) -> None:
        """Nothing to bring: it is here."""

    def array(self, i: int) -> Array:
        """Its value, flat."""
        del i
        return np.ascontiguousarray(self._value, self._dtype).reshape(-1)

    def commit(self, i: int) -> None:
        """It is only read."""
        del i
