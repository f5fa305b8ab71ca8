"""The host of a run as a job of its own, as `maniple submit --host-job` has it started.

python -m maniple.cli.hosting RUN

It ends when all workers have ended. Told to end before that, because somebody else needs the machine, it saves the
center; when its job begins again, it goes on, and the workers find it by the run folder.

It is a process of its own: Slurm does not begin a job again whose process was killed, for want of memory say, so the
one that waits for it starts another.
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
from maniple.launch.child import Child
from maniple.launch.death import reason
from maniple.launch.slurm import cancel, requeue
from maniple.launch.submission import HOST, WORKERS, Submission
from maniple.record import Folder

_REQUEUE_S, _AGAIN_S = 60.0, 5.0
_SHORT_S, _SHORT_LIVES = 60.0, 3  # one that dies so soon, so often in a row, is not started again
_HERE = "--here"


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


def keep(run: Path) -> int:
    """Have `main` run in a process of its own. If that is killed, the next one finds the center in memory."""
    child, heard, short_lives = Child(), list[int](), 0

    def pass_on(number: int, _: object) -> None:
        heard.append(number)
        child.signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as it stays for the new process, until it is ready for it
        child.spawn([sys.executable, "-m", "maniple.cli.hosting", str(run), _HERE], env={}, log=Folder(run).log("host"))
        signal.signal(signal.SIGUSR1, pass_on)
        begin = time.monotonic()
        while not child.has_ended(_AGAIN_S):
            pass
        exit_code = child.collect()
        short_lives = short_lives + 1 if time.monotonic() - begin < _SHORT_S else 0
        if exit_code >= 0 or heard or short_lives >= _SHORT_LIVES:
            return exit_code if exit_code >= 0 else 128 - exit_code
        print(f"the host {reason(exit_code)}: it is started again")


if __name__ == "__main__":
    told(lambda: sys.exit((main if _HERE in sys.argv else keep)(Path(sys.argv[1]))))
