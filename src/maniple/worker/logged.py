"""What a script logs, as numbers and words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from maniple.worker.replica import Replica


def logged(values: Mapping[str, Any], replicas: Sequence[Replica]) -> dict[str, Any]:
    """What a script logs, with the step of its first replica; `center`: it is the shared parameters it tells of."""
    row: dict[str, Any] = {"step": replicas[0].steps if replicas else 0}
    row |= {name: plain(value) for name, value in values.items()}
    return row | {"center": True} if any(replica.is_center for replica in replicas) else row


def plain(value: Any) -> Any:
    """A number or word of what was logged: torch and NumPy scalars by their `item`, "nan" and "inf" as words."""
    item = getattr(value, "item", None)
    try:
        value = value if item is None else item()
    except (ValueError, RuntimeError):  # more than one element
        return value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no such number
