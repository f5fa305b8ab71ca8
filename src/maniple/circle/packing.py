"""Packing: floating-point values made halves for their way, if that was asked for."""

import numpy as np

from maniple.contracts import Array
from maniple.wire.codecs import codec


def is_packed(values: Array, wire: str) -> bool:
    """Values travel as halves: floating-point ones that are larger, if it was asked for."""
    return wire != "float32" and values.dtype in {np.dtype(np.float32), np.dtype(np.float64)}


def room(values: Array, wire: str) -> Array:
    """Room for values like these as they travel."""
    return np.empty(values.size, np.uint16) if is_packed(values, wire) else values


def packed(values: Array, wire: str) -> Array:
    """The values as they travel."""
    if not is_packed(values, wire):
        return values
    halves = np.empty(values.size, np.uint16)
    codec(wire).pack(values, halves.view(np.uint8))
    return halves


def opened(came: Array, dtype: str, wire: str) -> Array:
    """The values that have come."""
    values = came if came.dtype == dtype else np.empty(came.size, dtype)
    if values is not came:
        codec(wire).unpack(came.view(np.uint8), values)
    return values
