"""The place: who am I (rank, world size, node, run), read from environment variables here and nowhere else.

The launcher writes these variables with `environment` and the worker reads them with `find`, so that the
two ends of each name stand side by side.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from maniple.errors import InvalidArgument

DEFAULT_SEED = 1

# The variables by which numeric libraries learn how many threads to start.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class Place:
    """One worker's place in the world. Without a launcher: a world of one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: str = field(default_factory=lambda: os.uname().nodename)
    run: Path | None = None  # the run folder; None when alone
    segment: Path | None = None  # the shared-memory folder of the run's center
    rule: str | None = None  # what the command line asked for, in its own words
    pace: str | None = None
    device: str | None = None
    seed: int = DEFAULT_SEED
    restarts: int = 0  # how often this rank was started before

    @property
    def is_alone(self) -> bool:
        """No launcher started this process."""
        return self.segment is None


def environment(place: Place) -> dict[str, str]:
    """The variables by which a process finds `place` again."""
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "MANIPLE_RUN": place.run,
        "MANIPLE_SEGMENT": place.segment,
        "MANIPLE_RULE": place.rule,
        "MANIPLE_PACE": place.pace,
        "MANIPLE_DEVICE": place.device,
        "MANIPLE_SEED": place.seed,
        "MANIPLE_RESTARTS": place.restarts,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def find(env: Mapping[str, str] = os.environ) -> Place:
    """The place that the environment describes."""
    segment = env.get("MANIPLE_SEGMENT")
    if segment is None:
        _refuse_other_launchers(env)
        return Place(device=env.get("MANIPLE_DEVICE"), seed=_number(env, "MANIPLE_SEED", DEFAULT_SEED))
    run = env.get("MANIPLE_RUN")
    return Place(
        rank=_number(env, "RANK", 0),
        world=_number(env, "WORLD_SIZE", 1),
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world=_number(env, "LOCAL_WORLD_SIZE", 1),
        run=Path(run) if run else None,
        segment=Path(segment),
        rule=env.get("MANIPLE_RULE"),
        pace=env.get("MANIPLE_PACE"),
        device=env.get("MANIPLE_DEVICE"),
        seed=_number(env, "MANIPLE_SEED", DEFAULT_SEED),
        restarts=_number(env, "MANIPLE_RESTARTS", 0),
    )


def shared_memory(env: Mapping[str, str] = os.environ) -> Path:
    """The folder, held in memory, in which centers are made."""
    return Path(env.get("MANIPLE_SHM") or "/dev/shm")


def asked_threads(env: Mapping[str, str] = os.environ) -> set[str]:
    """The thread variables that the user has set already; they are left as they are."""
    return {name for name in THREAD_VARIABLES if name in env}


def _refuse_other_launchers(env: Mapping[str, str]) -> None:
    world = env.get("WORLD_SIZE", "1")
    if "RANK" in env and world.isdigit() and int(world) > 1:
        raise InvalidArgument(
            f"WORLD_SIZE={world} says that another launcher started this process, but maniple has no center "
            f"for it: {world} separate models would be trained. "
            f"Start the script with `maniple run -n {world} SCRIPT`, or unset RANK and WORLD_SIZE to train alone."
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not a whole number. Unset it or give it one.") from None
