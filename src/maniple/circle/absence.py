"""Absence: workers that are missing from a circle in shared memory."""

from collections.abc import Callable, Sequence

from maniple.errors import PeerLost, WaitedTooLong

REPORT_S = 2.0  # a wait of this length is unusual enough to be shown, and shown again after as long
OnLongWait = Callable[[Sequence[int], float, bool], None]  # for whom, for how many seconds so far, whether it is over


class LongWait:
    """Reports one wait after the other, those that are long."""

    def __init__(self) -> None:
        self.on_report: OnLongWait = lambda _, __, ___: None
        self._reported_s = 0.0
        self._whom: Sequence[int] = ()

    def go_on(self, whom: Callable[[], Sequence[int]], waited_s: float) -> None:
        """The wait goes on."""
        if waited_s < self._reported_s:  # another one: the one before was given up
            self._reported_s = 0.0
        if waited_s - self._reported_s >= REPORT_S:
            self._reported_s, self._whom = waited_s, whom()
            self.on_report(self._whom, waited_s, False)

    def end(self, waited_s: float) -> None:
        """It is over."""
        if self._reported_s:
            self._reported_s = 0.0
            self.on_report(self._whom, waited_s, True)


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
