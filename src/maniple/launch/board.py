"""The board: what the launcher shows of a run, the story of its folder and what the workers print."""

import time

from maniple.launch.death import last_words
from maniple.record import Folder, Tail
from maniple.rules import parse_rule
from maniple.story import Standing, Story, Totals


def count(number: int, thing: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class Board:
    """All workers' standings, kept up to date by following their rows and logs.

    With `from_now_on`, what workers have printed before is passed over: it belongs to an earlier life of the run.

    Attributes:
        bars: the progress bars that workers are drawing now, by rank; known to the launcher that reads their output.
    """

    def __init__(self, folder: Folder, workers: int, *, from_now_on: bool = False) -> None:
        self.bars: dict[int, tuple[str, ...]] = {}
        self._since = time.time()
        self._story = Story(folder, workers=workers)
        self._sizes = log_sizes(folder) if from_now_on else {}
        self._logs: dict[int, Tail] = {}
        self._folder = folder

    def refresh(self) -> list[tuple[int, str]]:
        """Read what is new; gives the lines that workers printed, with their ranks."""
        self._story.refresh()
        printed: list[tuple[int, str]] = []
        for rank in self._story.standings:
            if rank not in self._logs:
                path = self._folder.log(rank)
                self._logs[rank] = Tail(path, start=self._sizes.get(path.name, 0))
            log = self._logs[rank]
            printed += [(rank, line.decode(errors="replace")) for line in log.lines()]
        return printed

    def lose_host(self) -> None:
        """The host is dead now: nobody that it has started trains any more."""
        self._story.lose_host(time.time())

    @property
    def silent_s(self) -> float:
        """For how long no process of the run has written a row."""
        return time.time() - self._story.until if self._story.until else 0.0

    def still(self) -> None:
        """Show no rates until workers write rows again."""
        for standing in self._story.standings.values():
            standing.still()

    @property
    def standings(self) -> dict[int, Standing]:
        """Where each worker stands, in the order of their ranks."""
        return dict(sorted(self._story.standings.items()))

    @property
    def totals(self) -> Totals:
        """The run in a few numbers."""
        return self._story.totals()

    @property
    def epoch_size(self) -> int:
        """The samples of one epoch, or 0."""
        return self._story.epoch_size

    @property
    def epochs(self) -> float:
        """How many epochs the workers have trained together; 0 where the size of one is not known."""
        return self.totals.samples / self._story.epoch_size if self._story.epoch_size else 0.0

    @property
    def validations(self) -> int:
        """How many times the center was validated."""
        return self._story.validations

    @property
    def stop(self) -> str:
        """Why the controller lets everybody stop; not that of a run that goes on now."""
        when, reason = self._story.stop
        return reason if when >= self._since else ""

    @property
    def is_unshared(self) -> bool:
        """All workers that have joined have left, and none of them had shared anything."""
        joined = [one for one in self._story.standings.values() if one.lives]
        return bool(joined) and all(one.is_unshared for one in joined)

    @property
    def exit_code(self) -> int | None:
        """What the first failed worker's own error asks for."""
        return self._story.exit_code

    def meets(self, rule: str | None) -> str:
        """Where the workers meet by the rule that they share a model by, or else by `rule`; see `Rule.meets`."""
        return self._story.shared.get("meets") or parse_rule(rule or "easgd").meets

    @property
    def has_ended(self) -> bool:
        """The run is over."""
        return self._story.host_exit_code is not None

    def last_words(self, who: int | str, unwritten: bytes = b"") -> str:
        """What a process has printed last, in this life of the run; `unwritten`: what a full disk kept from its log."""
        path = self._folder.log(who)
        return last_words(path, unwritten, start=self._sizes.get(path.name, 0))

    def summary(self) -> str:
        """One line on the whole run."""
        totals = self.totals
        longest = max((one.total.elapsed_s for one in self.standings.values()), default=0.0)
        rate = f", {totals.samples / longest:,.0f} samples/s" if totals.samples and longest else ""
        workers = count(totals.workers, "worker")
        return f"{totals.steps:,} steps, {totals.samples:,} samples in {longest:.1f} s{rate} over {workers}"


def log_sizes(folder: Folder) -> dict[str, int]:
    """How much each process of a run has printed so far, by the names of the logs."""
    return {path.name: path.stat().st_size for path in folder.log("host").parent.glob("*.log")}
