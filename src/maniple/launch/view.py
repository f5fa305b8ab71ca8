"""The view of a run: a live table on a terminal, plain lines where the output is none, or JSON for a program."""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from maniple.launch.board import Board
from maniple.launch.table import as_numbers, live_table, plain_lines
from maniple.record.folder import json_line
from maniple.story import Totals
from maniple.story.standing import WAITING

_PLAIN_FIRST_S, _PLAIN_LONGEST_S = 5.0, 60.0  # between two looks at all workers, at the beginning and later
_JSON_EVERY_S = 1.0


class _Console(Console):
    """One that ends no program."""

    def on_broken_pipe(self) -> None:
        """Nobody reads: an error like others, where `rich` would raise SystemExit."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class View(AbstractContextManager["View"]):
    """Says only what must be said: errors. The other views say more."""

    def __init__(self) -> None:
        self._errors = _Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, board: Board, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        """Bring the view up to date; `is_last`: it will not be any more."""

    def say(self, text: str) -> None:
        """Tell the person one thing."""

    def error(self, text: str) -> None:
        """Tell what went wrong."""
        with suppress(OSError, ValueError):
            self._errors.print(Text(f"maniple: {text}"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Words(View):
    """What the host says, and nothing of the workers: for a file in which nobody looks for them."""

    def say(self, text: str) -> None:
        print(f"H  | {text}", flush=True)


class Lines(Words):
    """Plain lines: what workers print, and where they stand: a worker whose state changes at once, all of them at
    growing intervals and after an epoch or a validation. What was said of a worker is not said again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._interval_s = clock, _PLAIN_FIRST_S
        self._last = clock()
        self._reached: tuple[int, int] = (0, 0)  # epochs and validations
        self._states: dict[int, tuple[str, int]] = {}
        self._said: dict[str, str] = {}

    def show(self, board: Board, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            print(f"W{rank} | {line}", flush=True)
        standings = board.standings
        states = {rank: (one.state, one.lives) for rank, one in standings.items() if one.state not in WAITING}
        changed = {rank for rank, state in states.items() if self._states.get(rank) != state}
        self._states = states
        is_over = bool(changed) and all(one.is_gone for one in standings.values())
        if is_last or is_over or self._is_due(board):
            self._say_new(plain_lines(standings, board.totals))
        elif changed:
            self._say_new(plain_lines({rank: standings[rank] for rank in sorted(changed)}, Totals()))

    def _is_due(self, board: Board) -> bool:
        reached = int(board.epochs), board.validations
        since_s = self._clock() - self._last
        if since_s >= self._interval_s:
            self._interval_s = min(2 * self._interval_s, _PLAIN_LONGEST_S)
        elif since_s < _PLAIN_FIRST_S or reached == self._reached:
            return False
        self._last, self._reached = self._clock(), reached
        return True

    def _say_new(self, lines: list[str]) -> None:
        """The lines that differ from what was last said of the same worker; of all together if there is such a one."""
        new = {who: line for line in lines if self._said.get(who := line.partition(":")[0]) != line}
        if new.keys() != {"all"}:
            self._said |= new
            for line in new.values():
                print(line, flush=True)


class Rows(View):
    """A live table, one line per worker, below what the workers print."""

    def __init__(self) -> None:
        super().__init__()
        self._console = _Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._next = 0.0

    def __enter__(self) -> "Rows":
        with suppress(OSError, ValueError):
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()

    def show(self, board: Board, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            self._console.print(Text.assemble((f"W{rank} ", "cyan"), "| ", line))
        if is_last or time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.5
            height = self._console.size.height
            table = live_table(board.standings, board.totals, height=height, bars=board.bars)
            self._live.update(table, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text.assemble(("H  ", "bold"), "| ", text))

    def error(self, text: str) -> None:
        self._console.print(Text(f"maniple: {text}", style="red"))


class Json(View):
    """One JSON object per line, for a program that reads along: `kind` is printed, said, error or standings."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def show(self, board: Board, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            self._put("printed", worker=rank, text=line)
        if is_last or time.monotonic() >= self._next:
            self._next = time.monotonic() + _JSON_EVERY_S
            self._put("standings", **as_numbers(board.standings, board.totals))

    def say(self, text: str) -> None:
        self._put("said", text=text)

    def error(self, text: str) -> None:
        self._put("error", text=text)

    def _put(self, kind: str, **values: Any) -> None:
        print(json_line({"kind": kind, "time": time.time(), **values}), flush=True)


def open_view(*, quiet: bool, is_json: bool = False, is_brief: bool = False) -> View:
    """The view that fits where standard output goes; a brief one has no room for the workers."""
    if is_json:
        return Json()
    if quiet:
        return View()
    if is_brief:
        return Words()
    return Rows() if sys.stdout is not None and sys.stdout.isatty() else Lines()
