"""The messages between a watcher and a host."""

import re

from maniple.wire.said import Said

PIECE_BYTES = 1 << 20  # the most that one answer holds
NAME = re.compile(r"run\.json|events/[A-Za-z0-9_-]+\.jsonl")  # the files that tell of a run; no others are shown


class Files(Said, frozen=True, tag=70):
    """Watcher: which files tell of the run?"""


class Found(Said, frozen=True, tag=71):
    """Host: those in the payload, as JSON: name, bytes, and when each was written. `is_over`: the run has ended."""

    is_over: bool = False


class Read(Said, frozen=True, tag=72):
    """Watcher: what stands in file `name` from `offset` on?"""

    name: str
    offset: int


class Piece(Said, frozen=True, tag=73):
    """Host: what is in the payload; there may be more."""


class Order(Said, frozen=True, tag=74):
    """Watcher: I am `who`. Do `what`: "stop", "snapshot", or "change" the settings in the payload, as JSON."""

    what: str
    who: str


class Done(Said, frozen=True, tag=75):
    """Host: it is done; `text` tells what."""

    text: str


WatchMessage = Files | Found | Read | Piece | Order | Done
