"""The rows that tell how far a worker is: exact in sum, and bounded however fast it exchanges."""

from pathlib import Path

import pytest

from maniple.clock import clock
from maniple.contracts import Outcome
from maniple.record import Events, Row, read_events
from maniple.replica.replica import DataTime, ExchangeRows, Progress

# Bytes of the rows of one worker, as docs/run.md promises: in the first hour, and in each day after it.
HOUR_S, FIRST_HOUR = 3_600, 4e6
DAY_S, LATER_DAY = 86_400, 40e6


class Replica:
    """One that exchanges a thousand times a second, by a clock of its own."""

    waited_s = 0.0

    def __init__(self, path: Path) -> None:
        self.steps = self.total_samples = 0
        self.spent_s = self.now = 0.0
        self.path, self.events = path, Events(path, worker=1000)
        self.progress, self.acts = Progress(self.events), ExchangeRows(self.events)
        self.begin = self.progress.start
        self.between = DataTime(self)

    def train(self, steps: int, **unusual) -> None:
        for _ in range(steps):
            self.now += 1e-3
            self.steps += 1
            self.total_samples += 128
            self.spent_s += 1e-4
            self.progress.exchange(Outcome(size_bytes=123_456_789, staleness=7.123456789))
            times = {"start": 1.7e9 + self.now + 1e-7, "end": 1.7e9 + self.now + 2e-7}
            self.acts.write(
                "exchange", step=self.steps, **times, bytes=123_456_789, staleness=7.123456789,
                **{"duration": 1.23456789e-4} | unusual,
            )  # fmt: skip
            if self.begin + self.now >= self.progress.next_row:
                self.progress.write(self, self.begin + self.now)

    def grown(self, steps: int) -> int:
        """By how many bytes the record grows in so many steps."""
        before = self.path.stat().st_size
        self.train(steps)
        return self.path.stat().st_size - before

    def rows(self, event: str) -> list[Row]:
        return [row for row in read_events(self.path) if row["event"] == event]


@pytest.fixture
def replica(tmp_path, monkeypatch):
    replica = Replica(tmp_path / "worker-1000.jsonl")
    monkeypatch.setattr(clock, "monotonic", lambda: replica.now)
    return replica


def test_thousand_exchanges_a_second_fill_no_disk(replica):
    replica.train(1_000)
    assert [row["step"] for row in replica.rows("exchange")] == list(range(1, 1001)), "the first ones are all there"
    first = replica.path.stat().st_size
    assert first + replica.grown(60_000) / 60 * HOUR_S < FIRST_HOUR
    replica.now += HOUR_S
    assert 0.5 * LATER_DAY < replica.grown(60_000) / 60 * DAY_S < LATER_DAY


def test_sums_of_thinned_rows_are_exact(replica):
    replica.train(30_000)
    replica.acts.finish()
    replica.progress.write(replica, replica.begin + replica.now)
    replica.acts.finish()  # nothing is left
    rows = replica.rows("exchange")
    assert len(rows) < 1_100
    assert sum(1 + row.get("skipped", 0) for row in rows) == 30_000
    assert rows[-1]["step"] == 30_000, "the last one is recorded when the worker leaves"
    progress = replica.rows("progress")
    assert (progress[-1]["exchanges"], progress[-1]["bytes"]) == (30_000, 30_000 * 123_456_789)
    assert sum(sum(row.get("ages", [])) for row in progress) == 30_000


@pytest.mark.parametrize("unusual", [{"refused": ["w"]}, {"torn": ["w"]}, {"duration": 0.1}], ids=str)
def test_remarkable_exchanges_are_recorded_among_many_and_bounded_too(replica, unusual):
    replica.train(2_000)
    replica.train(1, **unusual)
    last = replica.rows("exchange")[-1]
    assert last["step"] == 2_001
    assert last.items() >= unusual.items()
    replica.train(10_000, **unusual)
    assert len(replica.rows("exchange")) < 2_100


def test_rare_acts_are_recorded_however_many_others_there_are(replica):
    for _ in range(5):
        replica.train(2_000)
        replica.acts.write("look", step=replica.steps, duration=0.01)
    assert len(replica.rows("look")) == 5
