"""A finding: what was seen, the limit or the other side's value, what to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from maniple.doctor.case import Case

OK, WARNING, GRAVE = "ok", "warning", "grave"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. What is grave keeps a run from working, a warning makes it slow or unsafe."""

    level: str
    seen: str
    limit: str = ""
    fix: str = ""
    check: str = ""  # the name of the check that found it

    def __str__(self) -> str:
        limit = f" ({self.limit})" if self.limit else ""
        text = f"{self.seen}{limit}." + (f" {self.fix}" if self.fix else "")
        return " ".join(text.split())  # one line, whatever other programs have said


def fine(seen: str) -> Finding:
    """Nothing is wrong."""
    return Finding(OK, seen)


def warning(seen: str, *, limit: str, fix: str) -> Finding:
    """It works, but slowly, unsafely or not for long."""
    return Finding(WARNING, seen, limit, fix)


def grave(seen: str, *, limit: str, fix: str) -> Finding:
    """It cannot work."""
    return Finding(GRAVE, seen, limit, fix)


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: by which docs/doctor.md explains it.
        of: what must be asked for: "machine", "host", "run", "slurm", "ray" or "hosts".
        look: gives what it finds; an error of ours that it raises is a grave finding.
        is_quick: it takes a few milliseconds, so launchers look too.
    """

    name: str
    of: str
    look: Callable[[Case], Iterable[Finding]]
    is_quick: bool = False
