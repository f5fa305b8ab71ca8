"""What a run that goes on remembers of how it was begun."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.launch.job import Job
from maniple.place import Limits
from maniple.record import Folder


def remembered(job: Job, run: Path) -> Job:
    """The job with what was asked for when the run began, where nothing else is asked for now.

    A host alone, which machines start again, has its limits again too; for a person, a run that goes on has none but
    those that are given now.
    """
    before: dict[str, Any] = Folder(run.resolve()).read().get("asked", {})
    if job.seed is not None and job.seed != before.get("seed", job.seed):
        raise InvalidArgument(
            f"--seed {job.seed} would shuffle anew in the middle of an epoch: the run's seed is {before['seed']}. "
            "Leave --seed out."
        )
    known = {name: before.get(name) for name in ("rule", "pace", "wire", "seed") if getattr(job, name) is None}
    if job.controller is None and before.get("controller"):
        known |= {"controller": before["controller"], "controller_args": tuple(before["controller_args"])}
    if job.model is not None and before.get("model"):
        known |= {} if job.model_args else {"model_args": tuple(before["model_args"])}
        known |= {} if job.snapshot_epochs is not None else {"snapshot_epochs": before["snapshot_epochs"]}
    if job.script is None and job.limits == Limits():
        known["limits"] = Limits(**{part.name: before[part.name] for part in fields(Limits) if part.name in before})
    return replace(job, **known)
