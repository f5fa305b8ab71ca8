"""The job: the ranks that one launcher of MPI has started, and the ledger in which they tell of themselves.

The ledger is a window. Rank 0 has one row per rank, which that rank writes and all may read:

    state    present, left, failed or gone    met      how often it came to a meeting
    beat     grows while its process lives    batches, samples    made so far
    saved    of rank 0: it is all over, and the center on the disk
    process, started    its process    since    when it took its machine's lock, in milliseconds

Rank 0 has the cursors of samplers besides, and each rank a lock for those of its machine. Nothing here waits for a
rank that has failed, and a rank that is not heard of any more is named.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from maniple.center.locks import Patience, explain_holder, process_state, this_process
from maniple.center.window import MPI, WORD, Watch, Window
from maniple.contracts import Array
from maniple.errors import InvalidArgument, ManipleError, PeerLost, WaitedTooLong, raise_remote

PRESENT, LEFT, FAILED, GONE = range(4)
STATE, MET, BEAT, BATCHES, SAMPLES, SAVED, PROCESS, STARTED, SINCE = range(9)
CURSORS = 2048  # words for samplers
_COLUMNS = 9
_LOCK = 0
_CURSORS = 64
_ROWS = _CURSORS + CURSORS * WORD
_BEAT_S = 1.0
_PROGRESS_S = 1e-3  # between two looks for what ranks of other machines ask of this one's memory
_LONGEST_NAP_S = 0.05

T = TypeVar("T")


class Job:
    """The job as one rank sees it. `comm` is a communicator that nobody else uses."""

    def __init__(self, comm: Any, *, deadline_s: float) -> None:
        self.comm, self.rank, self.size = comm, int(comm.rank), int(comm.size)
        self.deadline_s = deadline_s
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise InvalidArgument(
                "a center in MPI windows needs an MPI that several threads may call (MPI_THREAD_MULTIPLE); this one "
                "was begun for fewer. Leave mpi4py.rc.thread_level as it is, or unset MANIPLE_CENTER."
            )
        self.watch = Watch(self.rank, deadline_s)
        self._row = np.zeros(_COLUMNS, np.int64)
        self._telling = threading.Lock()  # the script's thread and the pulse tell the same row
        with self.watch.over("the others to join"):
            neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)
            self._leader = int(neighbours.bcast(self.rank))
            self.local_rank, self.local_size = int(neighbours.rank), int(neighbours.size)
            neighbours.Free()
        self._windows: list[Window] = []
        self.ledger = self.new_window(_CURSORS if self.rank else _ROWS + _COLUMNS * WORD * self.size)
        self.tell(PROCESS, *this_process()[:2])
        self._heard: list[tuple[int, float]] = [(-1, 0.0)] * self.size  # the last beat of each, and when it came
        self._awake = Patience(math.inf)  # its time stands still while this process is stopped
        self._ending = threading.Event()
        nap_s = _BEAT_S / 2 if self.local_size == self.size else _PROGRESS_S
        self._pulse = threading.Thread(target=self._beat, args=(nap_s,), name="maniple-pulse", daemon=True)
        self._pulse.start()

    def new_window(self, size_bytes: int) -> Window:
        """A window to which this rank gives so many bytes, of zeros; all ranks make it at once."""
        self._windows.append(Window(self.comm, size_bytes, self.watch))
        return self._windows[-1]

    def by_first(self, act: Callable[[], T]) -> T:
        """What `act` gives to rank 0, for all; its error is everybody's."""
        told: tuple[Any, str, str] = (None, "", "")
        error: Exception | None = None
        if self.rank == 0:
            try:
                told = (act(), "", "")
            except Exception as one:
                told, error = (None, type(one).__name__, str(one)), one
        with self.watch.over("worker 0"):
            value, kind, reason = self.comm.bcast(told)
        if error is not None:
            raise error
        if kind:
            raise_remote(kind, f"worker 0: {reason}")
        return value

    def agree(self, error: ManipleError | None) -> None:
        """Raise the first error that any rank has come with; all ranks call it at once."""
        with self.watch.over("the others to say whether all is well"):
            told = self.comm.allgather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, one in enumerate(told):
            if one is not None:
                raise_remote(one[0], f"worker {rank}: {one[1]}")

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here as often as this one."""
        self.tell(MET, goal := int(self._row[MET]) + 1)
        patience = Patience(self.deadline_s)
        for rows in self.looks():
            missing = [rank for rank in range(self.size) if rows[rank, MET] < goal]
            if not missing:
                return
            if gone := [rank for rank in missing if rows[rank, STATE] != PRESENT]:
                raise PeerLost(
                    f"worker {gone[0]} has {'left' if rows[gone[0], STATE] == LEFT else 'failed'}, and will not "
                    f"come to {what}, where worker {self.rank} waits. All ranks of an MPI job make the same calls of "
                    "share(): look at what that worker printed."
                )
            if patience.is_over():
                raise WaitedTooLong(
                    f"worker {', '.join(map(str, missing))} did not come within {self.deadline_s:g} s to {what}, where "
                    f"worker {self.rank} waits. Look at what it does; raise MANIPLE_CIRCLE_DEADLINE if it needs longer."
                )

    def tell(self, column: int, *values: int) -> None:
        """Write words of the own row, from `column` on."""
        with self._telling:
            self._row[column : column + len(values)] = values
            self.ledger.set(0, _ROWS + self.rank * _COLUMNS * WORD, self._row)

    def rows(self) -> Array:
        """All rows."""
        rows = np.zeros(self.size * _COLUMNS, np.int64)
        self.ledger.look(0, _ROWS, rows)
        return rows.reshape(self.size, _COLUMNS)

    def looks(self, ranks: Sequence[int] | None = None) -> Iterator[Array]:
        """The rows, again and again; PeerLost if one of `ranks`, or of all, is not heard of any more."""
        nap_s = 1e-3
        while True:
            rows = self.rows()
            self._mind_silence(rows, range(self.size) if ranks is None else ranks)
            yield rows
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def swap_cursor(self, number: int, expected: int, new: int) -> int:
        """Set word `number` of the samplers to `new` if it is `expected`; gives what it was."""
        return self.ledger.swap(0, _CURSORS + number * WORD, expected, new)

    @contextmanager
    def held(self, timeout_s: float) -> Generator[None]:
        """Hold the lock that the ranks of this machine share."""
        patience = Patience(timeout_s)
        while holder := self.ledger.swap(self._leader, _LOCK, 0, self.rank + 1):
            patience.wait("the workers' lock", functools.partial(self._explain, holder - 1))
        self.tell(SINCE, int(time.time() * 1000))
        try:
            yield
        finally:
            self.ledger.swap(self._leader, _LOCK, self.rank + 1, 0)

    def _explain(self, holder: int) -> str:
        row = self.rows()[holder]
        state = "self" if holder == self.rank else process_state(int(row[PROCESS]), int(row[STARTED]))
        return explain_holder(holder, int(row[PROCESS]), row[SINCE] / 1000, state)

    def close(self, *, is_whole: bool) -> None:
        """Be silent, for MPI must not end while a thread is inside of it; `is_whole`: all ranks do so at once."""
        self._ending.set()
        self._pulse.join()
        for window in self._windows if is_whole else ():
            window.free()
        self.watch.close()

    def _beat(self, nap_s: float) -> None:
        told = 0.0
        while not self._ending.wait(nap_s):
            if time.monotonic() - told >= _BEAT_S:
                told = time.monotonic()
                self.tell(BEAT, int(self._row[BEAT]) + 1)
            else:
                self.comm.Iprobe()  # any call lets MPI serve those who read and write this rank's memory

    def _mind_silence(self, rows: Array, ranks: Sequence[int]) -> None:
        self._awake.is_over()
        now = self._awake.waited_s
        for rank in ranks:
            if rows[rank, BEAT] != self._heard[rank][0]:
                self._heard[rank] = int(rows[rank, BEAT]), now
            elif now - self._heard[rank][1] > self.deadline_s:
                raise PeerLost(
                    f"worker {rank} has not been heard of for {now - self._heard[rank][1]:.0f} s (limit "
                    f"{self.deadline_s:g} s). Look whether its process is stopped; raise MANIPLE_CIRCLE_DEADLINE if "
                    "that may be."
                )
