"""A million mutated frames and rows against a live host, beside honest workers that must not lose anything."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from tests.hostile import HONEST, OWN, SIZE, Attacker, Member, Server, Worker
from tests.process.conftest import MANIPLE, Run
from tests.readers import read_all
from tests.waiting import await_

MUTATED = 1_000_000  # frames and rows together
ROUNDS = 10
SEED = 20_261_117
REPORT = Path(__file__).parents[2] / "artefacts" / "soak.json"


@pytest.fixture
def server(tmp_path):
    """A host alone."""
    run = Run(tmp_path, "soak", [str(MANIPLE), "serve", "--name", "soak"], {})
    try:
        yield Server(run)
    finally:
        if run.process.poll() is None:
            run.signal(signal.SIGTERM)
            run.wait()


def strangers(attacker: Attacker, due: int) -> None:
    """Peers without the token, and insiders that break a frame of each burst."""
    while attacker.counts["frames mutated"] < due:
        for _ in range(20):
            attacker.stranger()
        for act in (attacker.insider, attacker.member, attacker.doctor, attacker.watcher, attacker.insider):
            act()


def questions(attacker: Attacker, due: int) -> None:
    """Peers with the token whose questions are refused one by one."""
    while attacker.counts["frames mutated"] < due:
        attacker.questions(250)
        attacker.insider()


def rows(attacker: Attacker, due: int) -> None:
    """Members that send damaged rows."""
    while attacker.counts["rows mutated"] < due:
        attacker.rows(20, 250)


# What each kind of attack has to send, as a share of all.
SHARES = ((strangers, 0.10), (questions, 0.40), (rows, 0.50))


def attack(server: Server, number: int) -> Counter[str]:
    """One round of all attacks at the same time, beside a crowd of silent strangers."""
    silent = [server.connect(random.Random(number)) for _ in range(120)]
    attackers = [Attacker(server, SEED + 10 * number + k) for k in range(len(SHARES))]
    with ThreadPoolExecutor(len(SHARES)) as pool:
        work = [
            pool.submit(act, attacker, int(share * MUTATED / ROUNDS) + 1)
            for attacker, (act, share) in zip(attackers, SHARES, strict=True)
        ]
        for one in work:
            one.result(1800)
    for link in silent:
        link.close()
    return sum((attacker.counts for attacker in attackers), Counter())


@pytest.mark.timeout(5400)
def test_nothing_is_lost_to_a_million_mutated_frames_and_rows(server, monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", server.token)
    with maniple.Client(str(server.unix)) as first:
        first.create(HONEST, np.zeros(SIZE))
        for name, value in OWN.items():
            first.create(name, value)
    workers, member = [Worker(server.unix, 1), Worker(server.tcp, 1000)], Member(server)
    for one in (*workers, member):
        one.start()
    await_(lambda: all(worker.times for worker in workers) and member.sent)
    held, counts, begin = server.held, Counter(), time.monotonic()
    resident = [server.resident_bytes]
    for number in range(ROUNDS):
        counts += attack(server, number)
        resident.append(server.resident_bytes)
        print(f"round {number + 1}: {resident[-1] >> 20} MB, {time.monotonic() - begin:.0f} s", flush=True)
    seconds = time.monotonic() - begin
    for one in (*workers, member):
        one.end()
        assert one.error is None
    total = float(sum(worker.pushed for worker in workers))
    with maniple.Client(str(server.tcp), timeout_s=20) as client:
        np.testing.assert_array_equal(client.pull(HONEST), np.full(SIZE, total))
    await_(lambda: all(now <= before + 2 for now, before in zip(server.held, held, strict=True)), 60)
    after = server.held
    log = (server.folder / "logs" / "server.log").read_text()
    served = [row["pid"] for row in server.run.events("host", "server")]

    server.run.signal(signal.SIGTERM)
    assert server.run.wait() == 0, server.run.output
    saved = load_file(server.folder / "center" / "arrays.safetensors")[HONEST]
    np.testing.assert_array_equal(saved, np.full(SIZE, total))
    assert [row["number"] for row in server.run.events(member.rank, "log")] == list(range(member.sent))
    begin_read = time.monotonic()
    board = read_all(server.folder)
    reading = time.monotonic() - begin_read
    for words in (["status"], ["compare"], ["compare", "--json"]):
        subprocess.run([MANIPLE, *words, server.folder], check=True, capture_output=True, timeout=300)

    rejected = sum(row["rows"] for rank in board.standings for row in server.run.events(rank, "rejected"))
    report = {
        "mutated": counts["frames mutated"] + counts["rows mutated"],
        "frames_mutated": counts["frames mutated"],
        "rows_mutated": counts["rows mutated"],
        "rows_rejected": rejected,
        "frames_sent": counts["frames"],
        "connections": counts["connections"],
        "answers": counts["answers"],
        "refused": {name[9:]: count for name, count in sorted(counts.items()) if name.startswith("refused: ")},
        "honest_pushes": sum(len(worker.times) for worker in workers),
        "honest_rows": member.sent,
        "seconds": round(seconds, 1),
        "reading_seconds": round(reading, 1),
        "resident_mb": [size >> 20 for size in resident],
        "descriptors_and_threads": {"before": held, "after": after},
        "log_bytes": len(log),
        "events_mb": sum(path.stat().st_size for path in (server.folder / "events").iterdir()) >> 20,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2), flush=True)
    assert report["mutated"] >= MUTATED
    assert rejected > 0.3 * counts["rows mutated"]
    assert resident[-1] <= resident[2] + (30 << 20), "memory does not grow from round to round"
    assert served == [server.pid], "the first server serves"
    assert "Traceback" not in log, log[-3000:]
