"""The beginning of a run: a new one, one that goes on, or one whose folder was made for it before."""

from pathlib import Path

from maniple.host import Host
from maniple.host.keeping import forget_changes
from maniple.launch.job import Job
from maniple.launch.meeting import meeting_point
from maniple.launch.memory import remembered
from maniple.launch.whereabouts import check_gone
from maniple.place import Place, shared_memory
from maniple.record.folder import fresh_name


def begin(job: Job) -> tuple[Job, Host]:
    """The host of `job`, and the job as it is to be done."""
    if (run := job.resume) is not None:
        check_gone(run)
        is_said = {"rule": job.rule is not None, "pace": job.pace is not None}
        job = remembered(job, run)
        # A host alone is often started by a machine, which cannot choose between snapshots.
        falls_back = job.script is None
        host = Host.resume(shared_memory(), run, job.asked(), which=job.snapshot, falls_back=falls_back, most=job.keep)
        forget_changes(host.segment, **is_said)
        return job, host
    name = job.name or fresh_name(job.runs, job.script or Path("host"))
    return job, Host.start(shared_memory(), job.runs, name, job.asked(), most=job.keep, arrays=job.arrays)


def begin_in(run: Path, job: Job) -> tuple[Job, Host]:
    """The host of `job` in a folder that was made for it; if it was begun there before, it goes on."""
    return job, Host.go_on(shared_memory(), run, job.asked(), most=job.keep)


def place_of(job: Job, host: Host, *, is_queued: bool) -> Place:
    """What all workers of a run have in common."""
    return Place(
        world=job.world,
        run=host.folder.path,
        segment=host.segment.path,
        rule=job.rule,
        pace=job.pace,
        seed=job.settled_seed,
        wire=job.wire,
        host_deadline_s=job.host_deadline_s,
        max_memory_mb=job.max_memory_mb,
        is_queued=is_queued,
        launcher=job.launcher,
        own_data=any("{rank}" in arg for arg in job.args),  # as in --shard part-{rank}.npz
        circle=job.circle,
        circle_deadline_s=job.circle_deadline_s,
        deterministic=job.deterministic,
        master=meeting_point(job),
        limits=job.limits,
        controller=job.controller,
        controller_args=job.controller_args,
    )
