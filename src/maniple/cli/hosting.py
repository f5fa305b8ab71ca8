"""The host of a run as a job of its own, as `maniple submit --host-job` has it started.

python -m maniple.cli.hosting RUN

It ends when all workers have ended. Told to end before that, because somebody else needs the machine, it saves the
center; when its job begins again, it goes on, and the workers find it by the run folder.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from maniple.cli import told
from maniple.cli.doctor import warn_early
from maniple.errors import ManipleError, QueueRefused
from maniple.launch import run_local
from maniple.launch.array import Array
from maniple.launch.slurm import cancel, requeue
from maniple.launch.submission import HOST, WORKERS, Submission
from maniple.record import Folder

_REQUEUE_S, _AGAIN_S = 60.0, 5.0


def main(run: Path) -> int:
    """Be the host of a run that was submitted; gives the exit code."""
    is_late: list[int] = []

    def note(number: int, _: object) -> None:
        """The walltime is near: end, and let the job be queued again."""
        is_late.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, note)
    submission, folder = Submission.read(run), Folder(run)
    if folder.is_stopped:
        return 0
    warn_early(submission.job, is_elsewhere=True)
    try:
        exit_code = run_local(replace(submission.job, name=None, resume=None), Array(submission), run=run)
    except ManipleError:  # it cannot begin, so that nobody will be there for the workers
        if workers := Submission.read(run).jobs.get(WORKERS):
            cancel([workers])
        raise
    if is_late and exit_code == 0 and not folder.is_stopped:
        queue_again(Submission.read(run).jobs[HOST])
    return exit_code


def queue_again(job: str) -> None:
    """Put this job back into the queue. If that is refused it is tried again, for as long as there is time."""
    deadline = time.monotonic() + _REQUEUE_S
    while time.monotonic() < deadline:
        try:
            requeue(job)
        except QueueRefused as error:
            print(f"the host's job is not queued again yet: {error}", file=sys.stderr)
            time.sleep(_AGAIN_S)
        else:
            time.sleep(_REQUEUE_S)  # Slurm ends this process


if __name__ == "__main__":
    told(lambda: sys.exit(main(Path(sys.argv[1]))))
