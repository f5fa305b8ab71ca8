"""Text for people: counts, paths relative to the working folder, the end of a log."""

import os
from contextlib import suppress
from pathlib import Path

_LAST_LINES, _LAST_BYTES = 20, 1 << 16


def last_words(log: Path, unwritten: bytes = b"", *, start: int = 0) -> str:
    """The last lines of a log after its first `start` bytes, under a heading that names the file."""
    return f"Its last lines ({short(log)}):\n{last_lines(log, unwritten, start=start)}"


def last_lines(log: Path, unwritten: bytes = b"", *, start: int = 0) -> str:
    """What it printed last, after the first `start` bytes; `unwritten` is what a full disk has kept from its log."""
    lines = (read_end(log, _LAST_BYTES, start=start) + unwritten).decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join("    " + line for line in lines)


def read_end(path: Path, size_bytes: int, *, start: int = 0) -> bytes:
    """The last bytes of a file, which may be huge, but none before byte `start`; b"" if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - size_bytes))
        return file.read()
    return b""


def short(path: Path) -> str:
    """A path relative to the working folder, if it is inside."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def count(number: int, thing: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
