"""The baseline of a run: one worker alone, measured before the run starts, or a run that was measured earlier."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from maniple.errors import InvalidArgument
from maniple.job import Job
from maniple.launch.terminal import open_display
from maniple.monitor import RunState
from maniple.monitor.baseline import Baseline, measure_baseline, parse_baseline
from maniple.monitor.target import parse_target
from maniple.record import RunFolder
from maniple.record.folder import fresh_name
from maniple.text import short


def with_name(job: Job) -> Job:
    """`job` with the name that its run folder will have, from which the name of the baseline derives."""
    if job.name is not None or job.resume is not None:
        return job
    return replace(job, name=fresh_name(job.runs, job.script or Path("host")))


def find_baseline(job: Job, run_job: Callable[[Job], int]) -> tuple[Baseline | None, int]:
    """The baseline that `job` asks for, and an exit code; unless that is 0, there is no baseline, and the run ends.

    If the job gives seconds, `run_job` first runs one worker alone for that long. Raises InvalidArgument if the speed
    of the baseline is not known.
    """
    assert job.baseline is not None
    what = parse_baseline(job.baseline, job.runs)
    if isinstance(what, Path):
        return _measure(what, job), 0
    alone = baseline_job(job, what)
    assert alone.name is not None
    display = open_display(quiet=job.quiet, is_json=job.is_json)
    display.say(f"measuring the baseline: one worker alone for {what:g} s")
    if exit_code := run_job(alone):
        display.error(
            f"the baseline {short(job.runs.resolve() / alone.name)} ended with exit code {exit_code}, so the run was "
            "not started. Without --baseline it starts at once."
        )
        return None, exit_code
    return _measure(job.runs / alone.name, job), 0


def baseline_job(job: Job, seconds: float) -> Job:
    """The job of one worker alone, on the first of the machines and devices, that stops after `seconds` of training."""
    return replace(
        job,
        name=f"{job.name}-baseline",
        workers=1,
        min_workers=1,
        devices=job.devices[:1],
        hosts=job.hosts[:1],
        limits=replace(job.limits, total_duration=seconds),
        baseline=None,
        web=None,
    )


def _measure(path: Path, job: Job) -> Baseline:
    state = RunState(RunFolder(path.resolve()))
    state.set_target(None if job.target is None else parse_target(job.target))
    state.refresh()
    if not state.workers and state.until:
        raise InvalidArgument(f"--baseline {path} has had no worker. Give a run with one: runs/NAME.")
    return measure_baseline(state, path.resolve().name)
