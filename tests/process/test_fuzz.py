"""Hostile bytes: strangers and workers gone mad talk to a live host, and honest workers notice nothing."""

import signal
import time
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from tests.hostile import HONEST, OWN, SIZE, Member, Server, Worker, attack
from tests.readers import read_all
from tests.waiting import await_

from .conftest import MANIPLE, Run

pytestmark = [pytest.mark.process]

FRAMES = 100_000
ROWS = 8000
SEED = 20_240_607


def test_honest_workers_notice_nothing_of_100_000_hostile_frames(server, monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", server.token)
    with maniple.Client(str(server.unix)) as first:
        first.create(HONEST, np.zeros(SIZE))
        for name, value in OWN.items():
            first.create(name, value)
    workers, member = [Worker(server.unix, 1), Worker(server.tcp, 1000)], Member(server)
    member.start()
    for worker in workers:
        worker.start()
    await_(lambda: all(worker.times for worker in workers))
    held, begin, counts = server.held, time.monotonic(), Counter()
    resident = [attack(server, SEED + half, FRAMES // 2, counts) for half in range(2)]
    end = time.monotonic()
    print(f"{dict(counts)} in {end - begin:.1f} s, resident {[r >> 20 for r in resident]} MB, held {held}")

    assert counts["frames"] >= FRAMES
    assert counts["answers"] >= 0.4 * FRAMES, "what follows a broken frame is not read, but most are"
    begin_answer = time.monotonic()
    with maniple.Client(str(server.tcp), timeout_s=5) as client:
        client.pull(HONEST)
        assert time.monotonic() - begin_answer < 2
    assert counts["rows mutated"] >= ROWS
    member.end()
    assert member.error is None
    for worker in workers:
        worker.end()
        assert worker.error is None
        assert worker.longest_gap_s(begin, end) < 5
    with maniple.Client(str(server.tcp), timeout_s=5) as client:
        np.testing.assert_array_equal(client.pull(HONEST), np.full(SIZE, float(sum(w.pushed for w in workers))))
    await_(lambda: all(now <= before + 2 for now, before in zip(server.held, held, strict=True)), 20)
    assert resident[1] <= resident[0] + (20 << 20)
    assert [row["pid"] for row in server.run.events("host", "server")] == [server.pid], "the first server serves"
    log = (server.folder / "logs" / "server.log").read_text()
    assert "Traceback" not in log, log[-3000:]

    server.run.signal(signal.SIGTERM)
    assert server.run.wait() == 0, server.run.output
    saved = load_file(server.folder / "center" / "arrays.safetensors")[HONEST]
    np.testing.assert_array_equal(saved, np.full(SIZE, float(sum(w.pushed for w in workers))))
    rows = [row["number"] for row in server.run.events(member.rank, "log")]
    assert rows == list(range(member.sent)), "each row of the honest member, once and in order"
    read_all(server.folder)


@pytest.fixture
def server(tmp_path):
    """A host alone."""
    run = Run(tmp_path, "fuzz", [str(MANIPLE), "serve", "--name", "fuzz"], {})
    try:
        yield Server(run)
    finally:
        if run.process.poll() is None:
            run.signal(signal.SIGTERM)
            run.wait()
