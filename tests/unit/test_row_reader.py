"""Batch decoding of a worker's rows: as each row alone would be read, in their order, without those of operations."""

import json

import pytest

from maniple.monitor.row_reader import bad_progress, column, read_rows, without_operations


def line(event: str, timestamp: object = 1.0, **values: object) -> bytes:
    return json.dumps({"event": event, "timestamp": timestamp, **values}, separators=(",", ":")).encode()


def progress(step: int, **values: object) -> bytes:
    return line("progress", step=step, samples=4 * step, elapsed=0.5 * step, **values)


def test_rows_of_one_kind_are_read_together_and_others_end_their_batch():
    lines = [
        progress(1),
        progress(2),
        line("log", loss=0.5),
        line("log", loss=0.25),
        line("epoch", epoch=1),
        progress(3),
    ]
    first, logged, epoch, last = read_rows(lines)
    assert column(first, "step").tolist() == [1, 2] and column(first, "elapsed").tolist() == [0.5, 1.0]
    assert [row["loss"] for row in logged] == [0.5, 0.25]
    assert epoch["event"] == "epoch"
    assert column(last, "samples").tolist() == [12]


def test_fields_that_a_row_leaves_out_have_their_defaults():
    ((row,),) = read_rows([progress(1, exchanges=2, future_field=[1])])
    assert (row.exchanges, row.exchange, row.staleness, row.ages, row.together) == (2, 0.0, -1.0, [], {})


@pytest.mark.parametrize("kind", ["exchange", "look", "pull", "push", "keep", "wait", "times"])
def test_rows_of_single_operations_are_left_out(kind):
    lines = [progress(1), line(kind, seconds=1.0), progress(2)]
    assert without_operations(lines) == [lines[0], lines[2]]
    (rows,) = read_rows(lines)
    assert column(rows, "step").tolist() == [1, 2], "and end no batch"


@pytest.mark.parametrize(
    "bad",
    [
        b'{"event":"progress","timestamp":1.0,"st',
        progress(-1),
        progress(1 << 54),
        line("progress", step=1, samples=1),
        line("progress", "now", step=1, samples=1, elapsed=1.0),
        progress(1, ages=[1] * 65),
    ],
)
def test_a_bad_progress_row_costs_only_itself_and_is_explained(bad):
    (rows,) = read_rows([progress(1), progress(2), bad, progress(3)])
    assert column(rows, "step").tolist() == [1, 2, 3]
    assert bad_progress(bad) and not bad_progress(progress(1))
    assert list(read_rows([bad])) == []


def test_a_bad_log_row_costs_only_itself():
    deep = b'{"event":"log","timestamp":1.0,"a":' + b"[" * 40 + b"]" * 40 + b"}"
    bad = [deep, line("log", -1.0), line("log", "now"), line("log", 1), b'{"event":"log","timestamp":1.0,"a":\xff}']
    (rows,) = read_rows([line("log", a=1), *bad, line("log", a=2)])
    assert [row["a"] for row in rows] == [1, 2]


def test_other_kinds_of_rows_have_no_progress_to_check():
    assert bad_progress(line("log", step=-1)) == ""
