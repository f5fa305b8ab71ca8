"""The output of a process on its way to its log: a pipe, a buffer for a full disk, and a filter for progress bars.

A progress bar rewrites its row after a carriage return, often ten times a second, and nested bars move the cursor
between several rows. The filter keeps the newest rows as a terminal would show them. Ordinary lines go to the log at
once; a redrawn row when it is final, and before that at growing intervals, so that a log shows progress but stays
small.
"""

import fcntl
import os
import re
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from maniple.record.events import open_rows

# What a process can print while the launcher is stopped. Linux grants each user 64 MiB of pipe buffers.
_PIPE_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_MAX_UNWRITTEN_BYTES = 1 << 16  # the newest output, kept while the disk is full
_IDLE_S = 1.0  # before writing to a full disk is retried, and before an idle log is closed

# A line end; carriage returns; backspaces; a control sequence such as "cursor up"; text; a lone escape.
_TOKEN = re.compile(rb"(\r*\n)|(\r+)|(\x08+)|\x1b\[([0-?]*)[ -/]*([@-~])|([^\r\n\x08\x1b]+|\x1b)")
_UNFINISHED = re.compile(rb"(?:\r+|\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?)\Z")  # the next chunk may continue it
_CONTROL = re.compile(rb"[\r\x08\x1b]")
_STYLE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_LAST_CHARACTER = re.compile(rb"[^\x80-\xbf][\x80-\xbf]*\Z")  # in UTF-8
_MAX_ROWS = 32  # rows that a program can redraw; those above are final
_MAX_ROW_BYTES = 1 << 16  # a longer row is cut
_QUIET_S = 1.0  # a row above the cursor is final once it has not changed for this long
_FIRST_INTERVAL_S, _MAX_INTERVAL_S = 5.0, 60.0  # between two log lines of the same row; doubled each time


class Output:
    """Copies what one process prints to its log, on a separate thread.

    Args:
        log: the file to append to.
        before: the output of the previous process with this log; what that could not write comes first.

    Attributes:
        pipe: the end for the process; to be closed here once it has started.
        problem: why the log could not be written the last time this happened; "" if it never did.
        bars: the progress bars that the process is drawing now, one string per row.
    """

    def __init__(self, log: Path, before: "Output | None" = None) -> None:
        self.problem = ""
        self.bars: tuple[str, ...] = ()
        self._filter = ProgressFilter()
        self._log, self._file = log, -1
        with suppress(OSError):  # a process that prints nothing has a log too
            log.touch()
        self._reading, self.pipe = os.pipe()
        os.set_blocking(self._reading, False)
        with suppress(OSError):  # the user's limit for pipe buffers is reached
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unwritten, self._dropped = before.take_unwritten() if before is not None else (bytearray(), 0)
        self._is_open = self._is_first = True  # the pipe is open; nothing was written yet
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="maniple-output", daemon=True).start()

    @property
    def unwritten(self) -> bytes:
        """The newest output that could not be written to the log."""
        with self._lock:
            return bytes(self._unwritten)

    def finish(self) -> None:
        """Write everything printed so far to the log. Children of the process may continue to print."""
        with self._lock:
            self._pump()
            self._put(self._filter.flush())
            self._close_log_if_over()

    def take_unwritten(self) -> tuple[bytearray, int]:
        """Hand over what could not be written, and how many bytes before it were dropped."""
        with self._lock:
            given = self._unwritten, self._dropped
            self._unwritten, self._dropped = bytearray(), 0
            return given

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while self._is_open:
            is_idle = not self._unwritten and self._file < 0 and self._filter.is_plain
            is_readable = poll.poll(None if is_idle else _IDLE_S * 1000)
            with self._lock:
                self._pump()
                if not is_readable:  # release the descriptor of an idle log: many workers share the limit
                    self._close_log()
        while self._unwritten:
            time.sleep(_IDLE_S)
            self.finish()

    def _pump(self) -> None:
        while self._is_open:
            try:
                chunk = os.read(self._reading, _READ_BYTES)
            except BlockingIOError:
                break
            if chunk:
                self._put(self._filter.feed(chunk, time.monotonic()))
            else:
                self._is_open = False
                os.close(self._reading)
                self._put(self._filter.flush())
        if waiting := self._filter.due(time.monotonic()):
            self._put(waiting)
        self.bars = self._filter.live if self._is_open else ()
        if self._unwritten:
            self._put(b"")
        self._close_log_if_over()

    def _close_log_if_over(self) -> None:
        if not self._is_open:
            self._close_log()

    def _close_log(self) -> None:
        if self._file >= 0 and not self._unwritten:
            os.close(self._file)
            self._file = -1

    def _put(self, data: bytes) -> None:
        self._unwritten += data
        try:
            while self._unwritten or self._dropped:
                self._write()
        except OSError as error:
            self.problem = error.strerror or str(error)
            if (over := len(self._unwritten) - _MAX_UNWRITTEN_BYTES) > 0:
                self._dropped += over
                del self._unwritten[:over]

    def _write(self) -> None:
        if self._file < 0:
            self._file, is_cut = open_rows(self._log)
            if is_cut and self._is_first:  # the previous process was killed in the middle of a line
                self._unwritten[:0] = b"\n"
            self._is_first = False
        note = (
            f"\n[maniple: {self._dropped:,} bytes are missing here: {self.problem}]\n".encode()
            if self._dropped
            else b""
        )
        written = os.write(self._file, note + self._unwritten)
        if written >= len(note):
            self._dropped = 0
            del self._unwritten[: written - len(note)]


@dataclass
class _Row:
    """One row at the end of the output, as a terminal shows it."""

    text: bytes = b""
    is_redrawn: bool = False  # else an ordinary line
    is_ended: bool = False  # by a newline: then even a blank row is a line
    is_at_start: bool = False  # the cursor is in column 0: the next text replaces this one
    logged: bytes = b""
    changed: float = 0.0
    began: float = -1.0  # when it was first drawn, or last logged
    interval_s: float = _FIRST_INTERVAL_S

    @property
    def line(self) -> bytes:
        """The text without the trailing blanks that erase a longer previous one."""
        return self.text.rstrip(b" ") if self.is_redrawn else self.text

    @property
    def shown(self) -> bytes:
        return _STYLE.sub(b"", self.text).strip()

    @property
    def is_new(self) -> bool:
        return (self.line != self.logged and bool(self.shown)) or (self.is_ended and not self.is_redrawn)


class ProgressFilter:
    """Reduces the output of one process, given in chunks, to what its log should hold."""

    def __init__(self) -> None:
        self._rows, self._at = [_Row()], 0  # `_at` is the cursor's row
        self._rest = b""  # an unfinished control sequence
        self._is_open = False  # the last line of the log is not ended yet
        self._now = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether there are no redrawn rows, so that everything printed is in the log."""
        return self._is_ordinary and not self._rest

    @property
    def _is_ordinary(self) -> bool:
        return len(self._rows) == 1 and not self._rows[0].is_redrawn

    @property
    def _is_left(self) -> bool:
        """Whether the cursor is in an empty or ordinary row below all redrawn ones."""
        last = self._rows[-1]
        is_empty = last.is_at_start and not last.shown
        return self._at == len(self._rows) - 1 and (is_empty or not last.is_redrawn)

    @property
    def live(self) -> tuple[str, ...]:
        """The progress bars that are being drawn."""
        rows = [row for i, row in enumerate(self._rows) if i >= self._at or self._now - row.changed < _QUIET_S]
        return tuple(row.shown.decode(errors="replace") for row in rows if row.is_redrawn and row.shown)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Process printed bytes and return what to append to the log now."""
        self._now = now
        if self.is_plain and not _CONTROL.search(chunk):
            self._is_open = not chunk.endswith(b"\n") if chunk else self._is_open
            return chunk
        chunk, self._rest = self._rest + chunk, b""
        if unfinished := _UNFINISHED.search(chunk):
            chunk, self._rest = chunk[: unfinished.start()], unfinished[0]
        return b"".join(self._take(token) for token in _TOKEN.finditer(chunk)) + self.due(now)

    def due(self, now: float) -> bytes:
        """Return rows that are final by now, or have not been logged for a while."""
        self._now = now
        out = b"".join([self._log(row) for i, row in enumerate(self._rows) if row.is_new and self._is_due(i, row)])
        if self._is_left and not any(row.is_new or now - row.changed < _QUIET_S for row in self._rows[:-1]):
            out += self._commit()
        return out

    def flush(self) -> bytes:
        """Return all rows as they are, because the process has ended or its output is needed now."""
        rest, self._rest = self._rest, b""
        out = b"".join(self._take(token) for token in _TOKEN.finditer(rest))
        return out + (
            self._commit() if self._is_left else b"".join([self._log(row) for row in self._rows if row.is_new])
        )

    def _commit(self) -> bytes:
        """Log what is new. The last row is an ordinary line that may continue."""
        *above, last = self._rows
        out = b"".join([self._log(row) for row in above if row.is_new])
        if not last.is_redrawn and last.text:
            out += (b"\n" if self._is_open else b"") + last.text
            self._is_open = True
        # A blank redrawn row stays one, so that its line end does not become a blank line later.
        self._rows, self._at = [_Row(is_redrawn=last.is_redrawn, is_at_start=last.is_redrawn)], 0
        return out

    def _is_due(self, i: int, row: _Row) -> bool:
        if i < self._at and (self._is_left or not row.logged or self._now - row.began >= _FIRST_INTERVAL_S):
            return self._now - row.changed >= _QUIET_S
        return self._now - row.began >= row.interval_s

    def _take(self, token: re.Match[bytes]) -> bytes:
        newline, start, back, numbers, kind, text = token.groups()
        row = self._rows[self._at]
        if newline:
            return self._end_line(row)
        if start:
            row.is_redrawn = row.is_at_start = True
        elif back:
            row.is_redrawn = True
            for _ in back:
                row.text = _LAST_CHARACTER.sub(b"", row.text)
        elif kind and kind != b"m":
            self._control(kind, numbers)
        else:
            return self._write(row, text or token[0])
        return b""

    def _write(self, row: _Row, text: bytes) -> bytes:
        if self._is_ordinary:  # a line, which may come in several chunks
            self._is_open = True
            return text
        if row.is_at_start:
            row.text, row.is_at_start = b"", False
        row.text += text
        row.changed = self._now
        row.began = self._now if row.began < 0 else row.began
        if len(row.text) <= _MAX_ROW_BYTES:
            return b""
        out = self._log(row)
        row.text = b""
        return out

    def _end_line(self, row: _Row) -> bytes:
        if self._is_ordinary:
            self._is_open = False
            return b"\n"
        row.is_ended, row.changed = True, self._now
        is_last = self._at == len(self._rows) - 1
        if is_last and not row.is_redrawn and row.text.strip():  # an ordinary line: all rows above it are final
            self._is_open, out = False, self._commit() + b"\n"
            return out
        self._at += 1
        if not is_last:
            self._rows[self._at].is_at_start = True
            return b""
        self._rows.append(_Row())
        return self._scroll()

    def _control(self, kind: bytes, numbers: bytes) -> None:
        """Apply cursor movements and erasures. Other sequences, such as hiding the cursor, are dropped."""
        row, number = self._rows[self._at], int(numbers) if numbers.isdigit() else 0
        if kind in b"AF":  # up
            above = self._at - min(max(1, number), _MAX_ROWS)
            if above < 0:  # rows that were logged as ordinary lines
                self._rows[:0] = [_Row(is_redrawn=True) for _ in range(-above)]
            self._at = max(0, above)
            self._rows[self._at].is_redrawn = True
        elif kind in b"BE":  # down
            self._at = min(self._at + max(1, number), len(self._rows) - 1)
        elif kind == b"K" and (number or row.is_at_start):
            row.text, row.is_redrawn = b"", True
        elif kind == b"J":
            for erased in self._rows[self._at + (not row.is_at_start) if number == 0 else 0 :]:
                erased.text = b""
        elif kind == b"H":
            self._at = 0
        if kind in b"EFGH":
            self._rows[self._at].is_redrawn = self._rows[self._at].is_at_start = True

    def _scroll(self) -> bytes:
        over = max(0, len(self._rows) - _MAX_ROWS)
        gone, self._rows = self._rows[:over], self._rows[over:]
        self._at -= over
        return b"".join([self._log(row) for row in gone if row.is_new])

    def _log(self, row: _Row) -> bytes:
        before, self._is_open = b"\n" if self._is_open else b"", False
        row.interval_s = min(2 * row.interval_s, _MAX_INTERVAL_S) if row.logged else row.interval_s
        row.logged, row.began, row.is_ended = row.line, self._now, row.is_ended and row.is_redrawn
        return before + row.line + b"\n"
