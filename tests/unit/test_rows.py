"""Rows of the record: what is refused before it is written or read, so that every reader can compute with the rest."""

import json

import pytest

from maniple.record.rows import MAX_DEPTH, MAX_ROW_BYTES, BadRow, decode_row


def line(event: str = "log", timestamp: object = 1.5, **values: object) -> bytes:
    return json.dumps({"event": event, "timestamp": timestamp, **values}).encode()


@pytest.mark.parametrize(
    "values",
    [{}, {"loss": 0.25, "name": "ä", "list": [1, {"a": None}]}, {"loss": "nan"}, {"large": 1 << 200}],
)
def test_a_row_is_read_as_it_was_written(values):
    assert decode_row(line(**values)) == {"event": "log", "timestamp": 1.5, **values}


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("epoch", {"epoch": 3}),
        ("exit", {"worker": 0, "exit_code": -9}),
        ("waiting", {"for": [1, 2], "seconds": 2.5}),
        ("times", {"epoch": 0, "batches": 1, "lr": "nan"}),
        ("of a later version", {"epoch": "three"}),
    ],
)
def test_fields_of_every_kind_of_row_are_accepted(event, values):
    assert decode_row(line(event, **values)).items() >= values.items()


@pytest.mark.parametrize(
    ("event", "values", "reason"),
    [
        ("", {}, r"length >= 1.*event"),
        ("x" * 65, {}, r"length <= 64"),
        ("log", {"timestamp": "now"}, r"Expected `float`, got `str`"),
        ("log", {"timestamp": -1.0}, r">= 0"),
        ("log", {"timestamp": 1e12}, r"<= 1"),
        ("epoch", {"epoch": -1}, r">= 0.*epoch"),
        ("epoch", {"epoch": 2.5}, r"Expected `int`"),
        ("joined", {"worker": 1 << 16}, r"<= 65535.*worker"),
        ("exit", {"exit_code": 256}, r"<= 255"),
        ("share", {"bytes": 1 << 54}, r"<= 9007199254740992"),
        ("waiting", {"for": 3, "seconds": 1.0}, r"Expected `array`"),
        ("waiting", {"for": [3]}, r"missing required field `seconds`"),
        ("restored", {"saved": float(1 << 60)}, r"<= 1"),
        ("log", {"loss": 10**400}, r"too large for a float64"),
        ("log", {"deep": [{"a": [10**400]}]}, r"too large for a float64"),
    ],
)
def test_a_row_that_a_reader_could_not_compute_with_is_refused(event, values, reason):
    with pytest.raises(BadRow, match=reason):
        decode_row(line(event, **values))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"1", b'{"event":"log"}', b'{"timestamp":1.5}', b'{"event":"\xff"}']
)
def test_what_is_no_row_is_refused(data):
    with pytest.raises(BadRow):
        decode_row(data)


def test_a_row_has_a_limited_size_and_depth():
    assert decode_row(line(text="x" * (MAX_ROW_BYTES - 100)))
    with pytest.raises(BadRow, match=f"the limit is {MAX_ROW_BYTES}"):
        decode_row(line(text="x" * MAX_ROW_BYTES))
    within = MAX_DEPTH - 1
    assert decode_row(b'{"event":"log","timestamp":1.5,"a":' + b"[" * within + b"]" * within + b"}")
    for depth in (MAX_DEPTH, 100_000):
        with pytest.raises(BadRow, match=f"more than {MAX_DEPTH} levels deep"):
            decode_row(b'{"event":"log","timestamp":1.5,"a":' + b"[" * depth + b"]" * depth + b"}")


def test_brackets_in_text_are_no_depth():
    text = "[{" * 1000 + '"\\"['
    assert decode_row(line(text=text))["text"] == text
