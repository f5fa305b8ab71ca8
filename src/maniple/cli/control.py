"""The commands that watch and control a run from outside: `watch`, `status`, `change` and `stop`."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from maniple.center.snapshot import snapshots
from maniple.cli.command import PATH, reaches_host, seconds_option
from maniple.clock import Deadline
from maniple.connection.find_host import find_host, locate_to_watch
from maniple.errors import InvalidArgument, QueueRefused, WaitedTooLong
from maniple.launch.resume import command_to_resume
from maniple.launch.services import listen as open_listener
from maniple.launch.terminal import Display, RunMonitor, open_display, plain_lines
from maniple.queues.queue import COMMAND_SLICE_S, Phase, Queue, Task
from maniple.queues.submission import HOST, WORKERS, Submission, state_counts
from maniple.record import RunFolder
from maniple.text import short
from maniple.user_class import parse_arguments
from maniple.watch import Steering
from maniple.watch.watched_run import WatchedRun
from maniple.wire.address import Address

_TICK_S = 0.5
_LOOK_S = 5.0  # between checks whether the host is alive
_SILENT_S = 60.0  # a host that cannot be asked may be dead if no row has come for this long; one step may take a while


@click.command(short_help="Change the rule or pace of a running run.")
@click.option("--snapshot", is_flag=True, help="Save the center now, before any change.")
@reaches_host
@click.argument("host")
@click.argument("settings", metavar="[NAME=VALUE]...", nargs=-1)
def change(
    *, host: str, settings: tuple[str, ...], snapshot: bool, token_file: Path | None, certificate: Path | None
) -> None:
    """Change settings of a running run. Its workers follow within about a second, between two steps.

    HOST is a run folder that this machine can read, or HOST:PORT. NAME is a parameter of the rule (alpha,
    center_alpha, beta, compensate ...) or of the pace: `every`, in steps, or `maximum_rate`, a share of time. Changes
    also apply to workers that join later and after a restart of the host; the host and every worker record each one in
    a row `changed`. Synchronous rules (bsp, localsgd, msync, swap, tournament) cannot be changed.

    \b
      maniple change runs/last alpha=0.3
      maniple change runs/last maximum_rate=0.1
      maniple change --snapshot runs/last every=20     save the center first
      maniple change --token-file token node-07:29400 alpha=auto
    """
    if not settings and not snapshot:
        raise click.UsageError("Nothing to change. Give NAME=VALUE, for instance alpha=0.3, or --snapshot.")
    steering = Steering(locate_to_watch(host, token_file, certificate))
    values = parse_arguments(settings, "maniple change")
    if snapshot:
        click.echo(f"saved: {steering.snapshot()}")
    if values:
        click.echo(steering.change(values))


@click.command(short_help="End a run and save its center.")
@seconds_option("--timeout", "timeout_s", 120.0, "How long to wait for the host, and then for the queue.")
@click.argument("run", type=PATH)
def stop(*, run: Path, timeout_s: float) -> None:
    """End a run: its workers leave, its host saves the center, and its queued jobs are cancelled.

    RUN is the run folder, on any machine that can read it. `--resume RUN` continues the run later.

    \b
      maniple stop runs/last
    """
    run = run.resolve()
    where, folder = find_host(run), RunFolder(run)
    submission = Submission.read(run) if folder.is_submitted else None
    folder.stop()
    if submission is not None and WORKERS in submission.jobs:
        submission.queue.cancel([submission.jobs[WORKERS]])  # while the host lives: they make their last exchange
    if where.is_alive or _host_job_runs(submission):
        click.echo("the host ends the workers, and saves the center when they have left")
        _wait(lambda: _has_gone(run, submission), timeout_s, f"the host, which {where.description}", submission)
    if folder.is_submitted:
        _cancel_all(Submission.read(run), timeout_s)
    where = find_host(run)
    click.echo(
        f"stopped: the host {where.description}." + (f" Its center: {short(run)}/center" if where.has_ended else "")
    )
    if (command := command_to_resume(run)) is not None and snapshots(folder.center):
        click.echo(f"to continue: {command}")


def _has_gone(run: Path, submission: Submission | None) -> bool:
    """The host has ended. It stops listening earlier: saving a large center takes time."""
    if (where := find_host(run)).is_dead:
        time.sleep(_TICK_S)  # a host that ends records its exit code a moment after its memory is gone
    has_host_job = submission is not None and HOST in submission.jobs
    return where.has_ended or where.is_dead or (has_host_job and not _host_job_runs(submission))


def _host_job_runs(submission: Submission | None) -> bool:
    """The host is a job that has started and not ended, or the queue does not answer."""
    if submission is None or HOST not in submission.jobs:
        return False
    return _has_task(submission.queue, [submission.jobs[HOST]], lambda task: task.phase is Phase.RUNNING)


def _has_task(queue: Queue, jobs: list[str], is_meant: Callable[[Task], bool]) -> bool:
    """Whether there is such a task in the queue, or the queue does not answer."""
    try:
        return any(is_meant(task) for task in queue.tasks(jobs))
    except QueueRefused:
        return True


def _cancel_all(submission: Submission, timeout_s: float) -> None:
    """Cancel the jobs of a run, and wait until none is in the queue."""
    queue, jobs = submission.queue, list(submission.jobs.values())
    if jobs:
        queue.cancel(jobs)
        what = f"jobs {', '.join(jobs)} to leave the queue"
        _wait(lambda: not _has_task(queue, jobs, lambda task: not task.is_over), timeout_s, what, submission)
    click.echo("no job is in the queue")


def _wait(until: Callable[[], bool], timeout_s: float, what: str, submission: Submission | None) -> None:
    deadline = Deadline(timeout_s, slice_s=COMMAND_SLICE_S)
    while not until():
        if deadline.is_over():
            hint = "" if submission is None else f" {submission.queue.manual}."
            raise WaitedTooLong(
                f"waited {timeout_s:g} s for {what}. Call `maniple stop` again, with a longer --timeout.{hint}"
            )
        time.sleep(_TICK_S)


@click.command(short_help="Show a run's host, queued jobs and workers.")
@click.argument("run", type=PATH)
def status(*, run: Path) -> None:
    """Show a run's host, its jobs in the queue, and its workers.

    RUN is a run folder that this machine can read.

    \b
      maniple status runs/last
    """
    run = run.resolve()
    where = find_host(run)  # first: raises if this is no run folder
    click.echo(f"run   {run}")
    click.echo(f"host  {where.description}")
    for line in _jobs(run):
        click.echo(f"job   {line}")
    monitor = RunMonitor(RunFolder(run), 0)
    monitor.refresh()
    if where.is_dead:
        monitor.mark_host_dead(time.time())
    for line in plain_lines(monitor.workers, monitor.totals()):
        click.echo(line)


def _jobs(run: Path) -> list[str]:
    if not RunFolder(run).is_submitted:
        return []
    lines: list[str] = []
    submission = Submission.read(run)
    for kind, job in submission.jobs.items():
        try:
            tasks = submission.queue.tasks([job])
        except (QueueRefused, InvalidArgument) as error:  # the queue's commands may not be on this machine
            reason = "the queue does not answer" if isinstance(error, QueueRefused) else str(error)
            lines.append(f"{job} ({kind}): {reason}")
            continue
        reasons = sorted({task.reason for task in tasks if task.phase is Phase.WAITING} - {""})
        nodes = sorted({task.node for task in tasks if task.node and not task.is_over})
        where = (f" on {', '.join(nodes)}" if nodes else "") + (f" (waiting: {', '.join(reasons)})" if reasons else "")
        lines.append(f"{job} ({kind}): {state_counts(tasks) or 'ended, and forgotten by the queue'}{where}")
    return lines


@click.command(short_help="Follow a run live, in the terminal or a browser.")
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--logs", is_flag=True, help="Also show what the workers print.")
@click.option("--json", "is_json", is_flag=True, help="Print the state as lines of JSON.")
@click.option("--web", is_flag=True, help="Serve a web page until Ctrl-C (extra `watch`).")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1:0",
    show_default=True,
    help="With --web: address of the page; port 0 is a free one, and 0.0.0.0 lets other machines in.",
)
@click.option("--read-only", is_flag=True, help="With --web: the page cannot change or stop the run.")
@click.option("--browser", is_flag=True, help="With --web: open the page in a browser here.")
@reaches_host
@click.argument("run", type=PATH)
def watch(
    *,
    run: Path,
    once: bool,
    logs: bool,
    is_json: bool,
    web: bool,
    listen: str,
    read_only: bool,
    browser: bool,
    token_file: Path | None,
    certificate: Path | None,
) -> None:
    """Follow a run until it ends: its workers, their speed and loss, and the time that exchanges take.

    RUN is the run folder, on any machine that can read it, or the HOST:PORT at which the host listens. Several people
    can watch a run at once, during training or afterwards. The output of workers stays on the host's machine.

    \b
      maniple watch runs/last
      maniple watch runs/last --json | jq .totals.samples_per_s
      maniple watch runs/last --web                     charts and controls
      maniple watch node-07:29400 --token-file token    a run on another machine

    Columns: speed, in samples (or steps) per second; loss, as last logged; sync, the share of time in exchanges;
    staleness, the number of exchanges by others since the worker's last one. The last line: the speed-up over one
    worker, if the run has a --baseline; the mean number of busy workers; goodput, the share of all workers' time that
    went into training; and the version of the center, which counts the exchanges or rounds that changed it. Below it
    is the --target of the run and the time to it.
    """
    with WatchedRun(str(run), token_file, certificate) as subject:
        if web:
            with open_listener(Address.parse(listen, default_port=0)) as listener:  # raises without the extra
                from maniple.watch.site import show

                show(subject, listener, may_steer=not read_only, opens=browser)
            return
        if logs and subject.is_elsewhere:
            raise InvalidArgument(
                f"--logs needs the run folder, and {run} is a host whose folder is not on this machine. Leave --logs "
                "out, or watch the run on its own machine."
            )
        with open_display(quiet=False, is_json=is_json) as view, suppress(KeyboardInterrupt):
            _follow(subject, view, once=once, logs=logs)


def _follow(subject: WatchedRun, view: Display, *, once: bool, logs: bool) -> None:
    board, last_notice, next_look = RunMonitor(subject.folder, 0), "", 0.0
    if not once:
        view.say(f"run {subject.name}")
    while True:
        subject.refresh()
        board.refresh()
        printed = board.printed()
        is_over = board.host_exit_code is not None or subject.is_over
        if not is_over and time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_S
            notice, silence = _check_host(subject, board)
            if notice and notice != last_notice:
                view.say(notice + silence)
            last_notice = notice
        view.show(board, printed if logs else [], is_last=once or is_over)
        if once or is_over:
            return
        time.sleep(_TICK_S)


def _check_host(subject: WatchedRun, board: RunMonitor) -> tuple[str, str]:
    """Update the board if the host is dead or silent; returns what to say about the host, and for how long."""
    where = subject.find_host()
    if where.is_dead:
        time.sleep(_TICK_S)  # a host that ends records its exit code a moment after its memory is gone
        where = subject.find_host()
    if where.is_dead:
        board.mark_host_dead(time.time())
    is_silent = board.silent_s > _SILENT_S and not where.has_ended
    if where.is_alive and not (where.is_assumed and is_silent):
        return "", ""
    if is_silent:
        board.clear_rates()
    silence = f". No row was written for {board.silent_s:,.0f} s" if is_silent and not where.is_dead else ""
    return f"the host {where.description}", silence
