"""Values: what a user passes to a call (array, number, tensor) seen as a NumPy array, and a result of the same kind."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from maniple.circle.call import DTYPES
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.layout import dtype_name


@dataclass(frozen=True, slots=True)
class Values:
    """A user's `x`."""

    array: Array
    kind: str  # array, number, tensor or bfloat16
    close: Callable[[Array], Any]  # gives a result as the kind of thing that x is

    def flat(self, *, is_mean: bool = False) -> Array:
        """A flat copy; the mean of whole numbers is a float64."""
        is_whole = self.array.dtype.kind in "iu"
        return np.array(self.array, np.float64 if is_mean and is_whole else None, order="C", copy=True).reshape(-1)


def read(x: Any) -> Values:
    """See `x` as an array."""
    if is_tensor(x):
        from maniple.circle import tensors

        array, kind, close = tensors.read(x)
        values = Values(array, kind, close)
    elif isinstance(x, np.ndarray):
        values = Values(cast(Array, x), "array", lambda array: array)
    elif isinstance(x, np.generic):
        values = Values(np.asarray(x), "number", lambda array: array[()])
    elif isinstance(x, (int, float, complex)) and not isinstance(x, bool):
        values = Values(np.asarray(x), "number", lambda array: array.item())
    else:
        raise InvalidArgument(
            f"a {type(x).__module__}.{type(x).__qualname__} cannot be sent around. "
            "Pass a NumPy array, a number or a torch tensor."
        )
    if str(values.array.dtype) not in DTYPES:
        raise InvalidArgument(
            f"values of dtype {values.array.dtype} cannot be sent around (one of {', '.join(DTYPES)}). Convert them."
        )
    return values


def written(kind: str, array: Array) -> Any:
    """An array as a thing of that kind, where there is no `x` of one's own to tell it."""
    if kind in {"tensor", "bfloat16"}:
        from maniple.circle import tensors

        return tensors.made(array, kind)
    return array


def check_out(out: Any, values: Values, dtype: np.dtype[Any]) -> None:
    """Raise InvalidArgument if a result cannot be written to `out`."""
    if out is None:
        return
    is_bfloat16 = values.kind == "bfloat16"
    expected = "bfloat16" if is_bfloat16 else str(dtype)
    if is_tensor(out) is not (values.kind in {"tensor", "bfloat16"}) or not hasattr(out, "shape"):
        raise InvalidArgument(f"out is a {type(out).__qualname__}, but x is another kind of thing. Pass one like x.")
    found = dtype_name(out)
    if tuple(out.shape) != values.array.shape or found != expected:
        raise InvalidArgument(
            f"out is {found}{list(out.shape)}, but the result is {expected}{list(values.array.shape)}. "
            "Pass one of the same shape and dtype, or leave it out."
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InvalidArgument("out is read-only, and cannot take the result. Pass a copy, or leave it out.")


def write(out: Any, array: Array) -> Any:
    """Copy a result to `out`, and give it back."""
    if is_tensor(out):
        from maniple.circle import tensors

        tensors.write(out, array)
    else:
        np.copyto(out, array)
    return out


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor; one can only exist where torch was imported already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))
