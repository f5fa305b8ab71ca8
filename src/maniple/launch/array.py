"""The workers of a run as a job array of Slurm, watched and ended by their host."""

import time
from collections import Counter

from maniple.errors import ManipleError, WorkerFailed
from maniple.host import Host
from maniple.launch.board import count
from maniple.launch.death import last_words
from maniple.launch.slurm import Task, cancel, look
from maniple.launch.submission import WORKERS, Submission
from maniple.record import Folder

_EVERY_S = 3.0  # between two looks at the queue
_SUBMITTING_S = 300.0  # for so long a host that is a job waits for who submits the workers' jobs after it
_LOST = {"OUT_OF_MEMORY", "BOOT_FAIL"}  # not by a fault of the script: the others continue
_FAILED = {"FAILED", "DEADLINE", *_LOST}
_MAY_RETURN = {"PREEMPTED", "NODE_FAIL"}  # seen for a moment before such a task is queued again
_RETURN_S = 30.0


class Array:
    """A queue of workers (`launch.queue.Queue`)."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._folder = Folder(submission.order.run)
        self._tasks: dict[int, Task] = {}
        self._host: Host | None = None
        self._since, self._next = time.monotonic(), 0.0
        self._over_since: float | None = None  # all tasks are
        self._is_cancelled = self._is_deaf = False
        self._told = ""

    @property
    def comes_back(self) -> bool:
        return self._submission.has_host_job

    @property
    def is_done(self) -> bool:
        if self._over_since is None:
            return False
        may_return = any(task.state in _MAY_RETURN for task in self._tasks.values())
        return time.monotonic() - self._over_since >= (_RETURN_S if may_return else 0.0)

    def begin(self, host: Host) -> str:
        """Submit the array; as a job of its own, the host was submitted together with it."""
        self._host = host
        if not self.comes_back:
            self._submission = self._submission.write().submit_workers()
            return f"job {self._submission.jobs[WORKERS]}: {count(self._submission.job.workers, 'worker')} in the queue"
        return "the workers are in the queue, or will be"

    def news(self) -> list[str]:
        job, now = self._job(), time.monotonic()
        if now < self._next or (job is None and now - self._since < _SUBMITTING_S):
            return []
        found = look([job] if job else [])
        self._next = time.monotonic() + _EVERY_S
        if found is None:
            was_deaf, self._is_deaf = self._is_deaf, True
            return [] if was_deaf else ["the queue does not answer; it is asked again, and training goes on"]
        self._is_deaf = False
        failures = self._new_failures(found)
        said = [f"task {task.number} has ended as {task.state} on {task.node}" for task in failures]
        for task in failures:
            if self._is_lost(task) and self._host is not None:
                self._host.lose(task.number, task.state, node=task.node)
        self._tasks |= {task.number: task for task in found}
        # Those that are not listed any more have ended some time ago.
        is_over = all(task.is_over for task in found)
        self._over_since = (self._over_since or time.monotonic()) if is_over else None
        told, self._told = self._told, self._states()
        return said if self._told == told else [*said, f"the queue: {self._told}"]

    def end(self) -> bool:
        if self.is_done or (job := self._job()) is None:
            return True
        if not self._is_cancelled:
            try:
                cancel([job])
            except ManipleError:  # to be tried again: its controller may be busy, or about to come back
                return False
            self._is_cancelled, self._next = True, 0.0
        self.news()
        return self._over_since is not None

    def check(self, *, has_joined: bool) -> None:
        lost = [task.number for task in self._tasks.values() if self._is_lost(task)]
        failed = sorted(number for number, task in self._tasks.items() if task.state in _FAILED and number not in lost)
        job = self._submission.job
        if lost and job.workers - len(lost) < job.min_workers:
            failed = sorted([*failed, *lost])
        if failed:
            log = self._folder.log(failed[0])
            raise WorkerFailed(
                f"of job {self._job()}, {count(len(failed), 'task')} failed: {', '.join(map(str, failed))}. Of task "
                f"{failed[0]}: {last_words(log)}"
            )
        if self._job() is None:
            raise WorkerFailed(
                f"there is no job of workers: `maniple submit` was ended before it had submitted them (waited "
                f"{_SUBMITTING_S:g} s). Submit the run again with --resume {self._folder.path}."
            )
        if not has_joined:
            raise WorkerFailed(
                f"no task of job {self._job()} has called maniple.join(), and there is no center ({self._states()}). "
                f"Look into {self._folder.path / 'logs'}."
            )

    def _job(self) -> str | None:
        """The id of the array; a host that is a job of its own may begin before it is known."""
        if WORKERS not in self._submission.jobs and self._folder.is_submitted:
            self._submission = Submission.read(self._submission.order.run)
        return self._submission.jobs.get(WORKERS)

    def _is_lost(self, task: Task) -> bool:
        return task.state in _LOST and not self._submission.job.strict

    def _new_failures(self, found: list[Task]) -> list[Task]:
        before = {number for number, task in self._tasks.items() if task.state in _FAILED}
        return [task for task in found if task.state in _FAILED and task.number not in before]

    def _states(self) -> str:
        states = Counter(task.state.lower() for task in self._tasks.values())
        return ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "nothing"
