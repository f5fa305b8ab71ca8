"""Where the host of a run is, and whether it lives, as far as its run folder and its address tell."""

import os
from dataclasses import dataclass
from pathlib import Path

from maniple.center.segment import Segment
from maniple.errors import InvalidArgument
from maniple.place import shared_memory
from maniple.record import Folder
from maniple.wire.posted import FILE, Posted

_ANSWER_S = 3.0


@dataclass(frozen=True)
class Whereabouts:
    """What is known of a host."""

    words: str
    is_alive: bool = False


def find_host(run: Path) -> Whereabouts:
    """Look for the host of the run in folder `run`."""
    about = Folder(run).read()
    if not about:
        raise InvalidArgument(f"{run} is no run folder: it has no run.json. Give runs/NAME or runs/last.")
    if about.get("exit_code") is not None:
        return Whereabouts(f"has ended with exit code {about['exit_code']}")
    posted, lineage = Posted.read(run / FILE), about.get("lineage")
    if posted is None and lineage is None:
        return Whereabouts("has not begun yet")
    if posted is None:
        is_here = about.get("node") == os.uname().nodename and Segment.is_there(shared_memory(), str(lineage))
        return Whereabouts(f"on {about.get('node')}, listening to no other machine", is_alive=is_here)
    if _answers(posted):
        return Whereabouts(f"alive on {posted.node} (pid {posted.pid}), listening on {posted.address}", is_alive=True)
    if about.get("ended"):
        return Whereabouts("away: the center is saved, and `--resume` goes on with it")
    return Whereabouts(f"does not answer: it was on {posted.node} (pid {posted.pid}), listening on {posted.address}")


def _answers(posted: Posted) -> bool:
    try:
        posted.nearest.connect(_ANSWER_S).close()
    except OSError:
        return False
    return True
