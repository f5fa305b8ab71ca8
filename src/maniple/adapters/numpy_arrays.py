"""The adapter for a dict of NumPy arrays, which are changed in place."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from maniple.adapters.base import Adapter, Params, choose_parameters, described_array
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import flat_dtype


class NumpyAdapter(Adapter):
    """A dict of NumPy arrays; an array under two names is shared once.

    The dict is looked up in each pass, so `params["w"] = new` works as well as `params["w"] -= step`.
    """

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """A dict in which all values are NumPy arrays."""
        if not isinstance(model, Mapping):
            return False
        return all(isinstance(value, np.ndarray) for value in cast(Mapping[Any, Any], model).values())

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        buffers: bool = True,
        state: Sequence[str] = (),
        params: Params | None = None,
    ) -> None:
        del buffers  # a dict of arrays has none
        if optimizer is not None or state:
            raise InvalidArgument(
                "a dict of arrays has no optimizer to hook, but one was given. "
                "Leave `optimizer` and `state` out, and call replica.step() after each update."
            )
        self._arrays = arrays = cast(Mapping[Any, Any], model)
        chosen = choose_parameters({str(name): value for name, value in arrays.items()}, params)
        self.entries: list[Entry] = []
        self._dtypes: list[tuple[np.dtype[Any], np.dtype[Any]]] = []  # of the array, and in the flat vector
        self._staged: dict[int, Array] = {}
        seen: set[int] = set()
        self._keys: list[Any] = []
        for name, value in arrays.items():
            if str(name) not in chosen:
                continue
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

    def begin(self) -> None:
        """Forget the copies of an interrupted pass."""
        self._staged.clear()

    def array(self, i: int) -> Array:
        """The array's own memory if it is contiguous and of the center's dtype, else a copy."""
        value, dtype = self._value(i), self._dtypes[i][1]
        if value.flags.c_contiguous and value.dtype == dtype:
            return value.reshape(-1)
        self._staged[i] = staged = value.astype(dtype, order="C").reshape(-1)
        return staged

    def commit(self, i: int) -> None:
        """Write a copy back; an array's own memory is up to date."""
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
            f"{entry.name!r} has become {described_array(value)}, but was shared as {entry}. "
            "Keep shape and dtype, and keep it writable, or share a new model."
        )
