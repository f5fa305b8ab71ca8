"""The allowance: how much of the machine's memory the workers and clients of other machines may take for a run.

Whoever has the token may create arrays, and each connection needs room for the values under way. All of that lies in
the run's segment, so the size of that folder is the measure: it counts what local workers have made there, too, and is
still known after the server's process was killed.
"""

import os
import threading
import time
from pathlib import Path

from maniple.errors import SharedMemoryFull

MAX_FILES = 100_000  # arrays, stages, tables of leases and slots of feeds together
_SHARE = 0.9  # of what is free when the server starts: other programs of the machine need some of it
_FRESH_S = 1.0  # what was counted holds for so long; what was granted since then is added


class Allowance:
    """Grants memory in one segment, up to `limit_bytes` and `MAX_FILES` files; by default 90 % of what is free."""

    def __init__(self, segment: Path, limit_bytes: int = 0) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        self._counted, self._bytes, self._files = time.monotonic(), *_size(segment)
        space = os.statvfs(segment)
        self.limit_bytes = limit_bytes or self._bytes + int(_SHARE * space.f_bavail * space.f_frsize)

    def take(self, size_bytes: int, *, files: int = 0) -> None:
        """Grant so many bytes, in so many new files; SharedMemoryFull if that is too much."""
        with self._lock:
            is_much = self._bytes + size_bytes > self.limit_bytes or (files and self._files + files > MAX_FILES)
            if is_much or time.monotonic() - self._counted > _FRESH_S:  # some may be free again
                self._counted, self._bytes, self._files = time.monotonic(), *_size(self._segment)
            if size_bytes and self._bytes + size_bytes > self.limit_bytes:
                raise SharedMemoryFull(
                    f"no room in {self._segment} for {size_bytes / 1e6:,.1f} MB more: the run holds "
                    f"{self._bytes / 1e6:,.1f} MB of the {self.limit_bytes / 1e6:,.1f} MB that it may take for workers "
                    "and clients elsewhere. Remove what fills it, or start the host with a larger --max-memory."
                )
            if files and self._files + files > MAX_FILES:
                raise SharedMemoryFull(
                    f"no more arrays can be made in {self._segment}: it has {self._files:,} files (limit "
                    f"{MAX_FILES:,}). Put several values into one array; close clients."
                )
            self._bytes += size_bytes
            self._files += files


def _size(folder: Path) -> tuple[int, int]:
    """The bytes and files of a folder, and of those in it; what is removed meanwhile does not count."""
    size = files = 0
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return 0, 0
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                inner = _size(Path(entry.path))
                size, files = size + inner[0], files + inner[1]
            else:
                size, files = size + 512 * entry.stat(follow_symlinks=False).st_blocks, files + 1
        except OSError:
            continue
    return size, files
