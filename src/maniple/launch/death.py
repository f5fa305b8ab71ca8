"""The death of a process, in words."""

import os
import signal
from contextlib import suppress
from pathlib import Path

_LAST_LINES, _LAST_BYTES = 20, 1 << 16


def killed_by(exit_code: int) -> str:
    """The signal that has ended it; "" if none has.

    Shells, ssh and a worker that follows SIGTERM give 128 + the signal's number as their exit code.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in signal.Signals.__members__.values():
        return signal.Signals(number).name
    return f"signal {number}" if exit_code < 0 else ""


def reason(exit_code: int) -> str:
    """How it ended."""
    if name := killed_by(exit_code):
        return f"was killed by {name}" + (f" (exit code {exit_code})" if exit_code > 0 else "")
    return f"ended with exit code {exit_code}"


def last_words(log: Path, unwritten: bytes = b"", *, start: int = 0) -> str:
    """What it printed last, after the first `start` bytes, and where the rest is."""
    return f"Its last lines ({short(log)}):\n{last_lines(log, unwritten, start=start)}"


def last_lines(log: Path, unwritten: bytes = b"", *, start: int = 0) -> str:
    """What it printed last, after the first `start` bytes; `unwritten` is what a full disk has kept from its log."""
    end = b""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LAST_BYTES))  # logs of long runs may be huge
        end = file.read()
    lines = (end + unwritten).decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join("    " + line for line in lines)


def short(path: Path) -> str:
    """A path as seen from here."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
