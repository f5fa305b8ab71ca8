"""Rows on disk that are damaged or made up: every reader passes over them, and reads the rest."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.readers import read_all
from tests.written import T0, Written

KINDS = (
    "join", "leave", "share", "changed", "validated", "sampler", "failed", "times", "epoch", "progress", "log",
    "start", "end", "stop", "restored", "joined", "lost", "left", "exit", "started", "rejected", "exchange", "x",
)  # fmt: skip
FIELDS = (
    "timestamp", "datestamp", "worker", "step", "samples", "elapsed", "exchange", "data", "others", "compute", "ages",
    "together", "staleness", "bytes", "cpu", "memory", "rule", "pace", "digest", "parameters", "epoch", "loss", "lr",
    "batches", "size", "validation", "exit_code", "error", "failed", "workers", "live", "reason", "updates", "saved",
    "snapshot", "node", "center", "died", "event", "rounds", "exchanges", "sync_share", "traceback", "gpu_memory",
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(), st.sampled_from([0, -1, 2**53, 2**63, 2**64, 10**400, -(10**400), T0, 1e308, -1e308, 1e18, 5e-324])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.builds(
    lambda kind, when, rest: {"event": kind, "timestamp": when} | rest,
    st.sampled_from(KINDS) | VALUES,
    st.floats(T0, T0 + 100) | VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
).map(lambda row: json.dumps(row, separators=(",", ":")).encode())
LINES = st.one_of(
    ROWS,
    ROWS,
    st.binary(max_size=60),
    st.tuples(ROWS, st.integers(0, 300)).map(lambda cut: cut[0][: cut[1]]),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"event":"log","timestamp":1700000000.5,"loss":' + b"[" * 100_000,
            b'{"event":"log","timestamp":1700000000.5,"loss":' + b"[" * 300 + b"]" * 300 + b"}",
            b'{"event":"start","timestamp":1700000000.5,"workers":1000000000000}',
            b'{"event":"log","timestamp":1700000000.5,"loss":"\xff"}',
            b'{"event":"lost","timestamp":1700000000.5,"worker":0}',
        ]
    ),
)


def honest(written: Written, rank: int, at: float) -> None:
    """What an honest worker writes."""
    written.row(rank, "join", at, node="n", pid=1)
    written.row(rank, "log", at + 1, step=1, loss=0.5)
    written.progress(rank, at + 1, step=7, samples=70, exchange=0.1, exchanges=3, bytes=10, ages=[1, 2], staleness=1.0)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=150)
@given(st.lists(LINES, max_size=12), st.lists(LINES, max_size=6), st.booleans())
def test_no_row_on_disk_stops_a_reader_or_costs_the_rows_of_another_worker(tmp_path_factory, own, hosts, has_end):
    written = Written(tmp_path_factory.mktemp("damaged") / "run")
    honest(written, 0, 0)
    for who, lines in ((1, own), ("host", hosts), ("server", hosts)):
        written.folder.events(who).write_bytes(b"\n".join(lines) + b"\n" * has_end)
    honest(written, 1, 50)
    board = read_all(written.folder.path)
    assert board.workers[0].now.step == 7
    assert board.workers[0].total.samples == 70


@pytest.mark.parametrize(
    "damage",
    [
        b'{"event":"progress","timestamp":1700000002.0,"step":' + b"9" * 400 + b',"samples":1,"elapsed":2.0}',
        b'{"event":"progress","timestamp":1e300,"step":2,"samples":1,"elapsed":2.0}',
        b'{"event":"progress","timestamp":1700000002.0,"step":2,"samples":1,"elapsed":1e300}',
        b'{"event":"log","timestamp":1700000002.0,"loss":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"event":"log","loss":1}',
        b'{"event":"log","timestamp":"now","loss":1}',
        b'{"event":"log","timestamp":1700000002.0,"loss":' + b"9" * 400 + b"}",
        b'{"event":"log","timestamp":1700000002.0,"text":"' + b"x" * (3 << 20) + b'"}',
    ],
    ids=["step", "time", "elapsed", "nested", "no-time", "time-word", "loss", "long"],
)
def test_one_damaged_row_costs_only_itself(tmp_path, damage):
    written = Written(tmp_path / "run")
    written.row(0, "join", 0)
    written.row(0, "log", 1, loss=0.5)
    written.progress(0, 1, step=1, samples=10)
    with written.folder.events(0).open("ab") as file:
        file.write(damage + b"\n")
    written.row(0, "log", 3, loss=0.25)
    written.progress(0, 3, step=3, samples=30)
    state = read_all(written.folder.path)
    assert state.logged.named["loss"][0].points() == ([T0 + 1, T0 + 3], [0.5, 0.25])
    assert (state.workers[0].now.step, state.totals().samples) == (3, 30)
    assert state.until == T0 + 3
