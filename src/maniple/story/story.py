"""The story of a run, told by the rows in its folder."""

import time
from bisect import bisect_right
from collections import Counter, deque
from contextlib import suppress
from itertools import chain, pairwise
from typing import cast

import numpy as np

from maniple.record import Folder, Row, Tails
from maniple.record.events import parse_events
from maniple.story.curves import CENTER, Curves
from maniple.story.lanes import Lane
from maniple.story.rows import ProgressRow, column, sort_rows
from maniple.story.series import Series
from maniple.story.standing import Standing, Travel
from maniple.story.totals import Totals, add_up

# What host and server say of a worker, and the state that it is in then.
_STATES = {
    "started": "starting",
    "joined": "training",
    "restarted": "training",
    "returned": "training",
    "given up": "lost",
    "lost": "lost",
    "left": "done",
}
_ORDINARY = {"join", "validated", "validation", "epoch", "sampler", "share", "leave", "waiting"}
_TOLD = {143, -15, 130, -2}  # the exit codes of those who were told to end
_MOST_EVENTS = 2000
_FINE = 500_000  # stretches of the finest curve, of all workers together; see Series


class Story:
    """All that is known of a run. `refresh` reads what is new; only then it changes.

    Attributes:
        standings: where each worker stands, by rank.
        logged, measured: curves of what was logged, and of what was measured, against time since 1970.
        lanes, seen: by rank, what the time went for, and the samples so far against time.
        live: the workers alive, against time.
        ages, together: how often parameters were so old (see `Progress`), and how many rounds were made by so many.
        happened: the newest events in the life of the run, with their rows.
        since: when the first worker began, or 0; `until`: the newest row's time.
        epoch_size: the samples of one epoch, or 0; `validations`: how many times the center was validated.
        shared: the row by which the first worker told its rule, pace and so on; or nothing.
        stop: when and why the controller let everybody stop.
        exit_code: what the first failed worker's own error asks for.
        host_exit_code: with what the run has ended; None while it goes on.

    The curve of the logged value `fine` has many more points than others, so that one may reckon with it: up to
    two million over all workers, and all that there are if they are fewer.
    """

    def __init__(self, folder: Folder, *, workers: int = 0, limit: int = 0, fine: str = "") -> None:
        self.folder = folder
        self._first = "queued" if folder.is_submitted else "starting"  # the state of a worker that has not begun
        self.standings: dict[int, Standing] = {rank: Standing(self._first) for rank in range(workers)}
        known = max(1, workers, len(folder.ranks()))
        limit = limit or max(150, min(500, 8000 // known))
        self.logged = Curves(limit, {fine: max(limit, _FINE // known)} if fine else None)
        self.measured = Curves(limit)
        self.lanes: dict[int, Lane] = {}
        self.seen: dict[int, Series] = {}
        self.live = Series(limit)
        self.ages: Counter[int] = Counter()
        self.together: Counter[int] = Counter()
        self.happened: deque[Row] = deque(maxlen=_MOST_EVENTS)
        self.events = 0  # all that have happened, also those that are forgotten
        self.since = self.until = 0.0
        self.epoch_size = self.validations = 0
        self.shared: Row = {}
        self.stop: tuple[float, str] = (0.0, "")
        self.exit_code: int | None = None
        self.host_exit_code: int | None = None
        self._stale, self._exchanges = 0.0, 0  # the staleness of all exchanges, and how many there were
        self._limit = limit
        self._ended = 0.0  # when the host did
        self._starts: list[float] = []  # of the host: a run that was resumed has had several lives
        self._spans: dict[int, tuple[float, float]] = {}  # by life: from when until when workers tell of themselves
        self._restored, self._version = 0.0, 0  # when the center was restored from a snapshot, and its version then
        self._changes = 0  # exchanges with the center since then
        self._rounds: dict[int, int] = {}  # by life: the rounds so far, which are the same for all workers
        self._told: set[int] = set()  # the workers that the host knows
        self._started: set[int] = set()  # those whose processes it has started itself
        self._tails = Tails(folder.path / "events")

    def refresh(self, within_s: float | None = None) -> bool:
        """Read what is new. With `within_s`, for about so long; False if there is more."""
        deadline = None if within_s is None else time.monotonic() + within_s
        for who, lines in self._tails.pieces():  # host and server first: what they say of workers counts most
            self._read(who, lines)
            if deadline is not None and time.monotonic() > deadline:
                return False
        if self.host_exit_code is not None:  # else the host comes back, and its workers train on
            for standing in self.standings.values():
                if not standing.is_gone:
                    standing.turn("ended", self._ended)
        return True

    def lose_host(self, seen: float) -> None:
        """The host was seen to be dead at that time, on this machine: the workers that it had started died with it, and
        others are not heard of. A run that was resumed since then is not affected."""
        if self.until > seen or self.host_exit_code is not None:
            return
        for rank, standing in self.standings.items():
            if not standing.is_gone:
                standing.turn("dead" if rank in self._started else "lost", self.until)

    def totals(self) -> Totals:
        """The run in a few numbers, at the time of its newest row."""
        elapsed_s = float(self.ran(np.array([self.until]))[0]) if self.since else 0.0
        first = bisect_right(self._starts, self._restored) if self._restored else 0
        rounds = sum(made for life, made in self._rounds.items() if life >= first)
        return add_up(self.standings.values(), elapsed_s=elapsed_s, version=self._version + self._changes + rounds)

    def ran(self, moments: np.ndarray) -> np.ndarray:
        """For how many seconds the run had been going on at each of `moments`, since the first worker's start.

        The pauses between its end, or the death of its host, and its resumption do not count.
        """
        seconds = moments - self.since
        spans = [self._spans[life] for life in sorted(self._spans)]
        for (_, last), (first, _) in pairwise(spans):
            seconds = seconds - np.clip(moments - last, 0.0, max(0.0, first - last))
        return seconds

    @property
    def staleness(self) -> float | None:
        """How many exchanges others had made since a worker's last one: the mean over all; None if there were none."""
        return self._stale / self._exchanges if self._exchanges else None

    def worker(self, rank: int) -> Standing:
        """Where worker `rank` stands; new, if nothing is known of it."""
        if rank not in self.standings:
            self.standings[rank] = Standing(self._first)
        return self.standings[rank]

    def _read(self, who: str, lines: list[bytes]) -> None:
        rank = who.removeprefix("worker-")
        if rank.isdigit():
            for rows in sort_rows(lines):
                with suppress(KeyError, TypeError, ValueError, OverflowError):  # rows that somebody else has made up
                    self._note_worker(int(rank), rows)
            return
        for row in parse_events(lines):
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                self._note_host(row)

    def _note_host(self, row: Row) -> None:
        kind, when = row["event"], float(row["timestamp"])
        self.until = max(self.until, when)
        if kind == "start":
            self._begin(row, when)
        elif kind == "end":
            self.host_exit_code, self._ended = row.get("exit_code"), when
        elif kind == "stop":
            self.stop = (when, str(row.get("reason")))
        elif kind == "restored":
            self._restored, self._changes = when, 0
            self._version = int(row.get("rounds") or row.get("updates", 0))
        elif "worker" in row:
            self._note_member(kind, row, when)
        if "live" in row:
            self.live.add([when], [float(row["live"])])
        self._happen(row)

    def _note_member(self, kind: str, row: Row, when: float) -> None:
        """A worker has come or gone."""
        if kind == "started":
            self._started.add(int(row["worker"]))
        state = _ended(row) if kind == "exit" else _STATES.get(kind)
        if state is not None:
            self._told.add(int(row["worker"]))
            standing = self.worker(int(row["worker"]))
            standing.turn(state, when)
            if kind == "exit":
                standing.killed_after_s = float(row.get("killed_after", 0.0))

    def _begin(self, row: Row, when: float) -> None:
        """The host has begun, or begun again: nothing that was said of its workers before counts any more."""
        self.host_exit_code = self.exit_code = None
        self._started.clear()
        self._starts.append(when)
        for rank in range(int(row.get("workers") or 0)):
            self.worker(rank).turn(self._first, when)

    def _note_worker(self, rank: int, rows: list[ProgressRow] | list[Row] | Row) -> None:
        standing = self.worker(rank)
        if isinstance(rows, dict):
            self._note_one(rank, standing, rows)
        elif isinstance(rows[0], ProgressRow):
            self._note_progress(rank, standing, cast(list[ProgressRow], rows))
        else:
            self._note_logged(rank, standing, cast(list[Row], rows))

    def _note_one(self, rank: int, standing: Standing, row: Row) -> None:
        kind, when = row["event"], float(row["timestamp"])
        self.until = max(self.until, when)
        if kind == "join":
            self.since = min(self.since or when, when)
            self._span(when, when)
            standing.join(row)
        elif kind == "leave":
            standing.is_unshared = bool(row.get("unshared"))
            if rank not in self._told:  # in a run without a host nobody else tells of it
                standing.turn("failed" if row.get("failed") else "done", when)
        elif kind in {"waiting", "waited"}:
            standing.wait(row)
        elif kind in {"share", "changed"}:
            standing.share(row)
            self.shared = self.shared or row
        elif kind == "validated":
            self.validations += 1
            self.logged.note(CENTER, [row])
        elif kind == "sampler" and not row.get("validation"):
            self.epoch_size = self.epoch_size or int(row["size"])
        elif kind == "failed" and when >= max(self._starts, default=0.0):  # not of an earlier life
            self.exit_code = self.exit_code or row["exit_code"]
        if kind not in _ORDINARY:
            self._happen({"worker": rank} | row)

    def _note_logged(self, rank: int, standing: Standing, rows: list[Row]) -> None:
        self.logged.note(rank, rows)
        self.until = max(self.until, rows[-1]["timestamp"])
        losses = (row["loss"] for row in reversed(rows) if "loss" in row and not row.get("center"))
        if (loss := next(losses, None)) is not None:
            standing.loss = float(loss)

    def _note_progress(self, rank: int, standing: Standing, rows: list[ProgressRow]) -> None:
        before = standing.now.exchanges
        travel = standing.progress(rows)
        made = np.diff(np.concatenate([[before], column(rows, "exchanges")]))
        self._changes += int(made[travel.when > self._restored].sum())
        lives = np.searchsorted(self._starts, travel.when, side="right")
        for life in np.unique(lives).tolist():
            own = lives == life
            self._span(float((travel.when - travel.seconds)[own][0]), float(travel.when[own].max()), life)
            self._rounds[life] = max(self._rounds.get(life, 0), int(column(rows, "rounds")[own].max()))
        self.until = max(self.until, rows[-1].timestamp)
        lane = self.lanes.setdefault(rank, Lane(self._limit))
        lane.add(np.column_stack([travel.when - travel.seconds, travel.when, travel.split.T]))
        self._see(rank, travel)
        for name, values in travel.measures.items():
            known = values >= 0
            if known.any():
                self.measured.add(name, rank, travel.when[known], values[known])
        made = np.fromiter((sum(row.ages) for row in rows), float)
        self._stale += float((column(rows, "staleness") * made).sum())
        self._exchanges += int(made.sum())
        ages = [row.ages for row in rows if row.ages]
        places = np.fromiter(chain.from_iterable(map(range, map(len, ages))), int)
        counts = np.fromiter(chain.from_iterable(ages), float)
        self.ages.update({k: int(count) for k, count in enumerate(np.bincount(places, counts))})
        for row in rows:
            for workers, count in row.together.items():
                self.together[int(workers)] += count

    def _see(self, rank: int, travel: Travel) -> None:
        seen = self.seen.setdefault(rank, Series(self._limit))
        begin = float(travel.when[0] - travel.seconds[0])
        if not len(seen) or begin > seen.xs[-1] + 1.0:  # it has begun, or come back: it saw nothing before
            seen.add([begin], [seen.ys[-1] if len(seen) else 0.0])
        seen.add(travel.when, travel.samples)

    def _span(self, first: float, last: float, life: int | None = None) -> None:
        """A worker tells of itself from `first` until `last`, in that life of the run or in the one of that time."""
        life = bisect_right(self._starts, last) if life is None else life
        first = max(first, self._starts[life - 1]) if life else first
        known = self._spans.get(life, (first, last))
        self._spans[life] = min(known[0], first), max(known[1], last)

    def _happen(self, row: Row) -> None:
        self.events += 1
        self.happened.append(row)


def _ended(row: Row) -> str:
    """The state of a worker whose process has ended."""
    exit_code = row.get("exit_code")
    if exit_code == 0:
        return "done"
    if row.get("killed_after"):
        return "killed"
    if row.get("died"):
        return "dead"
    return "stopped" if row.get("stopped") or exit_code in _TOLD else "failed"
