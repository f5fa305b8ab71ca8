"""Batch decoding of a worker's rows: thousands of one kind are decoded in one call and become columns."""

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np

from maniple.monitor.measures import MEASURES, Latest, Rate
from maniple.record import Row
from maniple.record.events import parse_events
from maniple.record.rows import MAX_ROW_BYTES, Amount, Count, Moment, is_deep

T = TypeVar("T")


class _CommonFields(msgspec.Struct, gc=False):
    """The fields of a progress row that readers compute with by name; those of other measures are added below."""

    timestamp: Moment
    step: Count
    samples: Count
    elapsed: Amount
    exchange: Amount = 0.0
    data: Amount = 0.0
    others: Amount = 0.0
    measures_data: bool = False  # `data` covers all time between steps and forward passes, not only that of feeds
    exchanges: Count = 0
    rounds: Count = 0
    bytes: Count = 0
    staleness: Amount = -1.0  # nothing was exchanged
    ages: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    together: dict[Count, Count] = {}


_SOURCES = [measure.source for measure in MEASURES if isinstance(measure.source, Latest | Rate)]

if TYPE_CHECKING:
    ProgressRow = _CommonFields
else:
    ProgressRow = msgspec.defstruct(
        "ProgressRow",
        [(one.key, one.type, one.default) for one in _SOURCES if one.key not in _CommonFields.__struct_fields__],
        bases=(_CommonFields,),
        gc=False,
    )

# The first bytes behind `{"event":"`, including the quote that ends the name, tell the kind of a row.
_HEAD, _MARK = len(b'{"event":"'), 10


def _mark(kind: str) -> bytes:
    return f'{kind}","timestamp'.encode()[:_MARK]


_PROGRESS, _LOG = _mark("progress"), _mark("log")
# Single operations and the rows of `maniple record`: progress rows contain their sums.
_SKIPPED = set(map(_mark, ("exchange", "look", "pull", "push", "keep", "broken", "wait", "times")))
_PROGRESS_ROWS = msgspec.json.Decoder(list[ProgressRow])
_ROWS = msgspec.json.Decoder(list[dict[str, Any]])


def read_rows(lines: list[bytes]) -> Iterator[list[ProgressRow] | list[Row] | Row]:
    """The rows of one worker: many `progress` or many `log` rows at once, any other kind alone.

    Batches end at rows of other kinds, so that those apply to the state before and after them.
    """
    progress: list[bytes] = []
    log: list[bytes] = []
    for line in [*without_operations(lines), b""]:
        mark = line[_HEAD : _HEAD + _MARK]
        if mark == _LOG:
            log.append(line)
        elif mark == _PROGRESS:
            progress.append(line)
        else:
            if found := _decode(_PROGRESS_ROWS, progress):
                yield found
            if found := _decode_log(log):
                yield found
            progress, log = [], []
            yield from parse_events([line])


def without_operations(lines: list[bytes]) -> list[bytes]:
    """`lines` without the rows of single operations."""
    return [line for line in lines if line[_HEAD : _HEAD + _MARK] not in _SKIPPED]


def column(rows: list[ProgressRow], name: str) -> np.ndarray:
    """One field of all rows."""
    return np.fromiter(map(attrgetter(name), rows), np.float64, len(rows))


def bad_progress(line: bytes) -> str:
    """What is wrong with a progress row; "" if it is fine or another kind of row."""
    if line[_HEAD : _HEAD + _MARK] == _PROGRESS:
        try:
            _PROGRESS_ROWS.decode(b"[" + line + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return str(error)
    return ""


def _decode_log(lines: list[bytes]) -> list[Row]:
    """Log rows, decoded together and then checked as `decode_row` checks single rows."""
    flat = [line for line in lines if len(line) <= MAX_ROW_BYTES and not is_deep(line)]
    return [row for row in _decode(_ROWS, flat) if type(when := row.get("timestamp")) is float and 0 <= when <= 1e11]


def _decode(decoder: "msgspec.json.Decoder[list[T]]", lines: list[bytes]) -> list[T]:
    """The valid rows in `lines`. A bad row, cut by a full disk or a crash, is found by bisection and skipped."""
    try:
        return decoder.decode(b"[" + b",".join(lines) + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if len(lines) <= 1:
            return []
        middle = len(lines) // 2
        return _decode(decoder, lines[:middle]) + _decode(decoder, lines[middle:])
