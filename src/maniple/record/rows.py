"""What a row must be so that it can be used: bounds that hold for every reader, wherever the row comes from.

The host checks the rows of workers elsewhere before it writes them. Files may still be damaged, or written by a faulty
worker of this machine, so readers apply the same checks.
"""

import re
import sys
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Row = dict[str, Any]

MAX_ROW_BYTES = 1 << 20
MAX_DEPTH = 32  # levels of lists and objects; a recursive encoder or decoder gives up at some hundreds
MAX_NAMED_WORKERS = 1 << 16

Moment = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since 1970; later ones are no dates for the C library
Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # what a float64 holds exactly: readers compute with those
Amount = Annotated[float, Meta(ge=-1e15, le=1e15)]  # sums and differences of many stay finite
_ExitCode = Annotated[int, Meta(ge=-255, le=255)]
_Rank = Annotated[int, Meta(ge=0, lt=MAX_NAMED_WORKERS)]


class _Sound(msgspec.Struct):
    """What all rows have."""

    event: Annotated[str, Meta(min_length=1, max_length=64)]
    timestamp: Moment


class _Joined(_Sound):
    worker: _Rank = 0
    live: Count = 0
    exit_code: _ExitCode | None = None
    killed_after: Amount = 0.0


class _Share(_Sound):
    rule: str = ""
    pace: str = ""
    parameters: Count = 0
    bytes: Count = 0


class _Sampler(_Sound):
    size: Count = 0


class _Failed(_Sound):
    exit_code: _ExitCode = 1
    error: str = ""


class _Epoch(_Sound):
    epoch: Count = 0


class _Times(_Epoch):
    batches: Count = 0
    compute: Amount = 0.0
    exchange: Amount = 0.0
    data: Amount = 0.0
    others: Amount = 0.0
    lr: Amount | str | None = None  # "nan" has no number in JSON


class _Start(_Sound):
    workers: _Rank | None = None


class _Waiting(msgspec.Struct, rename={"whom": "for"}):
    whom: Annotated[list[_Rank], Meta(max_length=4096)]
    seconds: Amount


class _Restored(_Sound):
    updates: Count = 0
    saved: Moment = 0.0


# Fields that readers compute with, by the kind of row. All may be missing, but for those of `waiting`.
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
    """A row cannot be used, for this reason."""


def decode_row(line: bytes) -> Row:
    """The row in a line; BadRow tells what is wrong with it."""
    if len(line) > MAX_ROW_BYTES:
        raise BadRow(f"it has {len(line)} bytes, where {MAX_ROW_BYTES} are the most")
    if is_deep(line):
        raise BadRow(f"it is nested more than {MAX_DEPTH} levels deep")
    try:
        row = msgspec.json.decode(line, type=Row)
        known = msgspec.convert(row, _Sound)
        if (kind := _KINDS.get(known.event)) is not None:
            msgspec.convert(row, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(str(error)) from None
    if _LARGE.search(line) and not _is_finite(row):
        raise BadRow("it holds a number that is too large for a float64")
    return row


def is_deep(line: bytes) -> bool:
    """It is nested too deeply; what stands between quotes does not count."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for sign in _STRING.sub(b"", line):
        depth += (sign in b"[{") - (sign in b"]}")
        if depth > MAX_DEPTH:
            return True
    return False


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, int) or abs(value) <= sys.float_info.max
