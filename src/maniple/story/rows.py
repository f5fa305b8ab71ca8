"""Rows by the thousand: those of one kind are decoded together, and become columns."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from maniple.record import Row
from maniple.record.events import parse_events
from maniple.record.rows import MAX_ROW_BYTES, Amount, Count, Moment, is_deep

T = TypeVar("T")


class ProgressRow(msgspec.Struct, gc=False):
    """A row `progress` of a worker, as `worker.progress` writes it."""

    timestamp: Moment
    step: Count
    samples: Count
    elapsed: Amount
    sync_share: Amount = 0.0
    exchange: Amount = 0.0
    data: Amount = 0.0
    others: Amount = 0.0
    measures_data: bool = False  # `data` has all time between steps and forward passes, and not only that of feeds
    exchanges: Count = 0
    rounds: Count = 0
    bytes: Count = 0
    cpu: Amount = 0.0
    memory: Count = 0
    gpu_memory: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)] = -1  # it uses none
    staleness: Amount = -1.0  # nothing was exchanged
    ages: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    together: dict[Count, Count] = {}


_HEAD, _MARK = len(b'{"event":"'), 10


def _mark(kind: str) -> bytes:
    """What a row of this kind has behind its first word: with the quote that ends it, so that it is no other kind's."""
    return f'{kind}","timestamp'.encode()[:_MARK]


_PROGRESS, _LOG = _mark("progress"), _mark("log")
# Single acts, and what `maniple record` reads: they are added up in rows `progress`.
_PASSED = set(map(_mark, ("exchange", "look", "pull", "push", "keep", "wait", "times")))


def needed(lines: list[bytes]) -> list[bytes]:
    """Those that are no rows of single acts."""
    return [line for line in lines if line[_HEAD : _HEAD + _MARK] not in _PASSED]


def sort_rows(lines: list[bytes]) -> Iterator[list[ProgressRow] | list[Row] | Row]:
    """The rows of one worker: many `progress` or many `log`, or one of another kind, before and after which the
    others stay as they were."""
    progress: list[bytes] = []
    log: list[bytes] = []
    for line in [*needed(lines), b""]:
        mark = line[_HEAD : _HEAD + _MARK]
        if mark == _LOG:
            log.append(line)
        elif mark == _PROGRESS:
            progress.append(line)
        else:
            if found := _decoded(_PROGRESS_ROWS, progress):
                yield found
            if found := _logged(log):
                yield found
            progress, log = [], []
            yield from parse_events([line])


def column(rows: list[ProgressRow], name: str) -> np.ndarray:
    """One number of each row."""
    return np.fromiter(map(attrgetter(name), rows), np.float64, len(rows))


def bad_progress(line: bytes) -> str:
    """What is wrong with a row `progress`; nothing if all is well, or if it is another row."""
    if line[_HEAD : _HEAD + _MARK] == _PROGRESS:
        try:
            _PROGRESS_ROWS.decode(b"[" + line + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return str(error)
    return ""


def _logged(lines: list[bytes]) -> list[Row]:
    """Rows `log`, which are many: decoded together, and then checked for what `decode_row` asks of all rows."""
    flat = [line for line in lines if len(line) <= MAX_ROW_BYTES and not is_deep(line)]
    return [row for row in _decoded(_ROWS, flat) if type(when := row.get("timestamp")) is float and 0 <= when <= 1e11]


def _decoded(decoder: "msgspec.json.Decoder[list[T]]", lines: list[bytes]) -> list[T]:
    """The rows in `lines`; those cut by a full disk or a crash, or that somebody has made up, are passed over."""
    try:
        return decoder.decode(b"[" + b",".join(lines) + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if len(lines) <= 1:
            return []
        middle = len(lines) // 2
        return _decoded(decoder, lines[:middle]) + _decoded(decoder, lines[middle:])


_PROGRESS_ROWS = msgspec.json.Decoder(list[ProgressRow])
_ROWS = msgspec.json.Decoder(list[dict[str, Any]])
