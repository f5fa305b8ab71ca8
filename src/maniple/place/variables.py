"""One environment variable: read as what it must be, and named if it is something else."""

from collections.abc import Mapping
from pathlib import Path

from maniple.errors import InvalidArgument


def path_in(env: Mapping[str, str], name: str) -> Path | None:
    """The path that a variable holds; None if it is empty."""
    text = env.get(name)
    return Path(text) if text else None


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """The seconds that a variable holds."""
    text = env.get(name, str(default))
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is no number of seconds. Unset it or give it one.") from None


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """The whole number that a variable holds."""
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not a whole number. Unset it or give it one.") from None
