"""Named arrays: each is a center of one parameter, in a file of its own."""

import hashlib

import numpy as np

from maniple.contracts import Array, Entry
from maniple.layout import Layout

ARRAY = "array:"  # before the name of an array, where a center is named


def array_file(name: str) -> str:
    """The file of a named array, whose name may hold anything."""
    return "array-" + hashlib.sha256(name.encode()).hexdigest()[:24]


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
