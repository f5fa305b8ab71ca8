"""Redrawn rows: progress bars in the output of a process, thinned out to lines for its log.

A bar rewrites its row after a carriage return, ten times a second; nested bars move the cursor between several rows.
The newest rows are kept here as a terminal would show them. Ordinary lines go to the log as they come, a row that is
redrawn when it is final, and before that at growing intervals, so that a log shows progress and stays small.
"""

import re
from dataclasses import dataclass, field

# A line end; back to the first column; backspaces; a control sequence such as "cursor up"; text; a lone escape.
_TOKEN = re.compile(rb"(\r*\n)|(\r+)|(\x08+)|\x1b\[([0-?]*)[ -/]*([@-~])|([^\r\n\x08\x1b]+|\x1b)")
_UNFINISHED = re.compile(rb"(?:\r+|\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?)\Z")  # the next piece may continue it
_CONTROL = re.compile(rb"[\r\x08\x1b]")
_STYLE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_LAST_CHARACTER = re.compile(rb"[^\x80-\xbf][\x80-\xbf]*\Z")  # in UTF-8
_MOST_ROWS = 32  # that a program may redraw; those above are final
_MOST_BYTES = 1 << 16  # of a row, which is then cut
_QUIET_S = 1.0  # a row that the cursor has left below itself is final if it stays the same for so long
_FIRST_S, _LONGEST_S = 5.0, 60.0  # between two lines of the same row in the log


@dataclass
class _Row:
    """A row at the end of the output."""

    text: bytes = b""
    is_redrawn: bool = False  # not an ordinary line
    is_ended: bool = False  # by a newline, so that it counts as a line even if it is blank
    is_at_start: bool = False  # the next text replaces this one
    logged: bytes = b""
    changed: float = 0.0
    began: float = field(default=-1.0)  # or when it was last logged
    interval_s: float = _FIRST_S

    @property
    def line(self) -> bytes:
        """Without the blanks by which a bar covers its longer predecessor."""
        return self.text.rstrip(b" ") if self.is_redrawn else self.text

    @property
    def shown(self) -> bytes:
        """Without colours."""
        return _STYLE.sub(b"", self.text).strip()

    @property
    def is_new(self) -> bool:
        """The log does not have it yet."""
        return (self.line != self.logged and bool(self.shown)) or (self.is_ended and not self.is_redrawn)


class Redraw:
    """Turns the output of one process, in pieces, into what its log should hold."""

    def __init__(self) -> None:
        self._rows, self._at = [_Row()], 0  # the cursor is in this row
        self._rest = b""  # of an unfinished control sequence
        self._is_open = False  # the last line of the log has no end yet
        self._now = 0.0

    @property
    def is_plain(self) -> bool:
        """There are no redrawn rows: all that was printed is in the log."""
        return self._is_ordinary and not self._rest

    @property
    def _is_ordinary(self) -> bool:
        return len(self._rows) == 1 and not self._rows[0].is_redrawn

    @property
    def _is_left(self) -> bool:
        """The cursor is in an empty or ordinary row below all that was redrawn."""
        last = self._rows[-1]
        is_empty = last.is_at_start and not last.shown
        return self._at == len(self._rows) - 1 and (is_empty or not last.is_redrawn)

    @property
    def live(self) -> tuple[str, ...]:
        """The bars that are being drawn."""
        rows = [row for i, row in enumerate(self._rows) if i >= self._at or self._now - row.changed < _QUIET_S]
        return tuple(row.shown.decode(errors="replace") for row in rows if row.is_redrawn and row.shown)

    def feed(self, piece: bytes, now: float) -> bytes:
        """Take what was printed; gives what the log should hold of it by now."""
        self._now = now
        if self.is_plain and not _CONTROL.search(piece):
            self._is_open = not piece.endswith(b"\n") if piece else self._is_open
            return piece
        piece, self._rest = self._rest + piece, b""
        if unfinished := _UNFINISHED.search(piece):
            piece, self._rest = piece[: unfinished.start()], unfinished[0]
        return b"".join(self._take(token) for token in _TOKEN.finditer(piece)) + self.due(now)

    def due(self, now: float) -> bytes:
        """The rows that are final by now, or have not been logged for a while."""
        self._now = now
        out = b"".join([self._log(row) for i, row in enumerate(self._rows) if row.is_new and self._is_due(i, row)])
        if self._is_left and not any(row.is_new or now - row.changed < _QUIET_S for row in self._rows[:-1]):
            out += self._settle()
        return out

    def flush(self) -> bytes:
        """All rows as they are: the process has ended, or somebody wants to see its output now."""
        rest, self._rest = self._rest, b""
        out = b"".join(self._take(token) for token in _TOKEN.finditer(rest))
        return out + (
            self._settle() if self._is_left else b"".join([self._log(row) for row in self._rows if row.is_new])
        )

    def _settle(self) -> bytes:
        """Log what is new. The last row is an ordinary line, and may not be at its end."""
        *above, last = self._rows
        out = b"".join([self._log(row) for row in above if row.is_new])
        if not last.is_redrawn and last.text:
            out += (b"\n" if self._is_open else b"") + last.text
            self._is_open = True
        # A blank row that was redrawn stays one, so that its line end is no blank line, whenever it comes.
        self._rows, self._at = [_Row(is_redrawn=last.is_redrawn, is_at_start=last.is_redrawn)], 0
        return out

    def _is_due(self, i: int, row: _Row) -> bool:
        if i < self._at and (self._is_left or not row.logged or self._now - row.began >= _FIRST_S):
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
        if self._is_ordinary:  # a line, which may come in pieces
            self._is_open = True
            return text
        if row.is_at_start:
            row.text, row.is_at_start = b"", False
        row.text += text
        row.changed = self._now
        row.began = self._now if row.began < 0 else row.began
        if len(row.text) <= _MOST_BYTES:
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
            self._is_open, out = False, self._settle() + b"\n"
            return out
        self._at += 1
        if not is_last:
            self._rows[self._at].is_at_start = True
            return b""
        self._rows.append(_Row())
        return self._scroll()

    def _control(self, kind: bytes, numbers: bytes) -> None:
        """Follow the cursor, and what is erased. Sequences that hide the cursor and the like are dropped."""
        row, number = self._rows[self._at], int(numbers) if numbers.isdigit() else 0
        if kind in b"AF":  # up
            above = self._at - min(max(1, number), _MOST_ROWS)
            if above < 0:  # to rows that have gone to the log as ordinary lines
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
        over = max(0, len(self._rows) - _MOST_ROWS)
        gone, self._rows = self._rows[:over], self._rows[over:]
        self._at -= over
        return b"".join([self._log(row) for row in gone if row.is_new])

    def _log(self, row: _Row) -> bytes:
        before, self._is_open = b"\n" if self._is_open else b"", False
        row.interval_s = min(2 * row.interval_s, _LONGEST_S) if row.logged else row.interval_s
        row.logged, row.began, row.is_ended = row.line, self._now, row.is_ended and row.is_redrawn
        return before + row.line + b"\n"
