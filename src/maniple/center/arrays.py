"""Named arrays: each is a center of one parameter, in a file of its own."""

import hashlib
import re
from contextlib import suppress

import msgspec
import numpy as np

from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.contracts import Array, Entry
from maniple.errors import BadFrame, InvalidArgument
from maniple.layout import Layout

_CENTER = re.compile("center-[0-9]{1,4}")
DAMAGED = (InvalidArgument, msgspec.MsgspecError, ValueError, TypeError, IndexError)  # what opening such a file raises
ARRAY_FILE = "array-"
ARRAY = "array:"  # before the name of an array, where a center is named


def array_file(name: str) -> str:
    """The file of a named array, whose name may hold anything."""
    return ARRAY_FILE + hashlib.sha256(name.encode()).hexdigest()[:24]


def center_file(name: str) -> str:
    """The file of a center, or of a named array, as the wire names it."""
    if name.startswith(ARRAY):
        return array_file(name.removeprefix(ARRAY))
    if not _CENTER.fullmatch(name):
        raise BadFrame(f"{name!r} cannot name a center.")
    return name


def array_names(segment: Segment) -> list[str]:
    """The names of all arrays in a segment."""
    names: list[str] = []
    for path in segment.path.glob("array-*"):  # one after the other: there may be more than a process may open
        with suppress(*DAMAGED):
            if (center := Shared.open(segment, path)) is not None:
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
