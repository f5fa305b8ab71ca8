"""The command `maniple submit`: the workers of a run as jobs of a batch queue."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from maniple.cli.command import PATH, SettingsCommand, takes_settings
from maniple.cli.doctor_command import print_warning, warn_early
from maniple.cli.make_job import job_from
from maniple.connection.find_host import check_no_live_host, find_host
from maniple.errors import InvalidArgument, QueueRefused
from maniple.job import Job, RayResources
from maniple.launch.remote_workers import shortage
from maniple.launch.resume import with_saved_settings
from maniple.launch.run import run_job
from maniple.queues import QUEUES
from maniple.queues.queue import JobRequest, QueueResources
from maniple.queues.submission import HOST, WORKERS, QueuedWorkers, Submission
from maniple.record import RunFolder
from maniple.record.folder import fresh_name
from maniple.rules import parse_rule
from maniple.settings.options import settings_of, take
from maniple.text import count, short


@takes_settings("submit")
@click.command(
    cls=SettingsCommand,
    short_help="Run a script on workers that Slurm or Ray starts.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.argument("script", type=PATH, required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(**options: Any) -> None:
    """Run SCRIPT, or maniple's loop for a --model, on workers that a batch queue starts when there is room.

    Late workers begin with the shared model, and workers whose time is over leave in order. ARGS after SCRIPT are
    passed on to it, with {rank} filled in. The run folder must be on a file system that all nodes see.

    \b
      maniple submit --slurm -n 8 --max-simultaneous 3 --walltime 3:00:00 train.py
      maniple submit --slurm -n 4 --gpus-per-worker 1 --mem 32G train.py --lr 0.1
      maniple submit --slurm -n 8 --host-job train.py  then: maniple status runs/last
      maniple submit --slurm -n 8 --dry-run train.py   print the job scripts
      maniple submit --ray -n 8 --cpus-per-worker 2 --restarts 3 train.py
      maniple submit session.yaml                      everything from a file

    Without --host-job, the host runs here until all tasks have ended; Ctrl-C cancels those that are queued or running.
    Options may also be keys of session files or environment variables, as for `maniple run`.

    Exit codes: 0 success, 1 a worker failed, 2 bad arguments, 3 the system or the queue refused, 4 other errors,
    130 interrupted.
    """
    if options["instances"] is None:
        raise click.UsageError("How many workers? Add --instances N.")
    queues = [name for name in QUEUES if options.pop(name)]
    if options.pop("ray"):
        job = _ray_job(queues, **options)
        job.check()
        assert job.ray is not None
        if (lack := shortage(job.ray, job.workers)) and not job.quiet:  # before anything is made
            print_warning(lack)
        warn_early(job, is_elsewhere=True)
        sys.exit(run_job(job))
    del options["ray_address"], options["restarts"]
    is_dry = options.pop("dry_run")
    submission = _submission(queues, **options)
    if is_dry:
        for name, text in submission.scripts().items():
            click.echo(f"# {submission.request.run / name}\n{text}", nl=True)
        return
    submission.queue.check_commands()
    _check_not_queued(submission.request.run)
    if submission.has_host_job:
        _submit_both(submission)
    else:
        warn_early(submission.job, is_elsewhere=True)
        sys.exit(run_job(submission.job, QueuedWorkers(submission)))


def _submission(queues: list[str], *, host_job: bool, **options: Any) -> Submission:
    if len(queues) != 1:
        raise click.UsageError(f"Where to? Add --{', --'.join(QUEUES)}, or --ray.")
    if "script" not in options:
        raise InvalidArgument(
            "with sync_start: false no workers are started, but submit starts them. Leave sync_start out."
        )
    resources = QueueResources(**take(options, QueueResources))
    QUEUES[queues[0]].check(resources)
    job = job_from(workers=resources.instances, **options)
    job.check()
    _check_rule_of_center(job)
    if job.resume is None:
        job = replace(job, name=job.name or fresh_name(job.runs, job.script or Path("run")))
        run = (job.runs / str(job.name)).resolve()
    else:
        job, run = with_saved_settings(job, job.resume), job.resume.resolve()
        find_host(run)  # tells if that is no run
    if host_job and job.snapshot is not None:
        raise InvalidArgument(
            f"--snapshot {job.snapshot} is where to continue from, but the host of --host-job continues from the "
            "newest each time it starts. Leave --host-job out, or --snapshot."
        )
    command = [str(job.script.absolute())] if job.model is None and job.script else job.command
    request = JobRequest(
        resources, run, Path.cwd(), Path(sys.executable), (*command, *job.args), wait_s=job.host_deadline_s
    )
    return Submission(job, request, host_job, queue_name=queues[0])


def _ray_job(queues: list[str], *, ray_address: str, **options: Any) -> Job:
    """The job of a Ray cluster, which knows neither time limits nor partitions."""
    resources = QueueResources(**take(options, QueueResources))
    given = {"--host-job": options.pop("host_job"), "--dry-run": options.pop("dry_run")}
    for one in settings_of(QueueResources):
        if one.name not in {"instances", "cpus_per_worker", "gpus_per_worker"}:
            given[one.flag] = getattr(resources, one.name) != one.default
    if wrong := [*(f"--{name}" for name in queues), *(flag for flag, is_given in given.items() if is_given)]:
        raise click.UsageError(f"{', '.join(wrong)}: that is not for --ray. Leave it out.")
    room = RayResources(ray_address, resources.cpus_per_worker, resources.gpus_per_worker)
    job = job_from(workers=resources.instances, ray=room, **options)
    _check_rule_of_center(job)
    return job


def _check_rule_of_center(job: Job) -> None:
    rule = None if job.rule is None else parse_rule(job.rule)
    if rule is not None and rule.has_peers:
        raise InvalidArgument(
            f"--rule {job.rule} exchanges through shared memory, but a queue starts workers on any machine. Choose a "
            "rule of the center (easgd, asgd, downpour)."
        )
    if rule is not None and rule.is_synchronous:
        raise InvalidArgument(
            f"--rule {job.rule} has all workers meet, but a queue starts each when there is room for it. Choose a rule "
            "of the center (easgd, asgd, downpour), or start all at once: `srun` in a job of your own."
        )


def _check_not_queued(run: Path) -> None:
    """Raise an error while jobs of the run are queued: two arrays would have two workers of each rank."""
    if RunFolder(run).is_submitted:
        submission = Submission.read(run)
        jobs = list(submission.jobs.values())
        try:
            tasks = submission.queue.tasks(jobs)
        except QueueRefused as error:
            raise QueueRefused(
                f"the queue does not tell whether jobs {', '.join(jobs)} of {run} are over: {error}"
            ) from None
        if any(not task.is_over for task in tasks):
            raise InvalidArgument(
                f"jobs of {run} are in the queue: {', '.join(jobs)}. End them first: maniple stop {short(run)}"
            )


def _submit_both(submission: Submission) -> None:
    run, job = submission.request.run, submission.job
    if job.resume is None:
        folder = RunFolder.create(job.runs, str(job.name))
        try:
            folder.describe(asked=job.record())
        except BaseException:  # a full disk, say
            folder.discard()
            raise
    else:
        check_no_live_host(run)
        RunFolder(run).unstop()  # the host cannot tell an old stop from one that came while it was queued
        RunFolder(run).describe(exit_code=None)
    submission = submission.write().submit(HOST)
    try:
        submission = submission.submit(WORKERS)
    except BaseException:
        submission.queue.cancel([submission.jobs[HOST]])
        raise
    click.echo(f"run folder {short(run)}")
    click.echo(f"job {submission.jobs[HOST]}: the host; job {submission.jobs[WORKERS]}: {count(job.workers, 'worker')}")
    click.echo(f"maniple status {short(run)}\nmaniple stop {short(run)}")
