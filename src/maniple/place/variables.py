"""One environment variable: read as what it must be, and named if it is something else."""

from collections.abc import Mapping, Sequence
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


def flag(env: Mapping[str, str], name: str) -> bool:
    """A wish that is there or not."""
    return env.get(name, "").strip().lower() not in {"", "0", "no", "false", "off"}


def choice(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str | None:
    """One of several words; None if it is empty."""
    text = env.get(name) or None
    if text is not None and text not in choices:
        kind = name.removeprefix("MANIPLE_").lower()
        raise InvalidArgument(f"{name}={text!r} is no {kind} (one of {', '.join(choices)}). Unset it.")
    return text
