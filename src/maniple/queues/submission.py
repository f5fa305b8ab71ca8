"""A run in a batch queue: what its folder keeps of the submission, and its workers as the host follows them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from maniple.clock import clock
from maniple.errors import InvalidArgument, ManipleError, QueueRefused, WorkerFailed
from maniple.host import Host
from maniple.job import Job
from maniple.queues import QUEUES
from maniple.queues.queue import JobRequest, Phase, Queue, Task, defer_signals
from maniple.record import RunFolder
from maniple.record.folder import SUBMITTED, write_json
from maniple.text import count, last_words

WORKERS, HOST = "workers", "host"
_POLL_S = 3.0  # between two queries; clusters ask users not to poll more often than every few seconds
_SUBMIT_TIMEOUT_S = 300.0  # a host job waits this long for `maniple submit` to submit the workers' job after it
_REQUEUE_S = 30.0  # an interrupted task that is not queued again by then has ended


class Submission(msgspec.Struct, frozen=True):
    """One run in a queue, as stored in its folder."""

    job: Job
    request: JobRequest = msgspec.field(name="order")
    has_host_job: bool = False
    jobs: dict[str, str] = {}  # ids of the jobs WORKERS and HOST
    queue_name: str = msgspec.field(default="slurm", name="queue")

    @classmethod
    def read(cls, run: Path) -> "Submission":
        """Read the submission of a run folder."""
        path = run / SUBMITTED
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=lambda kind, value: kind(value))
        except OSError as error:
            raise InvalidArgument(
                f"{run} was not submitted to a queue: {path.name} cannot be read ({error.strerror}). Give the folder "
                "of a run started by `maniple submit`; end other runs with Ctrl-C."
            ) from None
        except msgspec.MsgspecError as error:
            raise InvalidArgument(
                f"{path} was not written by this version of maniple: {error}. Use the version that wrote it."
            ) from None

    def write(self) -> "Submission":
        write_json(self.request.run / SUBMITTED, msgspec.to_builtins(self, enc_hook=str))
        return self

    @property
    def queue(self) -> Queue:
        """The queue that it was submitted to."""
        try:
            return QUEUES[self.queue_name]
        except KeyError:
            raise InvalidArgument(
                f"{self.request.run} was submitted to {self.queue_name!r}, which this version of maniple does not know "
                f"({', '.join(QUEUES)}). Use the version that submitted it."
            ) from None

    def scripts(self) -> dict[str, str]:
        """The scripts of all jobs, by file name."""
        kinds = [HOST, WORKERS] if self.has_host_job else [WORKERS]
        return {f"{kind}{self.queue.suffix}": self._script(kind) for kind in kinds}

    def _script(self, kind: str) -> str:
        if kind == HOST:
            return self.queue.host_script(self.request)
        return self.queue.workers_script(self.request, after=self.jobs.get(HOST))

    def submit(self, kind: str) -> "Submission":
        """Submit the job HOST, or WORKERS, which starts after the host's job."""
        path = self.request.run / f"{kind}{self.queue.suffix}"
        path.write_text(self._script(kind), encoding="utf-8")
        with defer_signals():
            job = self.queue.submit(path)
            try:
                return msgspec.structs.replace(self, jobs=self.jobs | {kind: job}).write()
            except BaseException:  # e.g. a full disk: a job that is not recorded could never be cancelled
                self.queue.cancel([job])
                raise


class QueuedWorkers:
    """The workers of a run in a queue, as its host sees them.

    Attributes:
        has_host_job: the host is a job too. When it is ended early it is queued again and resumes.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission, self._queue = submission, submission.queue
        self.queue_name, self.has_host_job = submission.queue_name, submission.has_host_job
        self._folder = RunFolder(submission.request.run)
        self._tasks: dict[int, Task] = {}
        self._host: Host | None = None
        self._created, self._next_poll = clock.monotonic(), 0.0
        self._over_since: float | None = None  # when all tasks were first seen to be over
        self._is_cancelled = self._is_unreachable = False
        self._reported = ""

    @property
    def is_done(self) -> bool:
        """All workers have ended, and none will be started again."""
        if self._over_since is None:
            return False
        may_return = any(task.phase is Phase.INTERRUPTED for task in self._tasks.values())
        return clock.monotonic() - self._over_since >= (_REQUEUE_S if may_return else 0.0)

    def start(self, host: Host) -> str:
        """Submit the workers, unless `maniple submit --host-job` does; returns what to report."""
        self._host = host
        if self.has_host_job:
            return "the workers are in the queue, or will be"
        self._submission = self._submission.write().submit(WORKERS)
        return f"job {self._submission.jobs[WORKERS]}: {count(self._submission.job.workers, 'worker')} in the queue"

    def updates(self) -> list[str]:
        """Poll the queue, at most every few seconds, and return what has changed since the last call."""
        job, now = self._job(), clock.monotonic()
        if now < self._next_poll or (job is None and now - self._created < _SUBMIT_TIMEOUT_S):
            return []
        try:
            tasks = self._queue.tasks([job] if job else [])
        except QueueRefused:
            was_unreachable, self._is_unreachable = self._is_unreachable, True
            text = "the queue does not answer; it is asked again, and training continues"
            return [] if was_unreachable else [text]
        finally:
            self._next_poll = clock.monotonic() + _POLL_S
        self._is_unreachable = False
        lines: list[str] = []
        for task in tasks:
            before = self._tasks.get(task.number)
            if _has_failed(task) and (before is None or not _has_failed(before)):
                lines.append(f"task {task.number} has ended as {task.state} on {task.node}")
                if self._is_lost(task) and self._host is not None:
                    self._host.lose(task.number, task.state, node=task.node)
        self._tasks |= {task.number: task for task in tasks}
        # Tasks that are no longer listed ended some time ago.
        is_over = all(task.is_over for task in tasks)
        self._over_since = (self._over_since or clock.monotonic()) if is_over else None
        reported, self._reported = self._reported, self._states()
        return lines if self._reported == reported else [*lines, f"the queue: {self._reported}"]

    def cancel(self) -> bool:
        """Cancel all workers; returns True once they have ended. Call it until then."""
        if self.is_done or (job := self._job()) is None:
            return True
        if not self._is_cancelled:
            try:
                self._queue.cancel([job])
            except ManipleError:  # the controller may be busy or restarting: the next call tries again
                return False
            self._is_cancelled, self._next_poll = True, 0.0
        self.updates()
        return self._over_since is not None

    def check(self, *, has_joined: bool) -> None:
        """Raise WorkerFailed if workers have failed, or if none has ever joined."""
        lost = [task.number for task in self._tasks.values() if self._is_lost(task)]
        failed = [number for number, task in self._tasks.items() if _has_failed(task) and number not in lost]
        job = self._submission.job
        if lost and job.workers - len(lost) < job.min_workers:
            failed += lost
        if failed:
            failed.sort()
            raise WorkerFailed(
                f"of job {self._job()}, {count(len(failed), 'task')} failed: {', '.join(map(str, failed))}. Of task "
                f"{failed[0]}: {last_words(self._folder.log(failed[0]))}"
            )
        if self._job() is None:
            raise WorkerFailed(
                f"there is no job of workers: `maniple submit` ended before it had submitted them (waited "
                f"{_SUBMIT_TIMEOUT_S:g} s). Submit the run again with --resume {self._folder.path}."
            )
        if not has_joined:
            raise WorkerFailed(
                f"no task of job {self._job()} has called maniple.join(), and there is no center ({self._states()}). "
                f"Look into {self._folder.path / 'logs'}."
            )

    def _job(self) -> str | None:
        """The id of the workers' job; a host job may start before it is known."""
        if WORKERS not in self._submission.jobs and self._folder.is_submitted:
            self._submission = Submission.read(self._submission.request.run)
        return self._submission.jobs.get(WORKERS)

    def _is_lost(self, task: Task) -> bool:
        return task.phase is Phase.LOST and not self._submission.job.strict

    def _states(self) -> str:
        return state_counts(self._tasks.values()) or "nothing"


def state_counts(tasks: Iterable[Task]) -> str:
    """How many tasks are in each state, for people: `3 pending, 1 running`."""
    states = Counter(task.state.lower() for task in tasks)
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items()))


def _has_failed(task: Task) -> bool:
    return task.phase in {Phase.FAILED, Phase.LOST}
