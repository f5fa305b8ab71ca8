"""The end of a worker's script: by itself, by an error, or by a signal from a launcher or a batch queue."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from maniple.clock import clock
from maniple.environment import Environment
from maniple.environment.other_launchers import is_elastic
from maniple.errors import ManipleError, WorkerFailed, say
from maniple.memory.segment import Segment
from maniple.record import RunFolder
from maniple.replica.context import TrainingContext

OnError = Callable[[type[BaseException], BaseException, TracebackType | None], None]

# Grace period for the current step. Launchers and schedulers send SIGKILL 10 s or more after SIGTERM, and the last
# exchange needs time as well. SIGUSR1 comes a minute before the end of the walltime.
_STEP_S = {signal.SIGTERM: 5.0, signal.SIGUSR1: 20.0}
_AGAIN_S = 0.25  # after the grace period: until the exchange is over that nothing may interrupt


class SignalHandler:
    """Notes a signal that asks this worker to exit; the replicas exit where it interrupts no step or exchange.

    SIGTERM ends the script with the usual exit code 143. Batch queues can send SIGUSR1 before the walltime is over;
    the exit code is then 0, since nothing went wrong.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._pid = context, os.getpid()

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Note a signal. A second one, or the end of the grace period, does not wait for a step.

        Neither interrupts an exchange: waits for other workers end by themselves (`TrainingContext.exit_if_overdue`).
        """
        context, is_forked = self._context, os.getpid() != self._pid
        is_first, grace_s = context.exit_code is None, _STEP_S.get(signal.Signals(number), 5.0)
        if is_first:
            context.exit_code = 0 if number == signal.SIGUSR1 else 128 + number
            context.leave_by = clock.monotonic() + grace_s
        is_exchanging = any(replica.is_exchanging for replica in context.replicas) and not is_forked
        if is_exchanging or (is_first and context.replicas and not is_forked):
            if not context.has_left:
                self._repeat(number, grace_s if is_first else _AGAIN_S)
            return
        context.exit_if_signalled()

    def _repeat(self, number: int, after_s: float) -> None:
        timer = threading.Timer(after_s, os.kill, (self._pid, number))
        timer.daemon = True
        timer.start()


def watch_exit(*, at_exit: Callable[[], None], on_error: OnError, on_signal: SignalHandler) -> None:
    """Call `at_exit` when the script ends, `on_error` before that if it fails, `on_signal` for SIGTERM and SIGUSR1."""
    atexit.register(_exit_with_error, at_exit)
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = note
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, on_signal)
        if signal.getsignal(signal.SIGUSR1) in {signal.SIG_DFL, signal.SIG_IGN}:  # ignored until now: see queues.slurm
            signal.signal(signal.SIGUSR1, on_signal)
    except ValueError:  # joined outside of the main thread: signals stay as they are
        pass


def check_host_lost(environment: Environment) -> None:
    """Raise WorkerFailed if the host has ended before this worker, so that an elastic launcher restarts all workers.

    The launcher may have lost the host's machine, and would take a successful exit for the end of the training.
    """
    if (
        environment.is_external
        and environment.run is not None
        and is_elastic()
        and not RunFolder(environment.run).is_stopped
    ):
        raise WorkerFailed(
            f"the host of {environment.run} has ended before worker {environment.rank} was done; its machine may be "
            f"gone. {environment.launcher} restarts the workers if it may (--max-restarts), and they continue from "
            "there."
        )


def warn_unshared(environment: Environment, segment: Segment | None) -> None:
    """Warn that a worker has shared nothing, unless a launcher of maniple does."""
    is_ours = environment.launcher == "maniple" or environment.is_queued or environment.is_alone
    is_first = environment.rank == 0 or not environment.launcher
    if not is_ours and is_first and not (segment is not None and segment.centers()):
        say(f"warning: {unshared_text('this worker has')}")


def unshared_text(who: str) -> str:
    """The warning for a script that calls join() and then trains by itself."""
    return (
        f"{who} ended without sharing a model: each worker trained its own, and there is no center. Add `replica = "
        "worker.share(model, optimizer)` after `worker = maniple.join()`."
    )


def _exit_with_error(act: Callable[[], None]) -> None:
    """Call `act` at exit; if the last exchange fails, the process must not exit with code 0."""
    try:
        act()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, ManipleError) else 1)
