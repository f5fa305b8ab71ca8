"""The rows of a worker elsewhere: its host writes each once, or tells the worker to keep it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maniple.record import Row, read_events
from maniple.wire.messages import JoinRequest
from maniple.worker import heartbeat_sender as module
from maniple.worker.heartbeat_sender import HeartbeatSender
from tests.limits import file_limit
from tests.serving import Serving
from tests.waiting import PATIENCE_S, await_


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path, unix=True)
    yield serving
    serving.close()


@pytest.fixture
def control(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> HeartbeatSender:
    """The control connection of a worker, which sends again soon what could not be written."""
    monkeypatch.setattr(module, "_FULL_S", 0.1)
    control = HeartbeatSender(serving.door(), JoinRequest("elsewhere", 1, -1, 0), count=lambda: (0, 0, False))
    control.join(PATIENCE_S)
    control.start()
    return control


def row(step: int) -> bytes:
    return json.dumps({"event": "log", "timestamp": time.time(), "step": step}).encode() + b"\n"


def path_of(serving: Serving) -> Path:
    return serving.run / "events" / "worker-0.jsonl"


def steps(serving: Serving) -> list[int]:
    return [row["step"] for row in read_events(path_of(serving))]


def test_rows_that_a_full_disk_refuses_are_kept_by_the_worker_and_nobody_is_cut_off(serving, control):
    away: list[int] = []
    control.on_away = lambda: away.append(1)
    with file_limit(1000):  # in the middle of a row
        for step in range(500):
            control.write(row(step))
        await_(lambda: path_of(serving).exists() and path_of(serving).stat().st_size == 1000)
        written = len(steps(serving))
        for step in range(500, 600):
            control.write(row(step))
        time.sleep(1.5)  # a heartbeat at least
        assert control.is_connected and not away
        assert len(steps(serving)) == written
    await_(lambda: len(steps(serving)) >= 600)
    control.leave()
    assert steps(serving) == list(range(600))
    assert [row["event"] for row in _of_server(serving)] == ["serving", "joined", "left"]


def test_of_too_many_rows_the_oldest_are_dropped_and_counted(serving, control, monkeypatch):
    monkeypatch.setattr(module, "_BUFFER_BYTES", 2000)
    with file_limit(0):
        for step in range(500):
            control.write(row(step))
            if step == 250:
                time.sleep(1.5)  # a heartbeat, whose rows are under way from now on
    control.leave()
    rows = read_events(path_of(serving))
    assert rows[-1]["step"] == 499
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert len(rows) + sum(row.get("dropped", 0) for row in rows) == 500
    missed = np.diff([-1, *steps(serving)]) - 1
    assert [row.get("dropped", 0) for row in rows] == missed.tolist(), "recorded where they are missing"


def test_worker_that_leaves_while_the_disk_is_full_says_how_many_rows_are_lost(serving, control):
    with file_limit(0), pytest.warns(UserWarning, match="3 rows of this worker's record are lost") as caught:
        for step in range(3):
            control.write(row(step))
        begin = time.monotonic()
        control.leave(timeout_s=1.0)
        assert time.monotonic() - begin < 30
    assert sum("are lost" in str(one.message) for one in caught) == 1


def _of_server(serving: Serving) -> list[Row]:
    return read_events(serving.run / "events" / "server.jsonl")
