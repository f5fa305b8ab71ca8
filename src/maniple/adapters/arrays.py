"""A dict of NumPy arrays as a model. The arrays are changed in place."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import flat_dtype


class Arrays:
    """A dict of NumPy arrays; one that stands under two names is counted once.

    The dict is looked up anew in each pass, so `params["w"] = new` works as well as `params["w"] -= step`.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.entries: list[Entry] = []
        self._dtypes: list[tuple[np.dtype[Any], np.dtype[Any]]] = []  # here, and in the flat vector
        self._staged: dict[int, Array] = {}
        seen: set[int] = set()
        self._keys: list[Any] = []
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray):
                raise InvalidArgument(
                    f"{name!r} is a {type(value).__name__}, but a model given as a dict holds NumPy arrays, "
                    "which can be changed in place. Write np.array(...) around it."
                )
            if id(value) not in seen:
                seen.add(id(value))
                entry = Entry(str(name), value.shape, str(value.dtype))
                self.entries.append(entry)
                self._keys.append(name)
                self._dtypes.append((value.dtype, np.dtype(flat_dtype(entry))))

    def on_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """There is no optimizer: the loop calls replica.step() itself."""
        del act
        return lambda: None

    def begin(self) -> None:
        """Forget what a pass that was cut short has left."""
        self._staged.clear()

    def array(self, i: int) -> Array:
        """The array's own memory if it is contiguous and of the center's dtype, else a copy."""
        value, dtype = self._value(i), self._dtypes[i][1]
        if value.flags.c_contiguous and value.dtype == dtype:
            return value.reshape(-1)
        self._staged[i] = staged = value.astype(dtype, order="C").reshape(-1)
        return staged

    def commit(self, i: int) -> None:
        """Write a copy back; an array's own memory is up to date already."""
        if (staged := self._staged.pop(i, None)) is not None:
            value = self._value(i)
            value[...] = staged.reshape(value.shape)

    def _value(self, i: int) -> Array:
        entry = self.entries[i]
        value = self._arrays.get(self._keys[i])
        if (
            isinstance(value, np.ndarray)
            and value.shape == entry.shape
            and value.dtype == self._dtypes[i][0]
            and value.flags.writeable
        ):
            return value
        raise InvalidArgument(
            f"{entry.name!r} has become {_described(value)}, but was shared as {entry}. "
            "Keep shape and dtype, and keep it writable, or share a new model."
        )


def _described(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return "nothing" if value is None else f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}{'' if value.flags.writeable else ', read-only'}"
