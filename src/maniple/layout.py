"""The layout: where each named array lies in one flat vector per dtype, and the digest of that table.

    entries   w (2, 3) float32 | b (3,) float32 | s (1,) float64
    float32   [w w w w w w b b b]            float64   [s]

Half-precision entries (float16, bfloat16) are float32 in the flat vector: a center that is kept in half
precision would round small contributions away.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from maniple.contracts import Array, Entry, Model
from maniple.errors import InvalidArgument, LayoutMismatch

_FLAT_DTYPE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_COUNTED = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"complex64", "complex128"}
_RESERVED = "__metadata__"  # means something else in files of arrays
_MOST_ELEMENTS = 1 << 48
_MOST_AXES = 32  # as many as HDF5 and every NumPy can have; one more is added for complex numbers in safetensors
_MOST_LETTERS = 4096  # names travel in the headers of messages
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LARGEST = {"float16": np.float32(65504), "bfloat16": np.float32(2.0**127 * (2 - 2.0**-7))}


class Layout:
    """The places of a sequence of entries in flat vectors."""

    def __init__(self, entries: Sequence[Entry], *, is_numeric: bool = False) -> None:
        """With `is_numeric`, whole and complex numbers may be kept too: in named arrays, not in models."""
        self.entries = tuple(entries)
        if not self.entries:
            raise InvalidArgument(
                "the model has no floating-point array to share (0 entries, at least 1 is needed). "
                "Pass the model that is trained, with its parameters already built."
            )
        self.sizes: dict[str, int] = {}
        self.places: list[tuple[str, int, int]] = []
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise InvalidArgument(f"the name {entry.name!r} stands for two arrays. Give each its own name.")
            seen.add(entry.name)
            _check(entry)
            dtype = entry.dtype if is_numeric and entry.dtype in _COUNTED else flat_dtype(entry)
            start = self.sizes.get(dtype, 0)
            self.places.append((dtype, start, start + entry.size))
            self.sizes[dtype] = start + entry.size
        self.table = msgspec.json.encode([(e.name, e.shape, e.dtype) for e in self.entries])
        self.digest = hashlib.sha256(self.table).hexdigest()

    @classmethod
    def from_table(cls, table: bytes) -> "Layout":
        """The layout that another process wrote as `table`."""
        rows = msgspec.json.decode(table, type=list[tuple[str, tuple[int, ...], str]])
        return cls([Entry(*row) for row in rows], is_numeric=True)

    @property
    def size_bytes(self) -> int:
        """The bytes of all flat vectors together."""
        return sum(np.dtype(dtype).itemsize * size for dtype, size in self.sizes.items())

    def allocate(self) -> dict[str, Array]:
        """New flat vectors, one per dtype, of zeros that take no memory until written."""
        return {dtype: np.zeros(size, dtype) for dtype, size in self.sizes.items()}

    def views(self, flat: dict[str, Array]) -> list[Array]:
        """One flat view per entry into the vectors `flat`."""
        return [flat[dtype][start:stop] for dtype, start, stop in self.places]

    def is_half(self, i: int) -> bool:
        """Entry i is kept in half precision by the replicas and in float32 here."""
        return self.entries[i].dtype != self.places[i][0]

    def round(self, i: int, value: Array) -> None:
        """Round the flat `value` of entry i, in place, to what a replica can hold."""
        largest = _LARGEST.get(self.entries[i].dtype)
        if largest is not None:
            np.clip(value, -largest, largest, out=value)  # the nearest that a replica can hold, not infinity
        if self.entries[i].dtype == "float16":
            value[:] = value.astype(np.float16)
        elif self.entries[i].dtype == "bfloat16":
            # The upper 16 bits, to nearest and ties to even; what is not finite stays as it is.
            bits = value.view(np.uint32)
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
            np.copyto(bits, rounded, where=np.isfinite(value))

    def require(self, theirs: "Layout", who: str) -> None:
        """Raise LayoutMismatch, naming the first difference, unless `theirs` is the same table."""
        if self.digest == theirs.digest:
            return
        for i in range(max(len(self.entries), len(theirs.entries))):
            mine = str(self.entries[i]) if i < len(self.entries) else "nothing"
            other = str(theirs.entries[i]) if i < len(theirs.entries) else "nothing"
            if mine != other:
                raise LayoutMismatch(
                    f"this worker's parameter {i} is {mine}, but {who} has {other} there. "
                    "Every worker must build the same model: same names, shapes, dtypes and order. "
                    "Look for sizes that depend on the rank or on the worker's own data."
                )
        raise AssertionError("digests differ but no entry does")


def _check(entry: Entry) -> None:
    """Raise InvalidArgument if no array of this name and shape can be made, saved and read again."""
    if entry.name == _RESERVED or len(entry.name) > _MOST_LETTERS or _CONTROL.search(entry.name):
        letters = f" ({len(entry.name):,} characters)" if len(entry.name) > _MOST_LETTERS else ""
        raise InvalidArgument(
            f"{entry.name[:80]!r}{letters} cannot name an array that is shared: names go into files. They have up to "
            f"{_MOST_LETTERS:,} characters, no control characters, and {_RESERVED!r} is reserved. Rename it."
        )
    axes = [size for size in entry.shape if size]
    # NumPy multiplies the axes that are not empty, even where another one is.
    if min(axes, default=0) < 0 or len(entry.shape) > _MOST_AXES or math.prod(axes) > _MOST_ELEMENTS:
        sizes = [f"{size}" if abs(size) < 1 << 64 else "more than 2**64" for size in entry.shape[: _MOST_AXES + 1]]
        more = ", ..." if len(sizes) < len(entry.shape) else ""
        raise InvalidArgument(
            f"{entry.name!r} cannot be shared: [{', '.join(sizes)}{more}] is no shape of an array. It may have up to "
            f"{_MOST_AXES} axes, none of negative size, and {_MOST_ELEMENTS:,} elements without counting empty axes. "
            "Reshape it."
        )


def fitted(entry: Entry, value: Array, dtype: str) -> Array:
    """`value` in `dtype`, for which `entry` stands, unless its kind of number or one of its values does not fit.

    Infinity and NaN pass: whether they are welcome is for others to say.
    """
    narrow = entry.dtype if entry.dtype == "float16" else dtype  # a center keeps float16 as float32, which holds more
    if np.can_cast(value.dtype, narrow, "safe"):
        return np.ascontiguousarray(value, dtype)
    is_whole = value.dtype.kind in "iu" and np.dtype(dtype).kind in "iu"
    if not is_whole and not np.can_cast(value.dtype, dtype, "same_kind"):
        raise InvalidArgument(f"{value.dtype} values cannot go into {entry} without loss. Convert them first.")
    if is_whole:
        limits = np.iinfo(dtype)
        words = f"{limits.min} to {limits.max}"
        unfit = value[(value < limits.min) | (value > limits.max)]
    else:
        words = f"up to {float(np.finfo(narrow).max):.6g} in size"
        with np.errstate(over="ignore"):
            unfit = value[~np.isfinite(value.astype(narrow)) & np.isfinite(value)]
    if unfit.size:
        raise InvalidArgument(
            f"{unfit.flat[0]} does not fit into {entry}, which holds {words}. Scale the values, or create the array "
            "with a wider dtype."
        )
    return np.ascontiguousarray(value, dtype)


def described(model: Model) -> dict[str, Any]:
    """What is written down of a model that is shared."""
    layout = Layout(model.entries)
    return {"digest": layout.digest, "parameters": len(layout.entries), "bytes": layout.size_bytes}


def dtype_name(array: Any) -> str:
    """The dtype of a NumPy array or a torch tensor by the name that both have."""
    return str(array.dtype).removeprefix("torch.")


def flat_dtype(entry: Entry) -> str:
    """The dtype that `entry` has in the flat vector."""
    try:
        return _FLAT_DTYPE[entry.dtype]
    except KeyError:
        raise InvalidArgument(
            f"{entry} cannot be shared: its dtype is none of {', '.join(_FLAT_DTYPE)}. "
            "Leave it out of the model that you share, or store it as float32."
        ) from None
