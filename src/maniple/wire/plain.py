"""Plain values: what JSON lacks, in a form that it knows."""

from typing import Any


def plain(value: Any) -> Any:
    """NumPy and torch numbers and arrays as numbers and lists; anything else is an error."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
