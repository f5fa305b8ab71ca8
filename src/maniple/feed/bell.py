"""A bell: wakes those who wait for a queue to change. A FIFO in shared memory, whose bytes mean nothing.

A ring that is lost costs the waiter its time limit, never the batch: what counts stands in the table.
"""

import os
import select
from contextlib import suppress
from pathlib import Path


class Bell:
    """One bell, seen by one process."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Opened both ways: it opens at once, and stays open when the others are gone.
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def ring(self) -> None:
        """Wake whoever waits, or the next one who will."""
        with suppress(BlockingIOError):  # full of rings that nobody has heard yet
            os.write(self._file, b".")

    def wait(self, timeout_s: float) -> None:
        """Until somebody rings, or the time is over."""
        if self._poll.poll(max(0.0, timeout_s) * 1000):
            with suppress(BlockingIOError):  # another one was quicker
                os.read(self._file, 1 << 16)

    def close(self) -> None:
        """Hear and ring no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
