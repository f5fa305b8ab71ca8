"""The view of a run on the terminal: a live table, or plain lines where the output is no terminal."""

import sys
import time
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maniple.launch.board import Board, Standing

_PLAIN_EVERY_S = 5.0


class View(AbstractContextManager["View"]):
    """Says only what must be said: errors. The other views say more."""

    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, board: Board, printed: list[tuple[int, str]]) -> None:
        """Bring the view up to date."""

    def say(self, text: str) -> None:
        """Tell the person one thing."""

    def error(self, text: str) -> None:
        """Tell what went wrong."""
        with suppress(OSError):
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
    """Plain lines: what workers print, and every few seconds where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def show(self, board: Board, printed: list[tuple[int, str]]) -> None:
        for rank, line in printed:
            print(f"W{rank} | {line}", flush=True)
        if time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self._last = time.monotonic()
            for rank, standing in enumerate(board.standings):
                words = " ".join(f"{name} {value}" for name, value in values(standing).items())
                print(f"W{rank} : {words}", flush=True)


class Rows(View):
    """A live table, one line per worker, below what the workers print."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._next = 0.0

    def __enter__(self) -> "Rows":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._live.stop()

    def show(self, board: Board, printed: list[tuple[int, str]]) -> None:
        for rank, line in printed:
            self._console.print(Text.assemble((f"W{rank} ", "cyan"), "| ", line))
        if time.monotonic() >= self._next or all(s.state in {"done", "ended", "dead"} for s in board.standings):
            self._next = time.monotonic() + 0.5
            self._live.update(_table(board), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text.assemble(("H  ", "bold"), "| ", text))

    def error(self, text: str) -> None:
        self._console.print(Text(f"maniple: {text}", style="red"))


def open_view(*, quiet: bool, is_brief: bool = False) -> View:
    """The view that fits where standard output goes; a brief one has no room for the workers."""
    if quiet:
        return View()
    if is_brief:
        return Words()
    return Rows() if sys.stdout.isatty() else Lines()


def _table(board: Board) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", *values(Standing())):
        table.add_column(name, justify="left" if name in {"worker", "state"} else "right")
    for rank, standing in enumerate(board.standings):
        table.add_row(f"W{rank}", *values(standing).values())
    total = sum(s.samples_per_s for s in board.standings)
    if total and len(board.standings) > 1:
        table.add_row("all", "", f"{sum(s.step for s in board.standings):,}", f"{total:,.0f} samples/s", "", "")
    return table


def values(standing: Standing) -> dict[str, str]:
    """What is shown of a worker, by the names of columns."""
    rate, unit = (standing.samples_per_s, "samples") if standing.samples else (standing.steps_per_s, "steps")
    return {
        "state": standing.state,
        "step": f"{standing.step:,}",
        "speed": f"{rate:,.0f} {unit}/s",
        "loss": "–" if standing.loss is None else f"{standing.loss:.4g}",
        "sync": f"{standing.sync_share:.1%}",
    }
