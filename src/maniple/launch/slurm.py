"""Slurm: the texts of its jobs, which are pure, and the few calls of its commands."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maniple.errors import InvalidArgument, QueueRefused, require_printable
from maniple.launch.amounts import duration_s, size_mb
from maniple.place import THREAD_VARIABLES, inherited

_CALL_S = 60.0  # for so long a command of Slurm is waited for; its controller may be busy
# States of a task that is not over.
_GOING_ON = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What is asked of Slurm."""

    instances: int  # tasks of the array, each of which is one worker
    max_simultaneous: int = 0  # 0: as many as there is room for
    allocation: str | None = None
    partition: str | None = None
    walltime: str | None = None
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    mem: str | None = None
    leave_early_s: int = 60  # before the walltime
    sbatch: tuple[str, ...] = ()  # options of the workers' job, as they are
    host_sbatch: tuple[str, ...] = ()  # those of the host's

    def check(self) -> None:
        """Raise InvalidArgument if it cannot be asked."""
        for name, least in (
            ("instances", 1), ("max_simultaneous", 0), ("gpus_per_worker", 0), ("cpus_per_worker", 1),
            ("leave_early_s", 0),
        ):  # fmt: skip
            if (value := getattr(self, name)) < least:
                option = name.removesuffix("_s").replace("_", "-")
                raise InvalidArgument(f"--{option} {value} is below {least}. Write {max(least, 1)} or more.")
        if self.walltime is not None and 0 < duration_s(self.walltime) <= self.leave_early_s:  # 0 is no limit
            raise InvalidArgument(
                f"--walltime {self.walltime} is not longer than --leave-early {self.leave_early_s} (seconds): each "
                "worker would be told to leave when it begins. Write a longer one, or a smaller --leave-early."
            )
        size_mb(self.mem or "0")
        texts = {"--allocation": self.allocation, "--partition": self.partition, "--mem": self.mem}
        texts |= {"--walltime": self.walltime}
        for name, text in texts.items():
            require_printable(name, text or "")
        for name, options in (("--sbatch", self.sbatch), ("--host-sbatch", self.host_sbatch)):
            for text in options:
                require_printable(name, text)


@dataclass(frozen=True)
class Order:
    """A run as Slurm is to start it; all paths are absolute."""

    resources: Resources
    run: Path  # its folder
    folder: Path  # in which the workers run
    python: Path
    command: tuple[str, ...]  # what a worker's interpreter runs, with its arguments
    wait_s: float = 600.0  # for a host that has not begun or is away

    def check(self) -> None:
        """Raise InvalidArgument for what cannot be written to a script of sbatch."""
        for what, value in (("the run folder", self.run), ("the working folder", self.folder), ("python", self.python)):
            require_printable(what, str(value))
            if "\\" in str(value):  # in a path, Slurm takes it for the end of its own words such as %a
                raise InvalidArgument(f"{what} {str(value)!r} has a backslash, which Slurm reads otherwise. Rename it.")
        for word in self.command:
            require_printable("the script or its argument", word)


@dataclass(frozen=True)
class Task:
    """One task of an array, or a job that is none, as the queue tells."""

    job: str
    number: int  # -1: no array
    state: str  # RUNNING, say
    node: str
    reason: str

    @property
    def is_over(self) -> bool:
        """It has ended, and will not begin again by itself."""
        return self.state not in _GOING_ON


def workers_text(order: Order, *, after: str | None = None) -> str:
    """The script of the workers' job array; `after` is the job that must have begun before."""
    asked, last = order.resources, order.resources.instances - 1
    options = [
        f"--array=0-{last}" + (f"%{asked.max_simultaneous}" if asked.max_simultaneous else ""),
        f"--output={_log(order, 'worker-%a')}",
        f"--signal=B:USR1@{asked.leave_early_s}",
        f"--cpus-per-task={asked.cpus_per_worker}",
        *([f"--gres=gpu:{asked.gpus_per_worker}"] if asked.gpus_per_worker else []),
        *([f"--mem={asked.mem}"] if asked.mem else []),
        *([f"--dependency=after:{after}"] if after else []),
        *asked.sbatch,
    ]
    join = [str(order.python), "-m", "maniple.cli", "join", "--task", f"--wait={order.wait_s:g}", str(order.run)]
    line = " ".join([shlex.join(join), *(_argument(word, asked.instances) for word in order.command)])
    first, *others = THREAD_VARIABLES  # a user's OMP_NUM_THREADS holds for the other libraries too
    threads = [f'export {first}="${{{first}:-{asked.cpus_per_worker}}}"']
    threads += [f'export {name}="${{{name}:-${first}}}"' for name in others]
    return _text(order, order.run.name, options, [*threads, f"exec {line}"])


def host_text(order: Order) -> str:
    """The script of the host's own job: preempted, it is queued again, and goes on where it was."""
    options = [
        f"--output={_log(order, 'host')}",
        f"--signal=B:USR1@{order.resources.leave_early_s}",
        *order.resources.host_sbatch,
    ]
    line = shlex.join([str(order.python), "-m", "maniple.cli.hosting", str(order.run)])
    return _text(order, f"{order.run.name}-host", options, [f"exec {line}"])


def _text(order: Order, name: str, options: Sequence[str], lines: Sequence[str]) -> str:
    order.check()
    asked = order.resources
    asked.check()
    common = [
        f"--job-name={_quoted(name)}",
        f"--chdir={_quoted(order.folder)}",
        *([f"--account={_quoted(asked.allocation)}"] if asked.allocation else []),
        *([f"--partition={_quoted(asked.partition)}"] if asked.partition else []),
        *([f"--time={asked.walltime}"] if asked.walltime else []),
        "--nodes=1",
        "--ntasks=1",
        "--requeue",
        "--open-mode=append",
    ]
    header = [f"#SBATCH {option}" for option in (*common, *options)]
    # Until Python is ready for it, the signal before the walltime would only kill the process.
    return "\n".join(["#!/bin/bash", *header, "trap '' USR1", "export PYTHONUNBUFFERED=1", *lines, ""])


def _argument(word: str, world: int) -> str:
    """A word of the worker's command. {rank} is known where the task runs: the quotes end before it and begin again."""
    return shlex.quote(word).replace("{rank}", "'\"$SLURM_ARRAY_TASK_ID\"'").replace("{world}", str(world))


def _quoted(value: str | Path) -> str:
    """A value as an option of sbatch has it: in quotes if need be."""
    text = str(value).replace("\\", r"\\").replace('"', r"\"")
    return f'"{text}"' if set(" #'\"\\") & set(text) else text


def _log(order: Order, name: str) -> str:
    """What a job prints goes to the run folder. Slurm has words of its own for %a and others."""
    return _quoted(Path(str(order.run / "logs").replace("%", "%%")) / f"{name}.log")


def check_commands() -> None:
    """Raise InvalidArgument if a command of Slurm is missing, before anything is begun."""
    for command in ("sbatch", "squeue", "scancel"):
        _find(command)


def submit(script: Path) -> str:
    """Submit a job; gives its id."""
    return _call("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def look(jobs: Sequence[str]) -> list[Task] | None:
    """The tasks of some jobs, those that have just ended too; None if the queue cannot be asked now.

    Slurm forgets jobs some minutes after their end: those are not among them.
    """
    tasks: list[Task] = []
    for job in jobs:
        try:
            text = _call("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%F|%K|%T|%N|%r")
        except QueueRefused as error:
            if "Invalid job id" in str(error):
                continue
            return None
        for line in text.splitlines():
            identity, number, state, node, reason = line.split("|", 4)
            tasks.append(Task(identity, int(number) if number.isdigit() else -1, state, node, reason))
    return tasks


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs, queued and running ones; what has ended stays so."""
    try:
        _call("scancel", *jobs)
    except QueueRefused as error:
        if "Invalid job id" not in str(error):
            raise


def requeue(job: str) -> None:
    """Let a running job be ended and queued again."""
    _call("scontrol", "requeue", job)


def _find(command: str) -> str:
    if (path := shutil.which(command)) is None:
        raise InvalidArgument(
            f"Slurm needs the command {command}, and there is none in PATH. Call maniple on a machine of the cluster, "
            "or load the module that brings Slurm."
        )
    return path


def _call(command: str, *words: str) -> str:
    try:
        done = subprocess.run(
            [_find(command), *words],
            env=inherited(),  # without what a place is: neither a token nor an address goes into the queue
            capture_output=True, text=True, timeout=_CALL_S, stdin=subprocess.DEVNULL, check=False,
            process_group=0,  # Ctrl-C at the terminal is not for it: what it was asked to do would be half done
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise QueueRefused(
            f"{command} has not answered within {_CALL_S:g} s. Is Slurm's controller up? `sinfo` tells."
        ) from None
    except OSError as error:  # no process can be started, say
        raise QueueRefused(f"{command} cannot be called: {error}. Try again when this machine has room.") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise QueueRefused(f"{command} has refused ({done.returncode}): {said}. Check the options given for Slurm.")
    return done.stdout
