"""The command `maniple submit`: the workers of a run as jobs of a batch queue."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from maniple.cli.doctor import tell_warning, warn_early
from maniple.cli.job import job_from
from maniple.cli.settings import loss_settings, model_settings, restarts, settings
from maniple.errors import InvalidArgument, QueueRefused
from maniple.launch import Job, run_local
from maniple.launch.array import Array
from maniple.launch.board import count
from maniple.launch.death import short
from maniple.launch.memory import remembered
from maniple.launch.ray import shortage
from maniple.launch.room import Room
from maniple.launch.slurm import Order, Resources, cancel, check_commands, look
from maniple.launch.submission import HOST, WORKERS, Submission
from maniple.launch.whereabouts import check_gone, find_host
from maniple.record import Folder
from maniple.record.folder import fresh_name
from maniple.rules import parse_rule
from maniple.session import Configured


@click.command(cls=Configured, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--slurm", is_flag=True, help="Submit to Slurm.")
@click.option("--ray", is_flag=True, help="Let a Ray cluster place the workers.")
@click.option("-n", "--instances", type=int, metavar="N", help="Workers: the tasks of a job array, or actors of Ray.")
@click.option(
    "--ray-address", metavar="HOST:PORT", default="auto", show_default=True, help="The Ray cluster; auto: that of here."
)
@restarts("With --ray: place a lost worker again, up to K times each. Slurm queues such tasks again by itself.")
@loss_settings
@click.option(
    "--max-simultaneous", type=int, default=0, metavar="K", help="At most K of them at a time. Default: no limit."
)
@click.option("--allocation", metavar="NAME", help="The account that is charged (--account of sbatch).")
@click.option("--partition", metavar="NAME", help="The partition of all jobs.")
@click.option(
    "--walltime", metavar="TIME", help="For so long each job may run, e.g. 3:00:00. Default: as the partition says."
)
@click.option("--gpus-per-worker", type=int, default=0, show_default=True, metavar="G", help="GPUs of each worker.")
@click.option("--cpus-per-worker", type=int, default=1, show_default=True, metavar="C", help="Cores of each worker.")
@click.option("--mem", metavar="SIZE", help="Memory of each worker, e.g. 16G.")
@click.option(
    "--leave-early",
    "leave_early_s",
    type=int,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="So long before its walltime each worker makes its last exchange and leaves.",
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="An option of sbatch for the workers, as it is: --sbatch --qos=high. Repeatable.",
)
@click.option(
    "--host-sbatch", multiple=True, metavar="OPTION", help="The same for the host's job of --host-job. Repeatable."
)
@click.option(
    "--host-job", is_flag=True, help="Let the host be a job of its own too, and return at once; else it runs here."
)
@click.option("--dry-run", is_flag=True, help="Print the scripts of the jobs, and submit nothing.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="0.0.0.0:0",
    show_default=True,
    help="Where the host listens; all nodes must reach it.",
)
@model_settings
@settings
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(**options: Any) -> None:
    """Run SCRIPT, or the loop for a --model, on workers that a batch queue starts, each when there is room for it.

    Late workers begin from the shared model, and those whose time is over leave in order. What follows SCRIPT is its
    own: {rank} in it becomes the number of the task. The run folder must be on a file system that all nodes see.

    \b
      maniple submit --slurm -n 8 --max-simultaneous 3 --walltime 3:00:00 train.py --lr 0.1
      maniple submit --slurm -n 4 --gpus-per-worker 1 --cpus-per-worker 8 --mem 32G train.py
      maniple submit --slurm -n 8 --host-job train.py      then: maniple status runs/last, maniple stop runs/last
      maniple submit --slurm -n 8 --dry-run train.py       print what would be submitted
      maniple submit --ray -n 8 --cpus-per-worker 2 --restarts 3 train.py
      maniple submit session.yaml                          script, arguments and options from a file

    Without --host-job, the host runs here until all tasks have ended; Ctrl-C cancels those that are queued or running.
    Options can stand in session files and variables, as those of `maniple run`.

    Exit codes: 0 done, 1 a worker failed, 2 bad arguments, 3 the system or the queue refused, 4 other, 130 interrupted.
    """
    if options["instances"] is None:
        raise click.UsageError("How many workers? Add --instances N.")
    if options.pop("ray"):
        job = _placed(**options)
        job.check()
        _warn_placed(job)  # before anything is made
        sys.exit(run_local(job))
    del options["ray_address"], options["restarts"]
    submission, is_dry = _submission(**options)
    if is_dry:
        for name, text in submission.texts().items():
            click.echo(f"# {submission.order.run / name}\n{text}", nl=True)
        return
    check_commands()
    _refuse_second(submission.order.run)
    if submission.has_host_job:
        _submit_both(submission)
    else:
        warn_early(submission.job, is_elsewhere=True)
        sys.exit(run_local(submission.job, Array(submission)))


def _submission(*, slurm: bool, host_job: bool, dry_run: bool, **options: Any) -> tuple[Submission, bool]:
    if not slurm:
        raise click.UsageError("Where to? Add --slurm, or --ray.")
    if "script" not in options:
        raise InvalidArgument(
            "with sync_start: false no workers are started, but submit starts them. Leave sync_start out."
        )
    resources = Resources(**{part.name: options.pop(part.name) for part in fields(Resources)})
    resources.check()
    job = job_from(workers=resources.instances, **options)
    job.check()
    _refuse_circle(job)
    if job.resume is None:
        job = replace(job, name=job.name or fresh_name(job.runs, job.script or Path("run")))
        run = (job.runs / str(job.name)).resolve()
    else:
        job, run = remembered(job, job.resume), job.resume.resolve()
        find_host(run)  # tells if that is no run
    if host_job and job.snapshot is not None:
        raise InvalidArgument(
            f"--snapshot {job.snapshot} is where to go on from, but a host that is a job goes on from the newest each "
            "time it begins. Leave --host-job out, or --snapshot."
        )
    command = [str(job.script.absolute())] if job.model is None and job.script else job.command
    order = Order(resources, run, Path.cwd(), Path(sys.executable), (*command, *job.args), wait_s=job.host_deadline_s)
    return Submission(job, order, host_job), dry_run


def _placed(*, slurm: bool, ray_address: str, **options: Any) -> Job:
    """The job of a Ray cluster, which has room or not, and neither walltimes nor partitions."""
    resources = Resources(**{part.name: options.pop(part.name) for part in fields(Resources)})
    is_other = {"--slurm": slurm, "--host-job": options.pop("host_job"), "--dry-run": options.pop("dry_run")}
    known = Resources(resources.instances, cpus_per_worker=resources.cpus_per_worker)
    known = replace(known, gpus_per_worker=resources.gpus_per_worker)
    is_other |= {
        f"--{part.name.removesuffix('_s').replace('_', '-')}": getattr(resources, part.name)
        != getattr(known, part.name)
        for part in fields(Resources)
    }
    if wrong := [name for name, is_given in is_other.items() if is_given]:
        raise click.UsageError(f"{', '.join(wrong)}: that is not for --ray. Leave it out.")
    room = Room(ray_address, resources.cpus_per_worker, resources.gpus_per_worker)
    job = job_from(workers=resources.instances, ray=room, **options)
    _refuse_circle(job)
    return job


def _warn_placed(job: Job) -> None:
    assert job.ray is not None
    if (lack := shortage(job.ray, job.workers)) and not job.quiet:
        tell_warning(lack)
    warn_early(job, is_elsewhere=True)


def _refuse_circle(job: Job) -> None:
    if job.rule is not None and parse_rule(job.rule).meets != "center":
        raise InvalidArgument(
            f"--rule {job.rule} has all workers meet, but a queue starts each when there is room for it. Choose a rule "
            "of the center (easgd, asgd, downpour), or start all at once: `srun` in a job of your own."
        )


def _refuse_second(run: Path) -> None:
    """Two arrays for one run would have two workers of each rank."""
    if Folder(run).is_submitted:
        jobs = list(Submission.read(run).jobs.values())
        if (tasks := look(jobs)) is None:
            raise QueueRefused(
                f"the queue does not tell whether jobs {', '.join(jobs)} of {run} are over. Is Slurm's controller up? "
                "`sinfo` tells; try again when it is."
            )
        if any(not task.is_over for task in tasks):
            raise InvalidArgument(
                f"jobs of {run} are in the queue: {', '.join(jobs)}. End them first: maniple stop {short(run)}"
            )


def _make(job: Job) -> None:
    """The folder of a run whose host will begin later."""
    folder = Folder.create(job.runs, str(job.name))
    try:
        folder.describe(asked=job.asked())
    except BaseException:  # a full disk, say
        folder.discard()
        raise


def _submit_both(submission: Submission) -> None:
    run, job = submission.order.run, submission.job
    if job.resume is None:
        _make(job)
    else:
        check_gone(run)
        Folder(run).unstop()  # the host itself cannot tell whether this is of before, or was said while it waited
        Folder(run).describe(exit_code=None)
    submission = submission.write().submit_host()
    try:
        submission = submission.submit_workers()
    except BaseException:
        cancel([submission.jobs[HOST]])
        raise
    click.echo(f"run folder {short(run)}")
    click.echo(f"job {submission.jobs[HOST]}: the host; job {submission.jobs[WORKERS]}: {count(job.workers, 'worker')}")
    click.echo(f"maniple status {short(run)}\nmaniple stop {short(run)}")
