"""Slurm: job scripts for sbatch, and its commands squeue, scancel and scontrol."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from maniple.environment import THREAD_VARIABLES
from maniple.errors import InvalidArgument, QueueRefused
from maniple.queues.queue import JobRequest, Phase, Queue, QueueResources, Task
from maniple.settings.options import check_settings

_MEGABYTES = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_RUNNING = {
    "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip
_PHASES = {
    "PENDING": Phase.WAITING,
    "PREEMPTED": Phase.INTERRUPTED,
    "NODE_FAIL": Phase.INTERRUPTED,
    "OUT_OF_MEMORY": Phase.LOST,
    "BOOT_FAIL": Phase.LOST,
    "FAILED": Phase.FAILED,
    "DEADLINE": Phase.FAILED,
} | dict.fromkeys(_RUNNING, Phase.RUNNING)


class Slurm(Queue):
    """Slurm 20.11 or later. The workers are one job array: a task's number is its rank, also after a requeue."""

    title = "Slurm"
    suffix = ".sbatch"
    commands = ("sbatch", "squeue", "scancel")
    task_variables = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT")
    manual = "`squeue` lists the jobs that are left, and `scancel` cancels them"

    def check(self, resources: QueueResources) -> None:
        check_settings(resources)
        # A walltime of 0 means no limit.
        if resources.walltime is not None and 0 < duration_s(resources.walltime) <= resources.leave_early_s:
            raise InvalidArgument(
                f"--walltime {resources.walltime} is not longer than --leave-early {resources.leave_early_s} "
                "(seconds), so each worker would leave as soon as it starts. Write a longer walltime, or a smaller "
                "--leave-early."
            )
        size_mb(resources.mem or "0")

    def workers_script(self, request: JobRequest, *, after: str | None = None) -> str:
        resources = request.resources
        limit = f"%{resources.max_simultaneous}" if resources.max_simultaneous else ""
        options = [
            f"--array=0-{resources.instances - 1}{limit}",
            f"--output={_log(request, 'worker-%a')}",
            f"--signal=B:USR1@{resources.leave_early_s}",
            f"--cpus-per-task={resources.cpus_per_worker}",
            *([f"--gres=gpu:{resources.gpus_per_worker}"] if resources.gpus_per_worker else []),
            *([f"--mem={resources.mem}"] if resources.mem else []),
            *([f"--dependency=after:{after}"] if after else []),
            *resources.sbatch,
        ]
        join = ["-m", "maniple.cli", "join", "--task", f"--wait={request.wait_s:g}", str(request.run)]
        command = [shlex.join([str(request.python), *join])]
        command += [_worker_argument(word, resources.instances) for word in request.command]
        first, *others = THREAD_VARIABLES  # a user's OMP_NUM_THREADS applies to the other libraries too
        threads = [f'export {first}="${{{first}:-{resources.cpus_per_worker}}}"']
        threads += [f'export {name}="${{{name}:-${first}}}"' for name in others]
        return self._script(request, request.run.name, options, [*threads, f"exec {' '.join(command)}"])

    def host_script(self, request: JobRequest) -> str:
        options = [
            f"--output={_log(request, 'host')}",
            f"--signal=B:USR1@{request.resources.leave_early_s}",
            *request.resources.host_sbatch,
        ]
        command = shlex.join([str(request.python), "-m", "maniple.cli.host_job", str(request.run)])
        return self._script(request, f"{request.run.name}-host", options, [f"exec {command}"])

    def _script(self, request: JobRequest, name: str, options: Sequence[str], lines: Sequence[str]) -> str:
        request.check()
        for path in (request.run, request.folder, request.python):
            if "\\" in str(path):  # Slurm reads a backslash in a path as the end of patterns such as %a
                raise InvalidArgument(
                    f"the path {str(path)!r} has a backslash, which Slurm reads otherwise. Rename it."
                )
        resources = request.resources
        self.check(resources)
        common = [
            f"--job-name={_quoted(name)}",
            f"--chdir={_quoted(request.folder)}",
            *([f"--account={_quoted(resources.allocation)}"] if resources.allocation else []),
            *([f"--partition={_quoted(resources.partition)}"] if resources.partition else []),
            *([f"--time={resources.walltime}"] if resources.walltime else []),
            "--nodes=1",
            "--ntasks=1",
            "--requeue",
            "--open-mode=append",
        ]
        header = [f"#SBATCH {option}" for option in (*common, *options)]
        # USR1 announces the walltime. Until Python handles it, it would only kill the process.
        return "\n".join(["#!/bin/bash", *header, "trap '' USR1", "export PYTHONUNBUFFERED=1", *lines, ""])

    def submit(self, script: Path) -> str:
        return self.call("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    def tasks(self, jobs: Sequence[str]) -> list[Task]:
        tasks: list[Task] = []
        for job in jobs:
            try:
                text = self.call("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%F|%K|%T|%N|%r")
            except QueueRefused as error:
                if "Invalid job id" not in str(error):
                    raise
                continue  # Slurm forgets a job some minutes after its end
            for line in text.splitlines():
                identity, number, state, node, reason = line.split("|", 4)
                number = int(number) if number.isdigit() else -1
                reason = "" if reason == "None" else reason
                tasks.append(Task(identity, number, state, phase_of(state), node, reason))
        return tasks

    def cancel(self, jobs: Sequence[str]) -> None:
        try:
            self.call("scancel", *jobs)
        except QueueRefused as error:
            if "Invalid job id" not in str(error):
                raise

    def requeue(self, job: str) -> None:
        self.call("scontrol", "requeue", job)


def phase_of(state: str) -> Phase:
    """What one of Slurm's job states means for the run. COMPLETED, CANCELLED and TIMEOUT are ordinary ends."""
    return _PHASES.get(state, Phase.DONE)


def duration_s(text: str) -> float:
    """Parse a duration as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or infinite."""
    if text.lower() in {"infinite", "unlimited", "n/a", "none"}:
        return float("inf")
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, days if dash else "0"]) or len(parts) > 3:
        raise InvalidArgument(
            f"--walltime {text} is no time for Slurm. Write HOURS:MINUTES:SECONDS, e.g. 3:00:00, DAYS-HOURS or minutes."
        )
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def size_mb(text: str) -> int:
    """Parse an amount of memory as Slurm writes it: 4000, 4000M or 4G."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if match is None:
        raise InvalidArgument(f"--mem {text} is no size for Slurm. Write megabytes, or 16G.")
    return int(int(match[1]) * _MEGABYTES[match[2]])


def _worker_argument(word: str, world: int) -> str:
    """Quote an argument of the worker's command. {rank} is known only where the task runs."""
    return shlex.quote(word).replace("{rank}", "'\"$SLURM_ARRAY_TASK_ID\"'").replace("{world}", str(world))


def _quoted(value: str | Path) -> str:
    """Quote the value of an #SBATCH option where that is needed."""
    text = str(value).replace("\\", r"\\").replace('"', r"\"")
    return f'"{text}"' if set(" #'\"\\") & set(text) else text


def _log(request: JobRequest, name: str) -> str:
    """The log of a job in the run folder. Slurm expands % in it, except in the form %%."""
    return _quoted(Path(str(request.run / "logs").replace("%", "%%")) / f"{name}.log")
