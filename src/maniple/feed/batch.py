"""A batch, a list of arrays, as bytes: a small table of dtypes and shapes, then the raw values.

0   8   bytes of the table     (little-endian)
8   ... the table: [[dtype, shape], ...] as MessagePack
    ... each array's values, beginning at a multiple of 64
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from maniple.contracts import Array
from maniple.errors import BadFrame, InvalidArgument

_ALIGN = 64
_HEAD = 8
_KINDS = "biufc"  # what needs no object behind it
_MAX_ARRAYS = 4096
_MOST_PARTS = 256  # the kernel takes 1024 pieces at a time

_decoder = msgspec.msgpack.Decoder(list[tuple[str, tuple[int, ...]]])


@dataclass(frozen=True)
class Batch:
    """Arrays that are about to travel, and where each of them comes to lie."""

    arrays: list[Array]
    head: bytes
    offsets: list[int]
    size_bytes: int

    @classmethod
    def of(cls, values: Sequence[Any]) -> "Batch":
        """The batch of what a producer pushes: arrays, or anything that NumPy can make arrays of."""
        arrays = [_array(i, value) for i, value in enumerate(values)]
        if len(arrays) > _MAX_ARRAYS:
            raise InvalidArgument(f"a batch of {len(arrays)} arrays is too long (limit {_MAX_ARRAYS}). Stack them.")
        table = msgspec.msgpack.encode([(array.dtype.str, array.shape) for array in arrays])
        head = len(table).to_bytes(_HEAD, "little") + table
        offsets, size = _places(len(head), [array.nbytes for array in arrays])
        return cls(arrays, head, offsets, size)

    def write(self, buffer: Array) -> None:
        """Copy all of it into `buffer`, bytes of any origin."""
        buffer[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            if array.size:
                part = buffer[offset : offset + array.nbytes]
                np.copyto(part.view(array.dtype).reshape(array.shape), array)

    def parts(self) -> Iterator[Any]:
        """The same bytes, piece by piece, without a copy where an array lies as it travels."""
        if len(self.arrays) > _MOST_PARTS:
            whole = np.empty(self.size_bytes, np.uint8)
            self.write(whole)
            yield whole
            return
        yield self.head
        at = len(self.head)
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            yield bytes(offset - at)
            if array.size:
                yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at = offset + array.nbytes


def read(buffer: Array) -> list[Array]:
    """The arrays in `buffer`, as views of it."""
    table, offsets, _ = _table(buffer)
    arrays: list[Array] = []
    for (dtype, shape), offset in zip(table, offsets, strict=True):
        kind = np.dtype(dtype)
        part = buffer[offset : offset + math.prod(shape) * kind.itemsize]
        arrays.append(part.view(kind).reshape(shape))
    return arrays


def check(buffer: Array) -> None:
    """Raise BadFrame unless `buffer` holds a batch, and nothing behind it."""
    if (size := _table(buffer)[2]) != buffer.nbytes:
        raise BadFrame(f"a batch of {size} bytes came in {buffer.nbytes}.")


def _table(buffer: Array) -> tuple[list[tuple[str, tuple[int, ...]]], list[int], int]:
    try:
        end = _HEAD + int.from_bytes(buffer[:_HEAD].tobytes(), "little")
        table = _decoder.decode(buffer[_HEAD:end].tobytes())
        sizes = [_size(dtype, shape) for dtype, shape in table]
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError) as error:
        raise BadFrame(f"what came is no batch: {error}") from None
    offsets, size = _places(end, sizes)
    if size > buffer.nbytes:
        raise BadFrame(f"a batch of {size} bytes is announced, and {buffer.nbytes} came.")
    return table, offsets, size


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    kind = np.dtype(dtype)
    is_shape = len(shape) <= 32 and min(shape, default=0) >= 0 and math.prod(max(1, n) for n in shape) < 1 << 56
    if kind.kind not in _KINDS or kind.str != dtype or not is_shape:
        raise ValueError(f"{dtype!r} {shape} is no array of numbers")
    return math.prod(shape) * kind.itemsize


def _places(head_bytes: int, sizes: list[int]) -> tuple[list[int], int]:
    """Where each array begins, and where the last one ends."""
    offsets: list[int] = []
    end = head_bytes
    for size in sizes:
        offsets.append(-(-end // _ALIGN) * _ALIGN)
        end = offsets[-1] + size
    return offsets, end


def _array(i: int, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch: on a GPU, with a gradient, bfloat16
        raise InvalidArgument(
            f"array {i} of the batch, a {type(value).__name__}, cannot be pushed: {error} "
            "Push NumPy arrays, or what NumPy can read: tensor.detach().cpu().float()."
        ) from error
    if array.dtype.kind not in _KINDS:
        raise InvalidArgument(
            f"array {i} of the batch has dtype {array.dtype}, and only numbers and booleans travel. "
            "Encode words and objects as numbers first."
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
