"""The end of a run before its time: what a person should know of it, and when a host follows `maniple stop`."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from maniple.host import Host
from maniple.launch.board import Board
from maniple.launch.death import short
from maniple.launch.job import Job
from maniple.record import Folder
from maniple.story import Totals

_PATIENCE_S = 60.0
_LOOK_S = 1.0  # between two looks at whether anything was validated
_LEAVING_S = 60.0  # for tasks of a queue that were cancelled; Slurm kills them half a minute after it has told them


def resume_command(job: Job, run: Path, *, is_queued: bool) -> str | None:
    """The command that continues a run; None where another launcher starts the workers."""
    if job.guests is not None:
        return None
    if job.script is None:
        return f"maniple serve --resume {short(run)}"
    if job.ray is not None or is_queued:
        queue = "--ray" if job.ray is not None else "--slurm"
        what = f"--model {job.model}" if job.model else shlex.join([str(job.script), *job.args])
        return f"maniple submit {queue} -n {job.workers} --resume {short(run)} {what}"
    return f"maniple run --resume {short(run)}"


class Stopping:
    """Tells the reason once, and later who does not follow."""

    def __init__(self) -> None:
        self._since = 0.0
        self._is_told = False

    def news(self, reason: str, running: Sequence[int]) -> list[str]:
        """What to say now, given the controller's reason and the workers that are still running."""
        if not reason:
            return []
        now = time.monotonic()
        if not self._since:
            self._since = now
            return [f"everybody stops: {reason}"]
        if self._is_told or not running or now - self._since < _PATIENCE_S:
            return []
        self._is_told = True
        who = ", ".join(map(str, running))
        return [
            f"told to stop {_PATIENCE_S:.0f} s ago and still running: {who}. A loop ends by itself if it takes its "
            "samples from worker.sampler, or looks at worker.should_stop"
        ]


class Unvalidated:
    """Tells once that --patience or --validate-every has no effect, because nothing is validated.

    A controller of one's own may count validations in its own way, so nothing is said of such a run.
    """

    def __init__(self, job: Job, host: Host) -> None:
        self._limits, self._host = job.limits, host
        self._is_over = job.controller is not None or not (job.limits.patience or job.limits.validate_every)
        self._next = 0.0
        self._before: Totals | None = None  # of earlier lives of the run

    def news(self, board: Board, *, is_last: bool = False) -> str:
        """What to say now: at the end of the run, or when two epochs have passed and a validation was due twice."""
        if self._is_over or (time.monotonic() < self._next and not is_last):
            return ""
        self._next = time.monotonic() + _LOOK_S
        totals = board.totals
        before = self._before = self._before or totals
        steps, samples = totals.steps - before.steps, totals.samples - before.samples
        is_late = 0 < 2 * board.epoch_size <= samples and steps >= 2 * self._limits.validate_every
        if not is_late and not (is_last and steps):
            return ""
        self._is_over = True
        if self._host.validations:
            return ""
        self._host.events.write("unvalidated")
        values = {"--patience": self._limits.patience, "--validate-every": self._limits.validate_every}
        given = " and ".join(f"{name} {value}" for name, value in values.items() if value)
        return (
            f"{given} {'have' if all(values.values()) else 'has'} no effect: nothing was validated. Call "
            'worker.ask("validated", loss=...) after each epoch; or give --validate-every N, and validate when '
            'worker.ask("next") says so (docs/controller.md)'
        )


class Stop:
    """The mark of `maniple stop` in a run folder.

    A host alone that has taken the place of another knows nothing of workers in a queue. Who stops the run has their
    jobs cancelled, and the host gives them the time for their last exchange.
    """

    def __init__(self, folder: Folder, *, is_alone: bool) -> None:
        self._folder, self._lets_leave = folder, is_alone and folder.is_submitted
        self._since = 0.0

    def is_due(self, live: int) -> bool:
        """The host should end now, with `live` workers there."""
        if not self._folder.is_stopped:
            return False
        self._since = self._since or time.monotonic()
        return not self._lets_leave or live == 0 or time.monotonic() - self._since > _LEAVING_S
