"""An array that somebody has brought, as a model of one parameter."""

import numpy as np

from maniple.contracts import Array, Entry
from maniple.layout import Layout


class Brought:
    """One named array as a model."""

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
