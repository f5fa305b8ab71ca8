"""Absence: workers that are missing from a circle in shared memory."""

from collections.abc import Sequence

from maniple.errors import PeerLost, WaitedTooLong


class PassedOver(Exception):
    """The others have gone on without this worker."""


def missed(rank: int, who: Sequence[int], phase: str, circle: str, waited_s: float, limit_s: float) -> WaitedTooLong:  # noqa: PLR0917
    """The error of one who has waited too long."""
    names = ", ".join(f"worker {one}" for one in who) or "others"
    return WaitedTooLong(
        f"worker {rank} has waited {waited_s:.1f} s for {names} in {phase} of {circle} (limit {limit_s:g} s). Alive "
        "but not coming: look at the log and the stack of each, whether all make the same calls; raise "
        "--circle-deadline if their steps take longer."
    )


def torn(rank: int, circle: str) -> PeerLost:
    """The error of one who has given up a round, and tries another."""
    return PeerLost(
        f"worker {rank} has given up in the middle of a round of {circle}; the others go on without it. It cannot come "
        "back in this process: let it end, and start it again (--restarts)."
    )
