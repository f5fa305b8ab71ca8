"""Waiting in tests, with a deadline that only guards against a hang."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0  # only against hanging: a busy machine may take 10 s to start one interpreter


def await_(look: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Call `look` until it returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() > deadline  # before the call: a test that the machine held up calls once more
        if seen := look():
            return seen
        assert not is_late, f"not seen within {timeout_s} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """No such process, or a zombie that nobody has reaped yet.

    The main thread becomes a zombie while another thread is still in a system call such as fsync. Until that thread
    ends too, the process keeps its sockets open, and the kernel accepts connections for it.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return len(threads) == 1 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
