"""How much shared memory workers and clients elsewhere may fill at a host."""

import contextlib
import os
import threading
import time
from pathlib import Path

from maniple.errors import SharedMemoryFull

MAX_FILES = 100_000  # arrays, staging files, tables of leases and slots of feeds together
_FREE_SHARE = 0.9  # of the memory that is free when the server starts: other programs need some
_FRESH_S = 1.0  # how long a measured size is used; what was granted since then is added


class MemoryQuota:
    """Grants shared memory to remote workers and clients, up to `limit_bytes` (default: 90 % of what is free) and
    `MAX_FILES` files.

    Any client with the token may create arrays, and each connection needs room for values in flight. All of that lies
    in the run's segment, so the size of that folder is the measure. It includes what local workers have created, and
    is still known after the server process was killed.
    """

    def __init__(self, segment: Path, limit_bytes: int = 0) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        self._measure()
        space = os.statvfs(segment)
        self.limit_bytes = limit_bytes or self._bytes + int(_FREE_SHARE * space.f_bavail * space.f_frsize)

    def take(self, size_bytes: int, *, files: int = 0) -> None:
        """Grant memory for new files or for growing ones; SharedMemoryFull if that exceeds the quota."""
        with self._lock:
            is_over = self._bytes + size_bytes > self.limit_bytes or (files and self._files + files > MAX_FILES)
            if is_over or time.monotonic() - self._measured > _FRESH_S:  # some may have been freed
                self._measure()
            if size_bytes and self._bytes + size_bytes > self.limit_bytes:
                raise SharedMemoryFull(
                    f"no room in {self._segment} for {size_bytes / 1e6:,.1f} MB more: the run holds "
                    f"{self._bytes / 1e6:,.1f} MB of the {self.limit_bytes / 1e6:,.1f} MB that it may take for workers "
                    "and clients elsewhere. Remove what fills it, or start the host with a larger --max-memory."
                )
            if files and self._files + files > MAX_FILES:
                raise SharedMemoryFull(
                    f"no more arrays can be created in {self._segment}: it has {self._files:,} files (limit "
                    f"{MAX_FILES:,}). Put several values into one array, or close clients."
                )
            self._bytes += size_bytes
            self._files += files

    def _measure(self) -> None:
        self._measured, self._bytes, self._files = time.monotonic(), *_size(self._segment)


def _size(folder: Path) -> tuple[int, int]:
    """Bytes and number of files in a folder and its subfolders. Files that are being removed may be missed."""
    size = files = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += 512 * os.lstat(f"{where}/{name}").st_blocks
                files += 1
    return size, files
