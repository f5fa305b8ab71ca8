"""A box: any Python value on its way between the caller and the workers; large arrays lie in shared memory meanwhile.

    bytes   count, size of each large array and whether it passes by | the pickled rest
    memory  [ large array | large array | ... ]

Functions travel by value, with what they refer to, so they may be defined in a script, a notebook or a test.
"""

import io
import pickle
import struct
import sys
import types
from collections.abc import Sequence
from typing import Any, cast

import cloudpickle
import numpy as np

from maniple.circle.values import is_tensor
from maniple.contracts import Array
from maniple.pool.memory import Memory

_LARGE = 1 << 14
LINE = 64  # bytes of a cache line, where arrays begin
_NUMBERS = "biufc"
_COUNT = struct.Struct("<Q")


def pack(value: Any, memory: Memory, passing: Sequence[Any] = ()) -> bytes:
    """`value` as bytes, and its large arrays in `memory`, over what the last box had there.

    Arrays that are `passing` by are seen there by who opens the box; others are copied.
    """
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        large.append(raw)
        return False

    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=is_small)
    pickler.passing = {id(array) for array in passing}
    pickler.dump(value)
    memory.reserve(sum(_padded(raw.nbytes) for raw in large))
    offset = 0
    for raw in large:
        memory.view("uint8", (raw.nbytes,), offset)[:] = np.frombuffer(raw, np.uint8)
        offset += _padded(raw.nbytes)
    told = [raw.nbytes << 1 | (id(raw.obj) in pickler.passing) for raw in large]
    return struct.pack(f"<Q{len(told)}Q", len(told), *told) + stream.getbuffer()


def unpack(data: bytes | memoryview, memory: Memory) -> Any:
    """What a box holds. Arrays that pass by are valid until the next box is packed."""
    (count,) = _COUNT.unpack_from(data)
    buffers: list[Any] = []
    offset = 0
    for told in struct.unpack_from(f"<{count}Q", data, _COUNT.size):
        size, is_passing = told >> 1, told & 1
        view = memory.view("uint8", (size,), offset)
        buffers.append(view if is_passing else view.copy())
        offset += _padded(size)
    return pickle.loads(memoryview(data)[_COUNT.size * (1 + count) :], buffers=buffers)


def send_by_value(function: Any) -> None:
    """See to it that a function can be opened by workers, if its module is one that they would not find by its name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module is None or module.__name__ in {"__main__", "__mp_main__"}:
        return
    top = module.__name__.partition(".")[0]
    if not any(finder.find_spec(top, None) for finder in sys.meta_path):  # pytest has such, by --import-mode=importlib
        cloudpickle.register_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    passing: set[int]  # the arrays that pass by: these objects, and not others in the same memory

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and type(obj).__name__ == "Tensor" and is_plain(obj):
            from maniple.circle import tensors

            array = obj.detach().cpu().numpy()
            if id(obj) in self.passing:
                self.passing.add(id(array))
            return tensors.made, (array, "tensor")
        if type(obj) is np.ndarray and obj.size and obj.flags.c_contiguous and obj.dtype.kind in _NUMBERS:
            return _made, (pickle.PickleBuffer(cast(Any, obj)), obj.dtype.str, obj.shape)
        if type(obj) is types.FunctionType and obj.__module__.startswith("maniple."):
            return NotImplemented  # found by its name
        return super().reducer_override(obj)


def _made(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    """An array, told in plain values: they travel faster than an array's own."""
    return np.frombuffer(buffer, dtype).reshape(shape)


def is_plain(tensor: Any) -> bool:
    """It is what NumPy can see as an array, and no part of a graph."""
    is_dense = tensor.layout == sys.modules["torch"].strided and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and not tensor.requires_grad and str(tensor.dtype).removeprefix("torch.") in np.sctypeDict


def _padded(size: int) -> int:
    return size + -size % LINE
