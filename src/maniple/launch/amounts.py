"""Slurm's words for durations and for sizes of memory."""

import re

from maniple.errors import InvalidArgument

_UNITS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def duration_s(text: str) -> float:
    """Slurm's words for a duration: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, infinite."""
    if text.lower() in {"infinite", "unlimited", "n/a", "none"}:
        return float("inf")
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, days if dash else "0"]) or len(parts) > 3:
        raise InvalidArgument(
            f"--walltime {text} is no time for Slurm. Write HOURS:MINUTES:SECONDS, e.g. 3:00:00, DAYS-HOURS or minutes."
        )
    numbers = [int(part) for part in parts]
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def size_mb(text: str) -> int:
    """Slurm's words for memory: 4000, 4000M, 4G."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if found is None:
        raise InvalidArgument(f"--mem {text} is no size for Slurm. Write megabytes, or 16G.")
    return int(int(found[1]) * _UNITS[found[2]])
