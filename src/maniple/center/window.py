"""A window: memory of each rank of an MPI job that all ranks read and write, without the owner's help.

MPI's one-sided calls, in one epoch that lasts as long as the window (passive target). Words that several ranks change
at once are changed by atomic calls only, each word by calls of one kind: `swap`, `add` with `total`, or `set` with
`look`; anything else is read and written by those who hold a lock.

MPI knows no deadlines: who waits in it cannot be called back. So a thread watches, and ends a process that has
waited for too long; the launcher then ends the others.
"""

import math
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from maniple.center.locks import Patience
from maniple.contracts import Array
from maniple.errors import InvalidArgument, say

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise InvalidArgument(
        f"mpi4py and a library of MPI are needed here, and they cannot be used: {error}. "
        "Install the extra: pip install 'maniple[mpi]', and an MPI such as mpich."
    ) from None

WORD = 8  # bytes
_LOOK_S = 1.0


class Watch:
    """Ends this process, with words, when it has waited inside MPI for longer than `deadline_s`."""

    def __init__(self, rank: int, deadline_s: float) -> None:
        self._rank, self._deadline_s = rank, deadline_s
        self._waits: dict[int, tuple[float, str]] = {}
        self._patience = Patience(math.inf, slice_s=2 * _LOOK_S)  # its time stands still while this process is stopped
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maniple-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, what: str) -> Generator[None]:
        """Watch over the calls in a `with` block."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def begin(self, what: str) -> None:
        """This thread is about to wait."""
        self._waits[threading.get_ident()] = self._patience.waited_s, what

    def end(self) -> None:
        """It does not wait any more."""
        self._waits.pop(threading.get_ident(), None)

    def close(self) -> None:
        """Watch no more."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._patience.is_over()
            for since, what in list(self._waits.values()):
                if (waited_s := self._patience.waited_s - since) > self._deadline_s:
                    say(
                        f"worker {self._rank} has waited {waited_s:.0f} s inside MPI for {what} (limit "
                        f"{self._deadline_s:g} s), and ends. Look whether that process is stopped, or raise "
                        "MANIPLE_CIRCLE_DEADLINE."
                    )
                    os._exit(1)


class Window:
    """One window of a job. All ranks make it at once, each with as many bytes as it gives."""

    def __init__(self, comm: Any, size_bytes: int, watch: Watch) -> None:
        self._watch = watch
        self._names = [f"the memory of worker {rank}" for rank in range(comm.size)]
        self._old, self._new, self._was = (np.zeros(1, np.int64) for _ in range(3))
        self._lock = threading.Lock()  # the snapshots' thread and the pulse use windows too
        with watch.over("the others to make a window"):
            self._window = MPI.Win.Allocate(max(WORD, size_bytes), 1, comm=comm)
            own: Any = self._window.tomemory()
            np.frombuffer(own, np.uint8)[:] = 0
            self._window.Lock_all()
            self._window.Sync()
            comm.Barrier()

    def get(self, rank: int, offset: int, into: Array) -> None:
        """Begin to read; `into` is there after `flush`."""
        self._window.Get([into.view(np.uint8), MPI.BYTE], rank, offset)

    def put(self, rank: int, offset: int, value: Array) -> None:
        """Begin to write; it is done, and `value` may be changed, after `flush`."""
        self._window.Put([value.view(np.uint8), MPI.BYTE], rank, offset)

    def flush(self, rank: int) -> None:
        """Wait until all that was begun with `rank` is done."""
        self._watch.begin(self._names[rank])
        self._window.Flush(rank)
        self._watch.end()

    def swap(self, rank: int, offset: int, expected: int, new: int) -> int:
        """Set a word to `new` if it is `expected`; gives what it was."""
        with self._lock:
            self._old[0], self._new[0] = expected, new
            self._window.Compare_and_swap(self._new, self._old, self._was, rank, offset)
            self.flush(rank)
            return int(self._was[0])

    def add(self, rank: int, offset: int, number: int) -> int:
        """Add to a word; gives what it was."""
        return self._fetch(rank, offset, number, MPI.SUM)

    def total(self, rank: int, offset: int) -> int:
        """A word that is added to."""
        return self._fetch(rank, offset, 0, MPI.NO_OP)

    def set(self, rank: int, offset: int, words: Array) -> None:
        """Write words that others may look at meanwhile, each as a whole."""
        self._window.Accumulate(words, rank, offset, op=MPI.REPLACE)
        self.flush(rank)

    def look(self, rank: int, offset: int, into: Array) -> None:
        """Read words that others may set meanwhile."""
        self._window.Get_accumulate(np.zeros_like(into), into, rank, offset, op=MPI.NO_OP)
        self.flush(rank)

    def free(self) -> None:
        """Let it go: all ranks do so at once."""
        with self._watch.over("the others to let a window go"):
            self._window.Unlock_all()
            self._window.Free()

    def _fetch(self, rank: int, offset: int, number: int, op: Any) -> int:
        with self._lock:
            self._new[0] = number
            self._window.Fetch_and_op(self._new, self._was, rank, offset, op)
            self.flush(rank)
            return int(self._was[0])
