"""Where the center of another launcher's workers lies, and where their run is kept, as the environment asks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maniple.errors import InvalidArgument
from maniple.place.variables import choice, number, seconds

CENTERS = ("host", "mpi", "none")  # worker 0 starts a host; they hold it themselves, in MPI windows; nobody


@dataclass(frozen=True)
class Kept:
    """How a run without a command of maniple is kept."""

    runs: Path
    name: str | None
    snapshot_every_s: float  # 0: only at the end
    keep: int  # snapshots


def asked_center(env: Mapping[str, str] = os.environ) -> str:
    """Who holds the center."""
    return choice(env, "MANIPLE_CENTER", CENTERS) or CENTERS[0]


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
