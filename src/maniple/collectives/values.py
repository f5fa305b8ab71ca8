"""Values of a script's calls (array, number or tensor) as NumPy arrays, and in half precision as they travel."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from maniple.collectives.call import check_values
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.layout import dtype_name
from maniple.wire.codecs import get_codec


@dataclass(frozen=True, slots=True)
class CallValues:
    """A script's `x` as an array."""

    array: Array
    kind: str  # array, number, tensor or bfloat16
    close: Callable[[Array], Any]  # converts a result to the type of x

    def flat(self, *, is_mean: bool = False) -> Array:
        """A flat copy; for the mean of integers, in float64."""
        is_whole = self.array.dtype.kind in "iu"
        return np.array(self.array, np.float64 if is_mean and is_whole else None, order="C", copy=True).reshape(-1)


def read(x: Any) -> CallValues:
    """`x` as an array; InvalidArgument if it is of a type or dtype that cannot be sent."""
    if is_tensor(x):
        from maniple.collectives import torch_tensors as tensors

        values = CallValues(*tensors.read(x))
    elif isinstance(x, np.ndarray):
        values = CallValues(cast(Array, x), "array", lambda array: array)
    elif isinstance(x, np.generic):
        values = CallValues(np.asarray(x), "number", lambda array: array[()])
    elif isinstance(x, (int, float, complex)) and not isinstance(x, bool):
        values = CallValues(np.asarray(x), "number", lambda array: array.item())
    else:
        raise InvalidArgument(
            f"a {type(x).__module__}.{type(x).__qualname__} cannot be sent. "
            "Pass a NumPy array, a number or a torch tensor."
        )
    check_values(str(values.array.dtype), "float32")
    return values


def written(kind: str, array: Array) -> Any:
    """Convert an array to a kind, where there is no `x` to take it from."""
    if kind in {"tensor", "bfloat16"}:
        from maniple.collectives import torch_tensors as tensors

        return tensors.made(array, kind)
    return array


def check_out(out: Any, values: CallValues, dtype: np.dtype[Any]) -> None:
    """Raise InvalidArgument if a result cannot be written to `out`."""
    if out is None:
        return
    is_bfloat16 = values.kind == "bfloat16"
    expected = "bfloat16" if is_bfloat16 else str(dtype)
    if is_tensor(out) is not (values.kind in {"tensor", "bfloat16"}) or not hasattr(out, "shape"):
        raise InvalidArgument(f"out is a {type(out).__qualname__}, but x is of another type. Pass one like x.")
    found = dtype_name(out)
    if tuple(out.shape) != values.array.shape or found != expected:
        raise InvalidArgument(
            f"out is {found}{list(out.shape)}, but the result is {expected}{list(values.array.shape)}. "
            "Pass one of the same shape and dtype, or leave it out."
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InvalidArgument("out is read-only, and cannot take the result. Pass a copy, or leave it out.")


def write(out: Any, array: Array) -> Any:
    """Copy a result to `out`, and return it."""
    if is_tensor(out):
        out.detach().copy_(written("tensor", array))
    else:
        np.copyto(out, array)
    return out


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor; one can only exist where torch was imported already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def is_packed(values: Array, wire: str) -> bool:
    """Whether values are compressed: floating-point ones of more than half precision, if `wire` asks for it."""
    return wire != "float32" and values.dtype in {np.dtype(np.float32), np.dtype(np.float64)}


def empty_packed(size: int, dtype: str, wire: str) -> Array:
    """Memory for `size` values of `dtype` as they travel."""
    return np.empty(size, np.uint16 if is_packed(np.empty(0, dtype), wire) else dtype)


def packed(values: Array, wire: str) -> Array:
    """The values as they travel."""
    if not is_packed(values, wire):
        return values
    halves = np.empty(values.size, np.uint16)
    get_codec(wire).pack(values, halves.view(np.uint8))
    return halves


def opened(received: Array, dtype: str, wire: str) -> Array:
    """The inverse of `packed`."""
    if received.dtype == dtype:
        return received
    values = np.empty(received.size, dtype)
    get_codec(wire).unpack(received.view(np.uint8), values)
    return values


def rounded(values: Array, wire: str) -> Array:
    """The values as they arrive, where nothing travels: in shared memory."""
    return opened(packed(values, wire), str(values.dtype), wire)
