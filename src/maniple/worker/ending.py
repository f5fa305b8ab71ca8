"""The ways in which a worker's script may end."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from maniple.errors import ManipleError, WorkerFailed
from maniple.place import Place
from maniple.place.launch import is_elastic
from maniple.record import Folder

if TYPE_CHECKING:
    from maniple.worker.replica import Replica

OnError = Callable[[type[BaseException], BaseException, TracebackType | None], None]

# Grace period for the current step. Launchers and schedulers send SIGKILL 10 s or more after SIGTERM, and the last
# exchange needs time as well. SIGUSR1 comes a minute before the end of the walltime.
_STEP_S = {signal.SIGTERM: 5.0, signal.SIGUSR1: 20.0}


class Ending:
    """A signal that tells this worker to end: noted when it comes, and followed where it cuts no step in two.

    SIGTERM ends the script with the exit code 143, as a program ends that knows nothing of it. SIGUSR1 is what batch
    queues send before the time is over, if they are asked to: then the exit code is 0, for nothing went wrong.
    """

    def __init__(self, replicas: Sequence["Replica"], *, has_left: Callable[[], bool]) -> None:
        self.exit_code: int | None = None  # once it is told to end
        self._replicas, self._has_left = replicas, has_left
        self._pid = os.getpid()

    @property
    def is_told(self) -> bool:
        """A signal has come."""
        return self.exit_code is not None

    def hear(self, number: int, _: FrameType | None) -> None:
        """Note a signal. What is under way ends first; a second signal, or the deadline, does not wait for a step."""
        is_first, is_forked = not self.is_told, os.getpid() != self._pid
        if is_first:
            self.exit_code = 0 if number == signal.SIGUSR1 else 128 + number
        if any(replica.is_exchanging for replica in self._replicas) and not is_forked:
            return
        if is_first and self._replicas and not is_forked:
            timer = threading.Timer(_STEP_S.get(signal.Signals(number), 5.0), os.kill, (self._pid, number))
            timer.daemon = True
            timer.start()
            return
        self.follow()

    def follow(self) -> None:
        """End the script here if a signal has come, as if it had ended by itself."""
        if (
            self.exit_code is not None
            and not self._has_left()
            and threading.current_thread() is threading.main_thread()
        ):
            raise SystemExit(self.exit_code)


def watch_the_end(*, at_exit: Callable[[], None], on_error: OnError, on_signal: Callable[..., None]) -> None:
    """Call `at_exit` when the script ends, `on_error` before that if it fails, `on_signal` if it is told to."""
    atexit.register(_end_well_or_not, at_exit)
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = note
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, on_signal)
        if signal.getsignal(signal.SIGUSR1) in {signal.SIG_DFL, signal.SIG_IGN}:  # ignored until now: see launch.slurm
            signal.signal(signal.SIGUSR1, on_signal)
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


def mind_early_end(place: Place) -> None:
    """The host has ended before this worker had: a launcher that can start all again, elsewhere perhaps, is to do so.

    It may have lost the host's machine, and would take the end of the others for the end of the training.
    """
    if place.is_guest and place.run is not None and is_elastic() and not Folder(place.run).is_stopped:
        raise WorkerFailed(
            f"the host of {place.run} has ended before worker {place.rank} had come to its end; its machine may be "
            f"gone. {place.launcher} starts the workers again if it may (--max-restarts), and they go on from there."
        )


def _end_well_or_not(act: Callable[[], None]) -> None:
    """The script has ended; if the last exchange fails, the process must not end as if all were well."""
    try:
        act()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, ManipleError) else 1)
