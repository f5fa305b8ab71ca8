"""Changes of a whole model, as remote workers and their mailboxes exchange them, packed by a codec."""

import math
from collections.abc import Mapping

import numpy as np

from maniple.contracts import Array
from maniple.errors import BadFrame
from maniple.layout import Layout
from maniple.peers.mailbox import Vectors
from maniple.wire.codecs import CODECS, Codec, get_codec


def packed_bytes(layout: Layout, codec: str) -> int:
    """The size of a packed change."""
    sizes = layout.sizes.items()
    return sum(_codec(dtype, codec).size_bytes(size, np.dtype(dtype).itemsize) for dtype, size in sizes)


def pack(vectors: Mapping[str, Array], codec: str) -> list[Array]:
    """Convert a change to bytes."""
    packed: list[Array] = []
    for dtype, vector in vectors.items():
        one = _codec(dtype, codec)
        packed.append(np.empty(one.size_bytes(vector.size, vector.itemsize), np.uint8))
        one.pack(vector, packed[-1])
    return packed


def unpack(data: bytearray | Array, layout: Layout, codec: str) -> Vectors:
    """Convert bytes to a change; BadFrame if it is of another size, or not finite."""
    if len(data) != (expected := packed_bytes(layout, codec)):
        raise BadFrame(f"a change of {len(data)} bytes came where {expected} were expected.")
    vectors, rest = layout.allocate(), np.frombuffer(data, np.uint8)
    for dtype, vector in vectors.items():
        one = _codec(dtype, codec)
        size = one.size_bytes(vector.size, vector.itemsize)
        one.unpack(rest[:size].copy(), vector)
        rest = rest[size:]
        if not are_finite(vector):
            raise BadFrame("a change came with values that are not finite.")
    return vectors


def add(to: Vectors, change: Mapping[str, Array]) -> None:
    """Add a change to values."""
    for dtype, vector in change.items():
        to[dtype] += vector


def are_finite(vector: Array) -> bool:
    """Whether all values are finite."""
    with np.errstate(all="ignore"):
        return math.isfinite(vector.sum()) or bool(np.isfinite(vector).all())


def _codec(dtype: str, name: str) -> Codec:
    return get_codec(name) if np.dtype(dtype).kind == "f" else CODECS["float32"]
