"""The ways in which a worker's script may end."""

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from maniple.errors import ManipleError
from maniple.place import Place

OnError = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def watch_the_end(
    *, at_exit: Callable[[], None], on_error: OnError, on_sigterm: Callable[[int, FrameType | None], None]
) -> None:
    """Call `at_exit` when the script ends, `on_error` before that if it fails, `on_sigterm` if it is told to."""
    atexit.register(_end_well_or_not, at_exit)
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = note
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, on_sigterm)
    except ValueError:  # joined outside the main thread: signals stay as they are
        pass


def failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """What is written down of a script that fails."""
    return {
        "error": f"{kind.__name__}: {error}",
        "exit_code": error.exit_code if isinstance(error, ManipleError) else 1,
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
    }


@contextmanager
def staying(place: Place, *, has_failed: Callable[[], bool], is_told: Callable[[], bool]) -> Generator[None]:
    """A worker leaves in this block; one that hosts the others stays until its host has ended."""
    is_well = False
    try:
        yield
        is_well = True
    finally:
        if place.is_hosting:
            from maniple.worker.hosted import await_end

            await_end(place, has_failed=has_failed() or not is_well, is_told=is_told)


def _end_well_or_not(act: Callable[[], None]) -> None:
    """The script has ended; if the last exchange fails, the process must not end as if all were well."""
    try:
        act()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, ManipleError) else 1)
