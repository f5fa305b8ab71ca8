"""The interface of a batch queue: what `maniple submit`, `status`, `stop` and the host of a run need from one.

To support another queue, derive a class from `Queue` in a new file, add it to `maniple.queues.QUEUES`,
and declare its option, `--NAME`, in `settings/options.py`.
"""

import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from maniple.environment import inherited_variables
from maniple.errors import InvalidArgument, QueueRefused, require_printable
from maniple.settings.options import QueueResources

_COMMAND_TIMEOUT_S = 60.0  # the controller of a busy cluster may take tens of seconds to answer
COMMAND_SLICE_S = 90.0  # an upper bound of the time between two looks at a deadline, with one command in between
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Phase(Enum):
    """What the state of a task means for the run."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"  # ended in order, or cancelled
    INTERRUPTED = "interrupted"  # preempted or lost with its node: usually queued again within seconds
    LOST = "lost"  # ended by no fault of the script: the other workers continue
    FAILED = "failed"


@dataclass(frozen=True)
class Task:
    """One task of a job array, or a single job."""

    job: str
    number: int  # -1: not part of an array
    state: str  # the queue's own name for it, such as RUNNING
    phase: Phase
    node: str = ""
    reason: str = ""  # why it is waiting

    @property
    def is_over(self) -> bool:
        """Whether it has ended. An interrupted task may be queued again."""
        return self.phase not in {Phase.WAITING, Phase.RUNNING}


@dataclass(frozen=True)
class JobRequest:
    """A run as the queue is to start it. All paths are absolute."""

    resources: QueueResources
    run: Path  # the run folder
    folder: Path  # working directory of the workers
    python: Path
    command: tuple[str, ...]  # what a worker's interpreter runs, with its arguments
    wait_s: float = 600.0  # how long a worker waits for a host that has not started or is away

    def check(self) -> None:
        """Raise InvalidArgument for what cannot be written to a job script."""
        paths = {"the run folder": self.run, "the working folder": self.folder, "python": self.python}
        for name, path in paths.items():
            require_printable(name, str(path))
        for word in self.command:
            require_printable("the script or its argument", word)


class Queue(ABC):
    """A batch queue, used through its command-line programs."""

    title: ClassVar[str]  # its name for people
    suffix: ClassVar[str]  # of job scripts in the run folder
    commands: ClassVar[tuple[str, ...]]  # programs that must be in PATH
    task_variables: ClassVar[tuple[str, str, str]]  # tell a task its number, the number of tasks and its restarts
    manual: ClassVar[str]  # how to list and cancel jobs by hand, for error messages

    @abstractmethod
    def check(self, resources: QueueResources) -> None:
        """Raise InvalidArgument for resources that this queue cannot express."""

    @abstractmethod
    def workers_script(self, request: JobRequest, *, after: str | None = None) -> str:
        """The script of the workers' job array; it starts once the job `after` has begun."""

    @abstractmethod
    def host_script(self, request: JobRequest) -> str:
        """The script of the host's job. When preempted it is queued again and resumes."""

    @abstractmethod
    def submit(self, script: Path) -> str:
        """Submit a job script and return the job's id."""

    @abstractmethod
    def tasks(self, jobs: Sequence[str]) -> list[Task]:
        """The tasks of `jobs`, including recently ended ones; jobs that the queue has forgotten are left out.

        Raises:
            QueueRefused: the queue does not answer now.
        """

    @abstractmethod
    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel waiting and running jobs; jobs that have ended are ignored."""

    @abstractmethod
    def requeue(self, job: str) -> None:
        """End a running job and queue it again."""

    def check_commands(self) -> None:
        """Raise InvalidArgument if one of the queue's programs is not in PATH."""
        for command in self.commands:
            self.find(command)

    def find(self, command: str) -> str:
        """The path of one of the queue's programs."""
        if (path := shutil.which(command)) is None:
            raise InvalidArgument(
                f"{self.title} needs the command {command}, which is not in PATH. Run maniple on a login node of the "
                f"cluster, or load the module that provides {self.title}."
            )
        return path

    def call(self, command: str, *arguments: str) -> str:
        """Run one of the queue's programs and return its output. Raises QueueRefused if it fails."""
        try:
            done = subprocess.run(
                [self.find(command), *arguments],
                env=inherited_variables(),  # without MANIPLE_*: a token must not be stored in the queue
                capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
                process_group=0,  # Ctrl-C must not interrupt it half-way
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise QueueRefused(
                f"{command} has not answered within {_COMMAND_TIMEOUT_S:g} s. Check whether {self.title} is up."
            ) from None
        except OSError as error:  # e.g. no process can be started
            raise QueueRefused(f"{command} cannot be started: {error}. Try again when this machine has room.") from None
        if done.returncode:
            text = done.stderr.strip() or done.stdout.strip()
            raise QueueRefused(
                f"{command} has refused ({done.returncode}): {text}. Check the options given for {self.title}."
            )
        return done.stdout


@contextmanager
def defer_signals() -> Generator[None]:
    """Hold back interrupts, so that the id of a job that was submitted is also written down."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)
