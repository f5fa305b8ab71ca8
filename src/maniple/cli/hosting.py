"""The host of a run as a job of its own, as `maniple submit --host-job` has it started.

python -m maniple.cli.hosting RUN

It ends when all workers have ended. Told to end before that, because somebody else needs the machine, it saves the
center; when its job begins again, it goes on, and the workers find it by the run folder.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from maniple.cli import told
from maniple.errors import QueueRefused
from maniple.launch import run_local
from maniple.launch.array import Array
from maniple.launch.slurm import requeue
from maniple.launch.submission import HOST, Submission
from maniple.record import Folder

_REQUEUE_S = 60.0


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
    exit_code = run_local(replace(submission.job, name=None, resume=None), Array(submission), run=run)
    if is_late and exit_code == 0 and not folder.is_stopped:
        with suppress(QueueRefused):
            requeue(Submission.read(run).jobs[HOST])
            time.sleep(_REQUEUE_S)  # Slurm ends this process
    return exit_code


if __name__ == "__main__":
    told(lambda: sys.exit(main(Path(sys.argv[1]))))
