"""Positions of workers with fixed shares in the data, kept in the segment beside the center they belong to.

A worker writes its position after the center has what it learned up to there, and a snapshot reads the positions before
it copies the center. So a center contains everything learned before its position, and perhaps a little more: a worker
that continues there repeats steps, but leaves out no sample. Leases have their own table (`leases`).
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from maniple.clock import clock
from maniple.record.folder import write_once, write_whole

_FILE = "position-"
_GONE, _DIVISION = "gone-", "division-"  # marks of workers that were given up; the ranks that share a validation pass
_KEPT_DIVISIONS = 8  # passes by which the slowest worker may be behind the fastest
# Empty marker files: when the last snapshot began, for which workers save the state that the center lacks; that the run
# was resumed, and workers may continue with that state; that its script looks at a batch before it trains.
SAVES, RESUMED, LOOKS = "saves", "resumed", "looks"


class Position(msgspec.Struct):
    """How far one worker is, or with `is_common` all of them, if they make their steps together."""

    rank: int
    world: int
    is_common: bool
    steps: int  # since the run was first started
    own_steps: int  # since the run was started or resumed
    rounds: int = 0  # of all workers, since the run was first started
    samplers: dict[int, tuple[int, int, int]] = {}  # by number: epoch, samples of its order that are done, all samples
    saved: float = msgspec.field(default_factory=lambda: clock.time())  # noqa: PLW0108 - a test may replace it

    def write(self, segment: Path) -> None:
        """Replace this worker's last position, atomically."""
        write_whole(segment / f"{_FILE}{self.rank}", msgspec.json.encode(self))


def give_up(segment: Path, rank: int) -> None:
    """Mark that worker `rank` will not come back."""
    with suppress(OSError):  # shared memory is full: positions are no longer written, and `--resume` repeats more steps
        (segment / f"{_GONE}{rank}").touch()


def remaining(segment: Path, world: int) -> list[int]:
    """The ranks that were not given up, of `world`."""
    gone = {path.name.removeprefix(_GONE) for path in segment.glob(f"{_GONE}*")}
    return [rank for rank in range(world) if str(rank) not in gone]


def divided(segment: Path, number: int, epoch: int, world: int) -> tuple[int, ...]:
    """The ranks that divide a pass of sampler `number`. The first worker that begins the pass decides for all.

    Otherwise a worker that is given up at that moment would be counted by some workers only.
    """
    path = segment / f"{_DIVISION}{number}-{epoch}"
    try:
        if not path.exists():
            write_once(path, msgspec.json.encode(remaining(segment, world)))
            (segment / f"{_DIVISION}{number}-{epoch - _KEPT_DIVISIONS}").unlink(missing_ok=True)
        return tuple(msgspec.json.decode(path.read_bytes(), type=list[int]))
    except OSError:  # shared memory is full: all ranks, as at the start
        return tuple(range(world))


def is_looked_at(segment: Path, *, has_looked: bool = False) -> bool:
    """Whether the run's script looks at a batch before it trains; `has_looked`: the calling worker has noticed it."""
    if has_looked:
        (segment / LOOKS).touch()
    return (segment / LOOKS).exists()


def read(segment: Path) -> list[Position]:
    """The positions that workers have written."""
    return [msgspec.json.decode(path.read_bytes(), type=Position) for path in sorted(segment.glob(f"{_FILE}*"))]


def common(positions: Sequence[Position]) -> Position | None:
    """The newest position of workers that make their steps together; None if they do not."""
    return max((one for one in positions if one.is_common), key=lambda one: one.saved, default=None)


def of_worker(positions: Sequence[Position], rank: int) -> Position | None:
    """The position at which worker `rank` continues; None if it is unknown."""
    return common(positions) or next((one for one in positions if one.rank == rank), None)


def commit_positions(segment: Path, positions: Sequence[Position], world: int) -> Position | None:
    """Write the positions at which `world` workers (0: unknown) continue; returns the common one, or None.

    If the number of workers with separate positions changes, all continue at the position that is furthest behind.
    """
    one = common(positions)
    if one is None and world and any(position.world != world for position in positions):
        one = min(positions, key=lambda position: sorted(position.samplers.items()))
        one = msgspec.structs.replace(one, is_common=True)
    kept = {f"{_FILE}{position.rank}": position for position in (positions if one is None else [one])}
    for position in kept.values():
        position.write(segment)
    for pattern in (_FILE, _GONE, _DIVISION):  # workers that were given up are started again
        for path in segment.glob(f"{pattern}*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
    return one
