"""The board: what the launcher shows of a run, the story of its folder and what the workers print."""

import time

from maniple.record import Folder, Tail
from maniple.story import Standing, Story, Totals


def count(number: int, thing: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


class Board:
    """All workers' standings, kept up to date by following their rows and logs."""

    def __init__(self, folder: Folder, workers: int) -> None:
        self._since = time.time()
        self._story = Story(folder, workers=workers)
        self._logs: dict[int, Tail] = {}
        self._folder = folder

    def refresh(self) -> list[tuple[int, str]]:
        """Read what is new; gives the lines that workers printed, with their ranks."""
        self._story.refresh()
        printed: list[tuple[int, str]] = []
        for rank in self._story.standings:
            log = self._logs.setdefault(rank, Tail(self._folder.log(rank)))
            printed += [(rank, line.decode(errors="replace")) for line in log.lines()]
        return printed

    @property
    def standings(self) -> dict[int, Standing]:
        """Where each worker stands, in the order of their ranks."""
        return dict(sorted(self._story.standings.items()))

    @property
    def totals(self) -> Totals:
        """The run in a few numbers."""
        return self._story.totals()

    @property
    def stop(self) -> str:
        """Why the controller lets everybody stop; not that of a run that goes on now."""
        when, reason = self._story.stop
        return reason if when >= self._since else ""

    @property
    def exit_code(self) -> int | None:
        """What the first failed worker's own error asks for."""
        return self._story.exit_code

    @property
    def has_ended(self) -> bool:
        """The run is over."""
        return self._story.host_exit_code is not None

    def summary(self) -> str:
        """One line on the whole run."""
        totals = self.totals
        longest = max((one.now.elapsed_s for one in self.standings.values()), default=0.0)
        rate = f", {totals.samples / longest:,.0f} samples/s" if totals.samples and longest else ""
        workers = count(totals.workers, "worker")
        return f"{totals.steps:,} steps, {totals.samples:,} samples in {longest:.1f} s{rate} over {workers}"
