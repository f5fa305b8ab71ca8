"""Resuming a run: the host that continues it, the settings that it keeps or repeats, and the command to do so."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from maniple.connection.find_host import check_no_live_host, resume_command
from maniple.environment import shared_memory
from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.host.snapshots import discard_changes
from maniple.job import Job
from maniple.record import RunFolder
from maniple.record.folder import fresh_name
from maniple.settings.options import Limits, settings_of


def start_host(job: Job) -> tuple[Job, Host]:
    """Start the host of `job`, or resume it; returns the job with the settings that it keeps."""
    if (run := job.resume) is None:
        job = job.with_default_rule()
        name = job.name or fresh_name(job.runs, job.script or Path("host"))
        return job, Host.start(shared_memory(), job.runs, name, job.record(), keep=job.keep, arrays=job.arrays)
    check_no_live_host(run)
    given = {"rule": job.rule is not None, "pace": job.pace is not None}
    job = with_saved_settings(job, run)
    # `maniple serve` is often started by a service manager, which cannot choose another snapshot.
    falls_back = job.script is None
    host = Host.resume(shared_memory(), run, job.record(), which=job.snapshot, falls_back=falls_back, keep=job.keep)
    discard_changes(host.segment, **given)
    return job, host


def with_saved_settings(job: Job, run: Path) -> Job:
    """`job` with the settings that the run was started with, where the job gives none, and the default rule for both.

    Limits are kept only for `maniple serve`, which service managers restart; for a person who resumes a run, only the
    limits given now apply.
    """
    before: dict[str, Any] = RunFolder(run.resolve()).read().get("asked", {})
    if job.seed is not None and job.seed != before.get("seed", job.seed):
        raise InvalidArgument(
            f"--seed {job.seed} would change the order of samples in the middle of an epoch: the run's "
            f"seed is {before['seed']}. Leave --seed out."
        )
    kept = [one.name for one in settings_of(Job) if one.resume == "kept"]
    saved = {name: before.get(name) for name in kept if getattr(job, name) is None}
    if job.controller is None and before.get("controller"):
        saved |= {"controller": before["controller"], "controller_args": tuple(before["controller_args"])}
    if job.model is not None and before.get("model"):
        saved |= {} if job.model_args else {"model_args": tuple(before["model_args"])}
        saved |= {} if job.snapshot_epochs is not None else {"snapshot_epochs": before["snapshot_epochs"]}
    if job.script is None and job.limits == Limits():
        saved["limits"] = Limits(**{one.name: before[one.name] for one in settings_of(Limits) if one.name in before})
    return replace(job, **saved).with_default_rule()


def command_to_resume(run: Path) -> str | None:
    """The command that continues the run in a folder; None if run.json names no program to start."""
    folder = RunFolder(run)
    about = folder.read()
    asked: dict[str, Any] = about.get("asked") or {}
    is_host_alone = asked.get("script") is None and asked.get("launcher") == "maniple"
    if folder.is_submitted or is_host_alone or _why_not_repeatable(run, about, asked) is None:
        return resume_command(run)
    return None


def repeated_options(run: Path) -> dict[str, Any]:
    """The options with which a run was started: its script or model, and those settings that `--resume` repeats."""
    about = RunFolder(run.resolve()).read()
    asked: dict[str, Any] = about.get("asked") or {}
    if (reason := _why_not_repeatable(run, about, asked)) is not None:
        raise InvalidArgument(
            f"--resume {run} names no script to run: it {reason}. Name the script after it, or another run: runs/NAME."
        )
    options: dict[str, Any] = {
        "workers": asked["workers"] // max(1, len(asked["hosts"])),
        "devices": ",".join(asked["devices"]),
        "hosts": ",".join(asked["hosts"]),
    }
    limits = {one.name for one in settings_of(Limits)}
    has_failed = about.get("exit_code") != 0  # else it may have reached a limit, which would end it again at once
    for one in settings_of(Job):
        if one.resume == "repeated" and one.record_key in asked and (one.name not in limits or has_failed):
            value = asked[one.record_key]
            options[one.name] = tuple(value) if isinstance(value, list) else value
    if asked.get("model"):
        return options | {"model": asked["model"]}
    return options | {"script": Path(asked["script"]), "args": tuple(asked["args"])}


def _why_not_repeatable(run: Path, about: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """Why `--resume` cannot start a run's program by itself; None if it can."""
    launcher = asked.get("launcher", "maniple")
    if about.get("lineage") is None:
        return "is no run folder, as it has no run.json with a lineage"
    if (run / "run.json").stat().st_uid != os.getuid():
        return "belongs to another user, whose script is not started unless it is named"
    if asked.get("script") is None:
        return "was a host alone, which `maniple serve --resume` continues"
    if launcher != "maniple":
        return f"had workers that {launcher} has started, which starts them again with MANIPLE_RESUME"
    return "had workers on a Ray cluster, for which there is `maniple submit --ray`" if asked.get("ray") else None
