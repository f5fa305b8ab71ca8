"""Waits for batches: added up, and written as few rows."""

import pytest

from maniple.clock import clock
from maniple.feed.local_feed import WaitTimes
from maniple.record import Events, read_events
from tests.simulated_clock import SimulatedClock


def test_waits_are_added_up_and_written_twice_a_second_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(WaitTimes, "events", Events(tmp_path / "worker-0.jsonl"))
    time, before = SimulatedClock(100.0), WaitTimes.total_s
    with clock.replaced(time):
        waits = WaitTimes("train")
        for _ in range(1000):
            time.now += 1 / 128
            waits.add(1 / 256)
        waits.add(0.5, batches=0)
        waits.flush()
        waits.flush()
    rows = read_events(tmp_path / "worker-0.jsonl")
    assert len(rows) == 16, "one in 0.5 s, and one for the rest"
    assert {row["feed"] for row in rows} == {"train"} and sum(row["batches"] for row in rows) == 1000
    assert sum(row["seconds"] for row in rows) == 1000 / 256 + 0.5 == pytest.approx(WaitTimes.total_s - before)
