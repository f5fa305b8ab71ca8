"""What a script logs, as numbers and words."""

import math
from typing import Any


def plain(value: Any) -> Any:
    """A number or word of what was logged: torch and NumPy scalars by their `item`, "nan" and "inf" as words."""
    item = getattr(value, "item", None)
    try:
        value = value if item is None else item()
    except (ValueError, RuntimeError):  # more than one element
        return value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no such number
