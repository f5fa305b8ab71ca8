"""Validation of rows: types and bounds that every reader can rely on, wherever a row comes from.

The host checks the rows of workers elsewhere before it writes them. Files may still be damaged or written by a faulty
local worker, so readers apply the same checks.
"""

import re
import sys
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Row = dict[str, Any]

# Keys of a row that are not values.
METADATA_KEYS = {"event", "timestamp", "datestamp", "worker", "step", "center", "dropped"}
NON_FINITE = {"nan", "inf", "-inf"}  # strings that workers write, since JSON has no such numbers
MAX_ROW_BYTES = 1 << 20
MAX_DEPTH = 32  # levels of lists and objects; recursive decoders fail at some hundreds
MAX_NAMED_WORKERS = 1 << 16

Moment = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since 1970; the C library has no dates beyond
Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # exact in float64, with which readers compute
Amount = Annotated[float, Meta(ge=-1e15, le=1e15)]  # so that sums and differences of many stay finite
_ExitCode = Annotated[int, Meta(ge=-255, le=255)]
_Rank = Annotated[int, Meta(ge=0, lt=MAX_NAMED_WORKERS)]


class _AnyRow(msgspec.Struct):
    """Fields of all rows."""

    event: Annotated[str, Meta(min_length=1, max_length=64)]
    timestamp: Moment


class _Joined(_AnyRow):
    worker: _Rank = 0
    live: Count = 0
    exit_code: _ExitCode | None = None
    killed_after: Amount = 0.0


class _Share(_AnyRow):
    rule: str = ""
    pace: str = ""
    parameters: Count = 0
    bytes: Count = 0


class _Sampler(_AnyRow):
    size: Count = 0


class _Failed(_AnyRow):
    exit_code: _ExitCode = 1
    error: str = ""


class _Epoch(_AnyRow):
    epoch: Count = 0


class _Times(_Epoch):
    batches: Count = 0
    compute: Amount = 0.0
    exchange: Amount = 0.0
    data: Amount = 0.0
    others: Amount = 0.0
    lr: Amount | str | None = None  # "nan", which is not a number in JSON


class _Start(_AnyRow):
    workers: _Rank | None = None


class _Waiting(msgspec.Struct, rename={"whom": "for"}):
    whom: Annotated[list[_Rank], Meta(max_length=4096)]
    seconds: Amount


class _Restored(_AnyRow):
    updates: Count = 0
    saved: Moment = 0.0


# Fields that readers compute with, by the kind of row. All may be missing except those of `waiting`.
_KINDS: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(("share", "changed"), _Share),
    **dict.fromkeys(("epoch", "validation", "validated"), _Epoch),
    **dict.fromkeys(("joined", "restarted", "returned", "left", "lost", "given up", "started", "exit", "end"), _Joined),
    "sampler": _Sampler,
    "failed": _Failed,
    "times": _Times,
    "start": _Start,
    "restored": _Restored,
    "waiting": _Waiting,
}
_LARGE = re.compile(rb"[0-9]{300}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


class BadRow(ValueError):
    """A row is invalid; the message says why."""


def decode_row(line: bytes) -> Row:
    """Decode one line; raises BadRow if it is not a valid row."""
    if len(line) > MAX_ROW_BYTES:
        raise BadRow(f"it has {len(line)} bytes; the limit is {MAX_ROW_BYTES}")
    if is_deep(line):
        raise BadRow(f"it is nested more than {MAX_DEPTH} levels deep")
    try:
        row = msgspec.json.decode(line, type=Row)
        known = msgspec.convert(row, _AnyRow)
        if (kind := _KINDS.get(known.event)) is not None:
            msgspec.convert(row, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(str(error)) from None
    if _LARGE.search(line) and not _is_finite(row):
        raise BadRow("it holds a number that is too large for a float64")
    return row


def is_deep(line: bytes) -> bool:
    """True if lists and objects are nested too deeply; brackets inside strings do not count."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for sign in _STRING.sub(b"", line):
        depth += (sign in b"[{") - (sign in b"]}")
        if depth > MAX_DEPTH:
            return True
    return False


def numbers(row: Row) -> dict[str, float]:
    """All numbers of a row; strings and lists are skipped."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in METADATA_KEYS or isinstance(value, bool):
            continue
        if isinstance(value, int | float) or (isinstance(value, str) and value in NON_FINITE):
            with suppress(OverflowError):  # an integer beyond float64
                found[name] = float(value)
    return found


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, int) or abs(value) <= sys.float_info.max
