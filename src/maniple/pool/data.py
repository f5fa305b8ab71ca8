"""Data: an array in shared memory that the caller and all workers see."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from maniple.circle.values import is_tensor
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.pool.memory import Memory


class Data:
    """An array in shared memory, or in a file, made by `pool.data`. It is used like a NumPy array.

    What a function gets of it are views of the same memory: evenly spaced rows are not copied, so what a worker writes
    there, all see.
    """

    def __init__(self, told: "Told", memory: Memory | None, forget: Callable[[Path], None]) -> None:
        self._told, self._memory, self._forget = told, memory, forget

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        return self._told.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """What its elements are; it stays."""
        return self._told.dtype

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.size * self.dtype.itemsize

    @property
    def capacity(self) -> int:
        """How many rows there is room for without taking more memory."""
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        return len(self) if self._memory is None or not row else self._memory.capacity // row

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self._array()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array()[key] = self._fitted(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self._array()
        return np.array(array, dtype) if copy or (dtype is not None and np.dtype(dtype) != array.dtype) else array

    def __repr__(self) -> str:
        return f"Data({self.dtype}{list(self.shape)})"

    def __reduce__(self) -> Any:
        self._array()  # refuses what is freed
        return _seen, self._told.plainly()

    def set_value(self, value: Any) -> None:
        """Become `value`, of any length; memory is taken if there is too little."""
        array = self._fitted(value)
        if array.ndim != self.ndim or array.shape[1:] != self.shape[1:]:
            raise InvalidArgument(
                f"a value of shape {list(array.shape)} does not fit data of shape {list(self.shape)}: only the length "
                "of axis 0 may change. Make other data of it with pool.data()."
            )
        self.set_length(len(array))
        self._array()[...] = array

    def set_length(self, length: int) -> None:
        """Have so many rows. Those that stay keep their values; those that come have any."""
        length = operator.index(length)
        if length < 0:
            raise InvalidArgument(f"data cannot have {length} rows. Give 0 or more.")
        if self._memory is None:
            raise InvalidArgument("data in a file of its own cannot change its length. Copy it: pool.data(data[:]).")
        self._array()
        shape = (length, *self.shape[1:])
        self._memory.reserve(self.dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        self._told = self._told.with_shape(shape)

    def free(self) -> None:
        """Give the memory back. The data cannot be used any more."""
        path = self._told.path
        if path is not None:
            if self._memory is not None:
                self._memory.remove()
            self._told = self._told.freed()
            self._forget(path)

    def here(self) -> Any:
        """What a function gets of it: an array, or a tensor if it was made of one."""
        return _tensor(self._array()) if self._told.kind == "tensor" else self._array()

    def _array(self) -> Array:
        if self._told.is_free:
            raise InvalidArgument("this data was freed, or its pool is closed. Make it anew with pool.data().")
        return self._told.seen(self._memory)

    def _fitted(self, value: Any) -> Array:
        """These values in the dtype of the data; InvalidArgument if they do not fit.

        Values with a dtype must be safe to cast. Python's own numbers take the dtype of what they meet, as in NumPy,
        and may be rounded; what is out of its range is refused, alone or in a list.
        """
        array = np.asarray(value)
        is_weak = not hasattr(value, "dtype")
        is_whole = is_weak and array.dtype.kind == "i" and self.dtype.kind == "u"  # whether they fit is seen below
        if not is_whole and not np.can_cast(array.dtype, self.dtype, "same_kind" if is_weak else "safe"):
            raise InvalidArgument(
                f"{array.dtype} values do not fit into data of dtype {self.dtype} without loss. "
                f"Convert them: value.astype({str(self.dtype)!r})."
            )
        with np.errstate(all="ignore"):
            cast = array.astype(self.dtype, copy=False)
        if is_weak:
            lost = np.isfinite(array) & ~np.isfinite(cast) if self.dtype.kind in "fc" else array != cast
            if lost.any():
                raise InvalidArgument(
                    f"{array[lost].ravel()[0]} does not fit into data of dtype {self.dtype}{_range(self.dtype)}. Make "
                    "the data with another dtype, or pass values that fit."
                )
        return cast


def _range(dtype: np.dtype[Any]) -> str:
    """The values that a dtype has room for, in words."""
    if dtype.kind in "iu":
        return f", which holds {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
    return f", which holds up to {np.finfo(dtype).max:g}" if dtype.kind in "fc" else ""


class Told:
    """What a worker is told of data: where it is, and how it is to be seen."""

    def __init__(
        self, path: Path | None, dtype: np.dtype[Any], shape: tuple[int, ...], *, kind: str = "array", offset: int = -1
    ) -> None:
        self.path, self.dtype, self.shape, self.kind, self._offset = path, dtype, shape, kind, offset

    @property
    def is_free(self) -> bool:
        """There is no memory any more."""
        return self.path is None

    def with_shape(self, shape: tuple[int, ...]) -> "Told":
        """The same with another shape."""
        return Told(self.path, self.dtype, shape, kind=self.kind, offset=self._offset)

    def plainly(self) -> tuple[Any, ...]:
        """It as plain values, which travel faster."""
        return str(self.path), self.dtype if self.dtype.fields else self.dtype.str, self.shape, self.kind, self._offset

    def freed(self) -> "Told":
        """The same without memory."""
        return Told(None, self.dtype, self.shape, kind=self.kind)

    def seen(self, memory: Memory | None) -> Array:
        """The array; without memory of the pool it is in a file of its own."""
        if memory is not None:
            return memory.view(self.dtype, self.shape)
        assert self.path is not None
        return np.memmap(self.path, self.dtype, "r", self._offset, self.shape)


def share_data(array: Any, path: Path, forget: Callable[[Path], None]) -> Data:
    """In the caller: data of these values, at `path` in shared memory; `forget` is called when it is freed."""
    if isinstance(array, np.memmap) and _is_in_file(array):
        mapped = cast(Any, array)
        told = Told(Path(mapped.filename), mapped.dtype, mapped.shape, kind="file", offset=_offset(mapped))
        return Data(told, None, forget)
    kind = "tensor" if is_tensor(array) else "array"
    values = cast(Any, array).detach().cpu().numpy() if kind == "tensor" else np.asarray(array)
    if values.ndim == 0 or values.dtype.hasobject:
        raise InvalidArgument(
            f"a {type(array).__qualname__} of dtype {values.dtype} and {values.ndim} axes cannot be kept as data. "
            "Pass an array of numbers with at least one axis."
        )
    memory = Memory(path, is_new=True)
    memory.reserve(values.nbytes)
    memory.view(values.dtype, values.shape)[...] = values
    return Data(Told(path, values.dtype, values.shape, kind=kind), memory, forget)


def _is_in_file(array: Any) -> bool:
    """A mapped array is what its file has; of mode c it may differ."""
    return array.filename is not None and array.mode != "c" and array.flags.c_contiguous


def _offset(array: Any) -> int:
    """Where in its file a mapped array begins, which may be a part of what was mapped."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return int(array.offset) + array.__array_interface__["data"][0] - base.__array_interface__["data"][0]


_memories: dict[str, Memory] = {}  # of this worker


def _seen(path: str, dtype: Any, shape: tuple[int, ...], kind: str, offset: int) -> Any:
    """In a worker: the data that the caller has passed."""
    if kind == "file":
        return Told(Path(path), np.dtype(dtype), shape, offset=offset).seen(None)
    memory = _memories.get(path) or _memories.setdefault(path, Memory(Path(path)))
    array = memory.view(dtype, shape)
    return _tensor(array) if kind == "tensor" else array


def _tensor(array: Array) -> Any:
    from maniple.circle import tensors

    return tensors.made(array, "tensor")


def forget_data(path: Path) -> None:
    """In a worker: data was freed."""
    _memories.pop(str(path), None)
