"""How far a long call is, shown on the terminal."""

import sys
import time
from typing import Any

from maniple.contracts import Array

_PATIENCE_S = 1.0  # what takes less needs no bar


class Progress:
    """The slices of one call: `board` has, for each worker, how many it has done and how many there are."""

    def __init__(self, board: Array, is_wanted: bool | None, *, is_sliced: bool) -> None:
        self._board, self._begun = board, time.perf_counter()
        self._is_shown = is_wanted if is_wanted is not None else is_sliced and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def show(self) -> None:
        """Show it, if it is time to."""
        if not self._is_shown or time.perf_counter() - self._begun < _PATIENCE_S:
            return
        done, total = (int(count) for count in self._board.sum(axis=0))
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("slices", total=total or None)
        self._bar.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.stop()
