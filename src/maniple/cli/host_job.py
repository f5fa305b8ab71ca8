"""The host of a run as a separate batch job, which `maniple submit --host-job` submits.

    python -m maniple.cli.host_job RUN

The host ends when all workers have ended. If its job is preempted or near its time limit it saves the center, and
continues when the job starts again; workers find it by the run folder.

`supervise` runs the host in a child process. Slurm does not requeue a job whose process was killed, by the
out-of-memory killer for instance, so the parent starts another child.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from maniple.cli import exit_on_error
from maniple.cli.doctor_command import warn_early
from maniple.clock import Deadline
from maniple.errors import ManipleError, QueueRefused
from maniple.launch.process import ChildProcess, exit_text
from maniple.launch.run import run_job
from maniple.queues.queue import COMMAND_SLICE_S
from maniple.queues.submission import HOST, WORKERS, QueuedWorkers, Submission
from maniple.record import RunFolder

_REQUEUE_S, _RETRY_S = 60.0, 5.0  # Slurm sends SIGUSR1 about 60 s before the time limit
_SHORT_S, _SHORT_LIVES = 60.0, 3  # a host that dies this soon, this often in a row, is not restarted
_HERE = "--here"


def main(run: Path) -> int:
    """Host a submitted run in this process; returns the exit code."""
    is_late: list[int] = []

    def end_and_requeue(number: int, _: object) -> None:
        """The time limit is near."""
        is_late.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, end_and_requeue)
    submission, folder = Submission.read(run), RunFolder(run)
    if folder.is_stopped:
        return 0
    warn_early(submission.job, is_elsewhere=True)
    try:
        exit_code = run_job(replace(submission.job, name=None, resume=None), QueuedWorkers(submission), run=run)
    except ManipleError:  # the host cannot start, so the workers would wait in vain
        if workers := Submission.read(run).jobs.get(WORKERS):
            submission.queue.cancel([workers])
        raise
    if is_late and exit_code == 0 and not folder.is_stopped:
        requeue_host(Submission.read(run))
    return exit_code


def requeue_host(submission: Submission) -> None:
    """Requeue this job. If the queue refuses, retry for as long as there is time."""
    deadline = Deadline(_REQUEUE_S, slice_s=COMMAND_SLICE_S)
    while not deadline.is_over():
        try:
            submission.queue.requeue(submission.jobs[HOST])
        except QueueRefused as error:
            print(f"the host's job is not requeued yet: {error}", file=sys.stderr)
            time.sleep(_RETRY_S)
        else:
            time.sleep(_REQUEUE_S)  # the queue ends this process
            return


def supervise(run: Path) -> int:
    """Run `main` in a child process. If the child is killed, the next one finds the center in shared memory."""
    child, signals, short_lives = ChildProcess(), list[int](), 0

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        child.signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited by the child until it has its own handler
        child.spawn(
            [sys.executable, "-m", "maniple.cli.host_job", str(run), _HERE], env={}, log=RunFolder(run).log("host")
        )
        signal.signal(signal.SIGUSR1, pass_on)
        start = time.monotonic()
        while not child.has_ended(_RETRY_S):
            pass
        exit_code = child.collect()
        short_lives = short_lives + 1 if time.monotonic() - start < _SHORT_S else 0
        if exit_code >= 0 or signals or short_lives >= _SHORT_LIVES:
            return exit_code if exit_code >= 0 else 128 - exit_code
        print(f"the host {exit_text(exit_code)}: it is restarted")


if __name__ == "__main__":
    exit_on_error(lambda: sys.exit((main if _HERE in sys.argv else supervise)(Path(sys.argv[1]))))
