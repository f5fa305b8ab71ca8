"""Output: what a process prints, brought from a pipe to its log.

The log lies in the run folder. If the process had that file as its standard output, a full disk would fail its
`print`, and end the training for a line of text; so the launcher reads a pipe and writes the log, and keeps what the
disk does not take. Each process has a thread here, so that a terminal that stands still holds up no one. Progress bars
are thinned out on the way (`redraw`).
"""

import fcntl
import os
import select
import threading
import time
from contextlib import suppress
from pathlib import Path

from maniple.launch.redraw import Redraw
from maniple.record.events import open_rows

# What a process may print while the launcher is stopped. Linux grants a user 64 MiB for pipes, and then 8 KiB each.
_PIPE_BYTES = 1 << 18
_PIECE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 16  # of what the disk does not take, the newest
_IDLE_S = 1.0  # until a disk is tried again that was full, and a log is closed to which nothing comes


class Output:
    """The way of one process to its log; `pipe` is for the process, and to be closed here once it has started.

    `before` is that of its predecessor, which prints no more: what that could not write comes first.

    Attributes:
        problem: why the log could not be written the last time that it could not; "" if it always could.
        bars: the progress bars that the process is drawing now, one string for each row.
    """

    def __init__(self, log: Path, before: "Output | None" = None) -> None:
        self.problem = ""
        self.bars: tuple[str, ...] = ()
        self._redraw = Redraw()
        self._log, self._file = log, -1
        with suppress(OSError):  # there is a log of each process, also of one that says nothing
            log.touch()
        self._reading, self.pipe = os.pipe()
        os.set_blocking(self._reading, False)
        with suppress(OSError):  # there are too many pipes for larger ones
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._kept, self._lost = before.hand_over() if before is not None else (bytearray(), 0)
        self._is_open = self._is_first = True  # somebody may print; nothing is written yet
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="maniple-output", daemon=True).start()

    @property
    def kept(self) -> bytes:
        """The newest that was printed and could not be written to the log."""
        with self._lock:
            return bytes(self._kept)

    def finish(self) -> None:
        """Bring all that was printed until now to the log. What the process has left running may print on."""
        with self._lock:
            self._pump()
            self._put(self._redraw.flush())
            self._shut_if_over()

    def hand_over(self) -> tuple[bytearray, int]:
        """Give away what could not be written, and how many bytes before that are lost."""
        with self._lock:
            given = self._kept, self._lost
            self._kept, self._lost = bytearray(), 0
            return given

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while self._is_open:
            is_idle = not self._kept and self._file < 0 and self._redraw.is_plain
            has_come = poll.poll(None if is_idle else _IDLE_S * 1000)
            with self._lock:
                self._pump()
                if not has_come:  # descriptors are scarce where there are many workers
                    self._shut()
        while self._kept:
            time.sleep(_IDLE_S)
            self.finish()

    def _pump(self) -> None:
        """Move what is there."""
        while self._is_open:
            try:
                piece = os.read(self._reading, _PIECE_BYTES)
            except BlockingIOError:
                break
            if piece:
                self._put(self._redraw.feed(piece, time.monotonic()))
            else:
                self._is_open = False
                os.close(self._reading)
                self._put(self._redraw.flush())
        if waiting := self._redraw.due(time.monotonic()):
            self._put(waiting)
        self.bars = self._redraw.live if self._is_open else ()
        if self._kept:
            self._put(b"")
        self._shut_if_over()

    def _shut_if_over(self) -> None:
        if not self._is_open:
            self._shut()

    def _shut(self) -> None:
        if self._file >= 0 and not self._kept:
            os.close(self._file)
            self._file = -1

    def _put(self, piece: bytes) -> None:
        self._kept += piece
        try:
            while self._kept or self._lost:
                self._write()
        except OSError as error:
            self.problem = error.strerror or str(error)
            if (over := len(self._kept) - _KEPT_BYTES) > 0:
                self._lost += over
                del self._kept[:over]

    def _write(self) -> None:
        if self._file < 0:
            self._file, is_cut = open_rows(self._log)
            if is_cut and self._is_first:  # its predecessor was killed in the middle of a line
                self._kept[:0] = b"\n"
            self._is_first = False
        note = f"\n[maniple: {self._lost:,} bytes are missing here: {self.problem}]\n".encode() if self._lost else b""
        written = os.write(self._file, note + self._kept)
        if written >= len(note):
            self._lost = 0
            del self._kept[: written - len(note)]
