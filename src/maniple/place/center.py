"""Where the center of another launcher's workers lies, and where their run is kept, as the environment asks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maniple.errors import InvalidArgument
from maniple.place.variables import choice, number, seconds

CENTERS = ("host", "mpi", "none")  # worker 0 starts a host; they hold it themselves, in MPI windows; nobody

# What would be missed if it were not heeded.
_OF_HOSTS = (
    "MANIPLE_CONTROLLER",
    "MANIPLE_VALIDATE_EVERY",
    "MANIPLE_PATIENCE",
    "MANIPLE_RESUME",
    "MANIPLE_SNAPSHOT",
)


@dataclass(frozen=True)
class Kept:
    """How a run without a command of maniple is kept."""

    runs: Path
    name: str | None
    snapshot_every_s: float  # 0: only at the end
    keep: int  # snapshots


def asked_center(env: Mapping[str, str] = os.environ) -> str:
    """Who holds the center."""
    center = choice(env, "MANIPLE_CENTER", CENTERS) or CENTERS[0]
    if center == "mpi" and (wrong := [name for name in _OF_HOSTS if env.get(name, "0") not in {"", "0"}]):
        raise InvalidArgument(
            f"{', '.join(wrong)}: that needs a host, and with MANIPLE_CENTER=mpi there is none. Unset it, or unset "
            "MANIPLE_CENTER, so that worker 0 is the host."
        )
    return center


def asked_kept(env: Mapping[str, str] = os.environ) -> Kept:
    """What the options --runs, --name, --snapshot-every and --keep would say."""
    kept = Kept(
        runs=Path(env.get("MANIPLE_RUNS") or "runs"),
        name=env.get("MANIPLE_NAME") or None,
        snapshot_every_s=seconds(env, "MANIPLE_SNAPSHOT_EVERY", 300.0),
        keep=number(env, "MANIPLE_KEEP", 3),
    )
    if not kept.snapshot_every_s >= 0 or kept.keep < 1:
        raise InvalidArgument(
            f"MANIPLE_SNAPSHOT_EVERY={kept.snapshot_every_s:g} and MANIPLE_KEEP={kept.keep} cannot be used. Give "
            "seconds, or 0 for a snapshot at the end only, and at least 1 snapshot to keep."
        )
    return kept
