"""Positions: how far workers with fixed shares are in the data, kept in the segment beside the center they belong to.

A worker writes its position after the center has what it has learned up to there, and a snapshot reads the positions
before it copies the center. So a center holds all that was learned before its position, and perhaps a little more:
who continues there repeats steps, and leaves out no sample. Leases have a table of their own (`table`).
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from maniple.record.folder import write_once, write_whole

_FILE = "position-"
_GONE, _DIVISION = "gone-", "division-"  # marks of workers that were given up; who shares a pass of validation
_KEPT_DIVISIONS = 8  # passes by which the slowest worker may be behind the fastest
# Beside them, three marks without content: when the last snapshot was begun, for which workers save what the center has
# not; that the run was resumed, and may continue with it; and that its script looks at a batch before it trains.
SAVES, RESUMED, LOOKS = "saves", "resumed", "looks"


class Position(msgspec.Struct):
    """How far one worker is, or with `is_common` all of them, who make their steps together."""

    rank: int
    world: int
    is_common: bool
    steps: int  # over all lives of the run
    own_steps: int  # of this life
    rounds: int = 0  # of all workers, over all lives of the run
    samplers: dict[int, tuple[int, int, int]] = {}  # by number: epoch, places of its order that are done, samples
    saved: float = msgspec.field(default_factory=time.time)

    def write(self, segment: Path) -> None:
        """Write it down, in place of this worker's last one, whole or not at all."""
        write_whole(segment / f"{_FILE}{self.rank}", msgspec.json.encode(self))


def give_up(segment: Path, rank: int) -> None:
    """Worker `rank` does not come back."""
    with suppress(OSError):  # no room in memory: positions are written no more, and `--resume` repeats more steps
        (segment / f"{_GONE}{rank}").touch()


def remaining(segment: Path, world: int) -> list[int]:
    """The ranks, of `world`, that were not given up."""
    gone = {path.name.removeprefix(_GONE) for path in segment.glob(f"{_GONE}*")}
    return [rank for rank in range(world) if str(rank) not in gone]


def divided(segment: Path, number: int, epoch: int, world: int) -> tuple[int, ...]:
    """The ranks, of `world`, that divide a pass of sampler `number`: whoever begins it first decides for all.

    Else a worker that is given up at that moment would be counted by some, and not by others.
    """
    path = segment / f"{_DIVISION}{number}-{epoch}"
    try:
        if not path.exists():
            write_once(path, msgspec.json.encode(remaining(segment, world)))
            (segment / f"{_DIVISION}{number}-{epoch - _KEPT_DIVISIONS}").unlink(missing_ok=True)
        return tuple(msgspec.json.decode(path.read_bytes(), type=list[int]))
    except OSError:  # no room in memory: as from the beginning
        return tuple(range(world))


def is_looked_at(segment: Path, *, has_looked: bool = False) -> bool:
    """The run's script looks at a batch before it trains; `has_looked`: the worker that asks has noticed it."""
    if has_looked:
        (segment / LOOKS).touch()
    return (segment / LOOKS).exists()


def read(segment: Path) -> list[Position]:
    """All positions that workers have written."""
    return [msgspec.json.decode(path.read_bytes(), type=Position) for path in sorted(segment.glob(f"{_FILE}*"))]


def common(positions: Sequence[Position]) -> Position | None:
    """The newest position of workers who make their steps together; None if they do not."""
    return max((one for one in positions if one.is_common), key=lambda one: one.saved, default=None)


def of_worker(positions: Sequence[Position], rank: int) -> Position | None:
    """Where worker `rank` continues; None if nothing is known."""
    return common(positions) or next((one for one in positions if one.rank == rank), None)


def settle(segment: Path, positions: Sequence[Position], world: int) -> Position | None:
    """Write the positions from which `world` workers (0: not known) continue; gives the one common to all, or None.

    If workers with positions of their own become more or fewer, all continue where the last of them is.
    """
    one = common(positions)
    if one is None and world and any(position.world != world for position in positions):
        one = min(positions, key=lambda position: sorted(position.samplers.items()))
        one = msgspec.structs.replace(one, is_common=True)
    kept = {f"{_FILE}{position.rank}": position for position in (positions if one is None else [one])}
    for position in kept.values():
        position.write(segment)
    for pattern in (_FILE, _GONE, _DIVISION):  # those who were given up are started again
        for path in segment.glob(f"{pattern}*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
    return one
