"""What functions of a pool get: data sets in shared memory, which all see, and objects that each worker has its own of.

The caller keeps `Data` and `Handle`. When they are sent to a worker, they are unpickled there as the array, and as the
worker's own object.
"""

import contextlib
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from maniple.collectives.api import CollectiveCalls
from maniple.collectives.values import is_tensor, written
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.memory.shm import map_file
from maniple.pool.outputs import concatenate, is_integer

LINE = 64  # bytes of a cache line; arrays are aligned to it
_MIN_BYTES = 1 << 16
_GROWTH = 1.25  # spare capacity when data grows, since data that grew once usually grows again


class Data:
    """An array in shared memory, or in a file, made by `pool.data`. It is used like a NumPy array.

    Functions get views of the same memory: evenly spaced rows are not copied, and a value that a worker writes to them
    is seen by all. `kind` is what functions get: an array or a tensor.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        kind: str = "array",
        memory: "DataMemory | None" = None,
        offset: int = 0,
        on_free: Callable[[Path], None],
    ) -> None:
        self._path: Path | None = path  # None once it is freed
        self._dtype, self._shape, self._kind, self._offset = dtype, shape, kind, offset
        self._memory, self._on_free = memory, on_free  # without memory: an existing file, mapped read-only

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements, which cannot change."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * self.dtype.itemsize

    @property
    def capacity(self) -> int:
        """The number of rows that fit without reserving more memory."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        return len(self) if self._memory is None or not row else self._memory.capacity // row

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self._array()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array()[key] = self._cast(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self._array()
        return np.array(array, dtype) if copy or (dtype is not None and np.dtype(dtype) != array.dtype) else array

    def __repr__(self) -> str:
        return f"Data({self.dtype}{list(self.shape)})"

    def __reduce__(self) -> Any:
        dtype = self.dtype if self.dtype.fields else self.dtype.str  # a string pickles faster
        offset = None if self._memory is not None else self._offset
        return _open_data, (str(self._checked_path()), dtype, self.shape, self._kind, offset)

    def set_value(self, value: Any) -> None:
        """Replace all rows by `value`, of any length; reserves memory if necessary."""
        array = self._cast(value)
        if array.ndim != self.ndim or array.shape[1:] != self.shape[1:]:
            raise InvalidArgument(
                f"a value of shape {list(array.shape)} does not fit data of shape {list(self.shape)}: only the length "
                "of axis 0 may change. Make other data of it with pool.data()."
            )
        self.set_length(len(array))
        self._array()[...] = array

    def set_length(self, length: int) -> None:
        """Change the number of rows. Rows that stay keep their values; new rows are undefined."""
        length = operator.index(length)
        if length < 0:
            raise InvalidArgument(f"data cannot have {length} rows. Give 0 or more.")
        if self._memory is None:
            raise InvalidArgument("data in an existing file cannot change its length. Copy it: pool.data(data[:]).")
        self._checked_path()
        shape = (length, *self.shape[1:])
        self._memory.reserve(self.dtype.itemsize * math.prod(shape))
        self._shape = shape

    def free(self) -> None:
        """Release the memory. The data cannot be used any more."""
        if self._path is not None:
            if self._memory is not None:
                self._memory.remove()
            path, self._path = self._path, None
            self._on_free(path)

    def here(self) -> Any:
        """The data as functions get it: an array, or a tensor if it was made from one."""
        return written(self._kind, self._array())

    def _checked_path(self) -> Path:
        if self._path is None:
            raise InvalidArgument("this data was freed, or its pool is closed. Make it again with pool.data().")
        return self._path

    def _array(self) -> Array:
        path = self._checked_path()
        if self._memory is not None:
            return self._memory.view(self.dtype, self.shape)
        return np.memmap(path, self.dtype, "r", self._offset, self.shape)

    def _cast(self, value: Any) -> Array:
        """`value` in the dtype of the data; InvalidArgument if it does not fit.

        Values with a dtype must be safe to cast. Python numbers adopt the dtype, as in NumPy, and may be rounded, but
        not overflow.
        """
        array = np.asarray(value)
        is_python = not hasattr(value, "dtype")
        is_checked_below = is_python and array.dtype.kind == "i" and self.dtype.kind == "u"
        if not is_checked_below and not np.can_cast(array.dtype, self.dtype, "same_kind" if is_python else "safe"):
            raise InvalidArgument(
                f"{array.dtype} values do not fit into data of dtype {self.dtype} without loss. "
                f"Convert them: value.astype({str(self.dtype)!r})."
            )
        with np.errstate(all="ignore"):
            cast = array.astype(self.dtype, copy=False)
        if is_python:
            lost = np.isfinite(array) & ~np.isfinite(cast) if self.dtype.kind in "fc" else array != cast
            if lost.any():
                raise InvalidArgument(
                    f"{array[lost].ravel()[0]} does not fit into data of dtype {self.dtype}{_range(self.dtype)}. Make "
                    "the data with another dtype, or pass values that fit."
                )
        return cast


def share_data(array: Any, path: Path, on_free: Callable[[Path], None]) -> Data:
    """In the caller: a copy of `array` at `path` in shared memory; a memory-mapped array stays in its own file."""
    if isinstance(array, np.memmap) and array.filename is not None and array.mode != "c" and array.flags.c_contiguous:
        mapped = cast(Any, array)
        return Data(Path(mapped.filename), mapped.dtype, mapped.shape, offset=_file_offset(mapped), on_free=on_free)
    kind = "tensor" if is_tensor(array) else "array"
    values = cast(Any, array).detach().cpu().numpy() if kind == "tensor" else np.asarray(array)
    if values.ndim == 0 or values.dtype.hasobject:
        raise InvalidArgument(
            f"a {type(array).__qualname__} of dtype {values.dtype} and {values.ndim} axes cannot be kept as data. "
            "Pass an array of numbers with at least one axis."
        )
    memory = DataMemory(path, is_new=True)
    memory.reserve(values.nbytes)
    memory.view(values.dtype, values.shape)[...] = values
    return Data(path, values.dtype, values.shape, kind=kind, memory=memory, on_free=on_free)


_memories: dict[str, "DataMemory"] = {}  # of this worker, by path


def _open_data(path: str, dtype: Any, shape: tuple[int, ...], kind: str, offset: int | None) -> Any:
    """In a worker: the array or tensor of the caller's data; with `offset`, from an existing file."""
    if offset is not None:
        return np.memmap(path, dtype, "r", offset, shape)
    memory = _memories.get(path) or _memories.setdefault(path, DataMemory(Path(path)))
    return written(kind, memory.view(dtype, shape))


def close_data(path: Path) -> None:
    """In a worker: release the mapping of data that the caller has freed."""
    _memories.pop(str(path), None)


class DataMemory:
    """A file in shared memory that can grow. Arrays over it stay valid, and shared, when it grows."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self._path = path
        self.capacity = 0  # the bytes reserved
        self._mapped = np.empty(0, np.uint8)
        if is_new:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes, keeping the content. Only the process that created the file may call it."""
        if size <= self.capacity:
            return
        self._map(max(_MIN_BYTES, size if not self.capacity else int(size * _GROWTH)))

    def view(self, dtype: str | np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """An array over the bytes; maps the file again if another process has made it grow."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if not size:
            return np.empty(shape, dtype)
        if offset + size > self.capacity:
            self._map()
        return self._mapped[offset : offset + size].view(dtype).reshape(shape)

    def remove(self) -> None:
        """Remove the file; the kernel frees the memory when the last mapping is gone."""
        self._path.unlink(missing_ok=True)
        self._mapped, self.capacity = np.empty(0, np.uint8), 0

    def _map(self, capacity: int = 0) -> None:
        self._mapped = np.frombuffer(map_file(self._path, capacity, what="data of the pool"), np.uint8)
        self.capacity = self._mapped.size


def _range(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "iu":
        return f", which holds {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
    return f", which holds up to {np.finfo(dtype).max:g}" if dtype.kind in "fc" else ""


def _file_offset(array: Any) -> int:
    """Where in its file a memory-mapped array begins; it may be a slice of the mapping."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return int(array.offset) + array.__array_interface__["data"][0] - base.__array_interface__["data"][0]


class Handle:
    """The caller's reference to an object of which each worker has its own. A function receives the object itself.

    Attributes:
        name: pool methods accept it in place of the handle.
        parts: the number of workers that the caller's object is split among; 1 if each worker has a whole one.
    """

    def __init__(self, number: int, name: str, local: Any = None, *, is_factory: bool = False, parts: int = 1) -> None:
        self.number, self.name, self.parts = number, name, parts
        self._local, self._is_factory = local, is_factory

    @property
    def local(self) -> Any:
        """The caller's own object, for `serial` calls; a factory is called at the first use."""
        if self._is_factory:
            self._local, self._is_factory = self._local(), False
        return self._local

    @local.setter
    def local(self, value: Any) -> None:
        self._local, self._is_factory = value, False

    def __repr__(self) -> str:
        return f"Handle({self.name!r})"

    def __reduce__(self) -> Any:
        return find_object, (self.number, self.name)


HandleOrName = Handle | str
OneOrMany = HandleOrName | Sequence[HandleOrName]
object_numbers = itertools.count(1)  # shared by all pools, so that a handle of one pool is unknown in another


class Handles:
    """The handles of one pool, by name."""

    def __init__(self) -> None:
        self._known: dict[str, Handle] = {}

    @contextlib.contextmanager
    def create(self, name: str | None, local: Any, *, is_factory: bool = False, parts: int = 1) -> Generator[Handle]:
        """A new handle, for a block that creates the object in the workers; forgotten if the block fails."""
        number = next(object_numbers)
        name = name if name is not None else f"object-{number}"
        if name in self._known:
            raise InvalidArgument(f"there is an object {name!r} already. Drop it first, or choose another name.")
        self._known[name] = Handle(number, name, local, is_factory=is_factory, parts=parts)
        try:
            yield self._known[name]
        except BaseException:
            del self._known[name]
            raise

    def resolve(self, what: OneOrMany) -> tuple[list[Handle], bool]:
        """The handles that an argument refers to, and whether it is a list; InvalidArgument for duplicates."""
        is_list = isinstance(what, (list, tuple))
        found = [self._find(one) for one in (what if is_list else [what])]
        for i, handle in enumerate(found):
            if handle in found[:i]:
                raise InvalidArgument(f"object {handle.name!r} is given twice in one call. Give each object once.")
        return found, is_list

    def drop(self, handle: Handle) -> None:
        """Forget a handle."""
        del self._known[handle.name]

    def _find(self, what: object) -> Handle:
        if not isinstance(what, (Handle, str)):
            raise InvalidArgument(
                f"a value of type {type(what).__qualname__} names no object of a pool. Pass a handle (of "
                "replicate, scatter or all_gather) or its name, or a list of them."
            )
        name = what.name if isinstance(what, Handle) else what
        if name not in self._known or (isinstance(what, Handle) and self._known[name] is not what):
            known = ", ".join(self._known) or "none"
            raise InvalidArgument(f"there is no object {name!r} in this pool (it has: {known}). Pass one of these.")
        return self._known[name]


_objects: dict[int, Any] = {}  # of this worker, by number


def store_object(number: int, value: Any) -> None:
    """In a worker: store an object or its new value."""
    _objects[number] = assign(_objects.get(number), value)


def find_object(number: int, name: str) -> Any:
    """In a worker: its object of this number."""
    try:
        return _objects[number]
    except KeyError:
        raise InvalidArgument(f"{name!r} was dropped, or never made. Make it with pool.replicate().") from None


def drop_object(number: int) -> None:
    """In a worker: release an object."""
    _objects.pop(number, None)


def assign(old: Any, value: Any) -> Any:
    """The new value of an object. A state dict is loaded into an object that has one, such as a module."""
    if not isinstance(value, Mapping) or not hasattr(old, "load_state_dict"):
        return value
    old.load_state_dict(value)
    return old


def arrays_of(value: Any, name: str) -> Iterator[Any]:
    """The arrays and tensors of an object: an array, nested tuples, lists and dicts of arrays, or a module."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        items = cast(Any, value).values() if isinstance(value, Mapping) else cast(Sequence[Any], value)
        for one in items:
            yield from arrays_of(one, name)
    elif hasattr(value, "state_dict") and hasattr(value, "parameters"):
        yield from (one.data for one in value.state_dict(keep_vars=True).values())
    else:
        raise InvalidArgument(
            f"{name!r} is a {type(value).__qualname__}, which holds no arrays to communicate. Replicate an array, "
            "a module, or a tuple, list or dict of them."
        )


def run_collective(calls: CollectiveCalls, verb: str, number: int, name: str, options: dict[str, Any]) -> None:
    """In all workers at once: broadcast or all_reduce the arrays of an object in place, or all_gather them."""
    value = find_object(number, name)
    arrays = list(arrays_of(value, name))
    if verb == "all_gather":
        if len(arrays) != 1:
            raise InvalidArgument(
                f"{name!r} holds {len(arrays)} arrays, but all_gather takes one. Replicate or scatter each of them "
                "separately, and pass a list of handles."
            )
        store_object(options["into"][number], concatenate(calls.all_gather(arrays[0])))
        return
    for array in arrays:
        if verb == "broadcast":
            calls.broadcast(array, root=options["root"], out=array)
        elif not (hasattr(value, "state_dict") and is_integer(array)):  # a module's counters have no mean
            calls.all_reduce(array, options["op"], out=array)


def is_numpy_compatible(tensor: Any) -> bool:
    """Whether NumPy can view a tensor as an array, and it needs no gradient."""
    is_dense = tensor.layout == sys.modules["torch"].strided and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and not tensor.requires_grad and str(tensor.dtype).removeprefix("torch.") in np.sctypeDict
