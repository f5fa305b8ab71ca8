"""The board: where each worker of a run stands, gathered from the run folder alone."""

import time
from contextlib import suppress
from dataclasses import dataclass

from maniple.record import Folder, Row, Tail
from maniple.record.events import parse_events

# What the server says of a worker that this launcher has not started itself.
_STATES = {"joined": "training", "restarted": "training", "returned": "training", "lost": "lost", "left": "done"}


@dataclass
class Standing:
    """Where one worker stands."""

    state: str = "starting"
    step: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    loss: float | None = None
    sync_share: float = 0.0


def count(number: int, thing: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


class Board:
    """All workers' standings, kept up to date by following their events and logs."""

    def __init__(self, folder: Folder, workers: int, *, is_queued: bool = False) -> None:
        self._own = 0 if is_queued else workers  # the launcher itself knows what becomes of these
        self.standings = [Standing("queued" if is_queued else "starting") for _ in range(workers)]
        self._since = time.time()
        self.stop = ""  # why the controller lets everybody stop
        self.exit_code: int | None = None  # what the first failed worker's own error asks for
        self._steps_before = self._samples_before = 0  # of workers that died and were restarted
        self._folder = folder
        self._server = Tail(folder.events("server"))
        self._events = [Tail(folder.events(rank)) for rank in range(workers)]
        self._logs = [Tail(folder.log(rank)) for rank in range(workers)]

    def refresh(self) -> list[tuple[int, str]]:
        """Read what is new; gives the lines that workers printed, with their ranks."""
        printed: list[tuple[int, str]] = []
        members = list(parse_events(self._server.lines()))
        for row in members:
            self._note_member(row)
        for rank, standing in enumerate(self.standings):
            for row in parse_events(self._events[rank].lines()):
                with suppress(KeyError, TypeError, ValueError):  # a row that somebody else has made up
                    self._note(standing, row)
            printed += [(rank, line.decode(errors="replace")) for line in self._logs[rank].lines()]
        for row in members:  # again: a worker that has joined and left meanwhile is gone
            self._note_member(row)
        return printed

    def mark(self, rank: int, state: str) -> None:
        """Note what the launcher knows of a worker's process."""
        self.standings[rank].state = state

    def summary(self) -> str:
        """One line on the whole run."""
        samples = self._samples_before + sum(s.samples for s in self.standings)
        steps = self._steps_before + sum(s.step for s in self.standings)
        longest = max((s.elapsed_s for s in self.standings), default=0.0)
        rate = f", {samples / longest:,.0f} samples/s" if samples and longest else ""
        return (
            f"{steps:,} steps, {samples:,} samples in {longest:.1f} s{rate} over {count(len(self.standings), 'worker')}"
        )

    def _note_member(self, row: Row) -> None:
        """A worker of another machine has come or gone, or the controller has decided to stop."""
        if row.get("event") == "stop" and row["timestamp"] >= self._since:  # not that of a run that goes on now
            self.stop = str(row.get("reason"))
        state = _STATES.get(str(row.get("event")))
        if state is not None and (rank := int(row["worker"])) >= self._own:
            while len(self.standings) <= rank:
                self._events.append(Tail(self._folder.events(len(self.standings))))
                self._logs.append(Tail(self._folder.log(len(self.standings))))
                self.standings.append(Standing())
            self.mark(rank, state)

    def _note(self, standing: Standing, row: Row) -> None:
        kind = row.get("event")
        if kind == "join":
            self._begin(standing)
        elif kind == "progress":
            gone = row["elapsed"] - standing.elapsed_s
            if gone > 0:
                standing.steps_per_s = (row["step"] - standing.step) / gone
                standing.samples_per_s = (row["samples"] - standing.samples) / gone
            standing.step, standing.samples = row["step"], row["samples"]
            standing.elapsed_s, standing.sync_share = row["elapsed"], row["sync_share"]
        elif kind == "log":
            with suppress(TypeError, ValueError):
                standing.loss = float(row.get("loss", standing.loss))
        elif kind == "failed":
            self.exit_code = self.exit_code or row["exit_code"]

    def _begin(self, standing: Standing) -> None:
        """A worker has joined, for the first time or again: its own counts begin at zero."""
        standing.state = "training"
        self._steps_before += standing.step
        self._samples_before += standing.samples
        standing.step = standing.samples = 0
        standing.elapsed_s = 0.0
