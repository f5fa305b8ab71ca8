"""The command `maniple stop`: end a run, wherever its host and its workers are."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from maniple.center.snapshot import snapshots
from maniple.cli.job import no_program
from maniple.errors import WaitedTooLong
from maniple.launch import Job
from maniple.launch.death import short
from maniple.launch.slurm import cancel, look
from maniple.launch.stopping import resume_command
from maniple.launch.submission import HOST, WORKERS, Submission
from maniple.launch.whereabouts import find_host
from maniple.record import Folder

_TICK_S = 0.5


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the host, and then for the queue.",
)
@click.argument("run", type=click.Path(path_type=Path))
def stop(*, run: Path, timeout_s: float) -> None:
    """End a run: its workers leave, its host saves the center, and its jobs in a queue are cancelled.

    RUN is its folder, seen from any machine. `--resume RUN` goes on with it later.

    \b
      maniple stop runs/last
    """
    run = run.resolve()
    where, folder = find_host(run), Folder(run)
    jobs = Submission.read(run).jobs if folder.is_submitted else {}
    folder.stop()
    if WORKERS in jobs:
        cancel([jobs[WORKERS]])  # while the host lives, so that they make their last exchange
    job = jobs.get(HOST)
    if where.is_alive or _runs(job):
        click.echo("the host is told: it ends the workers, and saves the center when they have left")
        _wait(lambda: _has_gone(run, job), timeout_s, f"the host, which {where.words}")
    if folder.is_submitted:
        _empty(list(Submission.read(run).jobs.values()), timeout_s)
    where = find_host(run)
    click.echo(f"stopped: the host {where.words}." + (f" Its center: {short(run)}/center" if where.has_ended else ""))
    if (command := _resume(run, folder)) is not None and snapshots(folder.center):
        click.echo(f"to continue: {command}")


def _resume(run: Path, folder: Folder) -> str | None:
    """The command that continues the run; None if it tells of nothing that could be started again."""
    if folder.is_submitted:
        return resume_command(Submission.read(run).job, run, is_queued=True)
    about = folder.read()
    asked: dict[str, Any] = about.get("asked") or {}
    if asked.get("script") is None and asked.get("launcher") == "maniple":
        return resume_command(Job(), run, is_queued=False)
    return None if no_program(run, about, asked) else resume_command(Job(Path()), run, is_queued=False)


def _has_gone(run: Path, job: str | None) -> bool:
    """The host has ended, and not only stopped listening: a large center takes its time to be saved."""
    if (where := find_host(run)).is_dead:
        time.sleep(_TICK_S)  # how it ended is written down a moment after its memory is gone
    return where.has_ended or where.is_dead or (job is not None and not _runs(job))


def _runs(job: str | None) -> bool:
    """A job has begun, and has not ended, as far as is known."""
    tasks = [] if job is None else look([job])
    return tasks is None or any(not task.is_over and task.state != "PENDING" for task in tasks)


def _empty(jobs: list[str], timeout_s: float) -> None:
    """Have no job left in the queue."""

    def is_empty() -> bool:
        tasks = look(jobs)
        return tasks is not None and all(task.is_over for task in tasks)

    if jobs:
        cancel(jobs)
        _wait(is_empty, timeout_s, f"jobs {', '.join(jobs)} to leave the queue")
    click.echo("no job is in the queue")


def _wait(until: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline:
            raise WaitedTooLong(
                f"waited {timeout_s:g} s for {what}. Call `maniple stop` again, with a longer --timeout; `squeue` "
                "tells what is left, and `scancel` ends it."
            )
        time.sleep(_TICK_S)
