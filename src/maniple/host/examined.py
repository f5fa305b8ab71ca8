"""The host's half of `maniple doctor`: what it tells of itself to one who knows the token and joins nothing."""

import platform
import time
from contextlib import closing
from typing import Any

import msgspec

from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.errors import BadFrame
from maniple.host.keeping import versions
from maniple.wire.examination import Echo, Examine, Examined
from maniple.wire.proof import HALF_OPEN_S
from maniple.wire.stream import Stream

MAX_ECHO_BYTES = 8 << 20


def answer_doctor(stream: Stream, segment: Segment) -> None:
    """Answer until the doctor goes, or is silent for too long."""
    stream.set_timeout(HALF_OPEN_S)
    while True:
        message, size = stream.receive()
        said = stream.receive_bytes(size, at_most=MAX_ECHO_BYTES)
        if isinstance(message, Examine):
            told = msgspec.json.encode({"versions": versions(), "centers": _centers(segment)})
            stream.send(Examined(time.time(), platform.node(), segment.live), told)
        elif isinstance(message, Echo):
            stream.send(message, said)
        else:
            raise BadFrame(f"{type(message).__name__} is nothing that a doctor says.")


def _centers(segment: Segment) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in segment.path.glob("center-*"):
        if (center := Shared.open(segment, path)) is not None:
            with closing(center):
                layout = center.layout
                size = {"parameters": len(layout.entries), "bytes": layout.size_bytes}
                found.append({"name": path.name, "digest": layout.digest} | size)
    return sorted(found, key=lambda one: str(one["name"]))
