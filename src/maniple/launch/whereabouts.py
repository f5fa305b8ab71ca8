"""Where the host of a run is, and whether it lives, as far as its run folder and its address tell."""

import os
from dataclasses import dataclass
from pathlib import Path

from maniple.center.segment import is_guarded, segment_path
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
    if posted is not None:
        return _posted(posted, is_paused=bool(about.get("ended")))
    if lineage is None:
        return Whereabouts("has not begun yet")
    return _unposted(str(about.get("node")), str(lineage))


def _posted(posted: Posted, *, is_paused: bool) -> Whereabouts:
    """A host that listens, or did."""
    if _answers(posted):
        return Whereabouts(
            f"is alive on {posted.node} (pid {posted.pid}), listening on {posted.address}", is_alive=True
        )
    if is_paused:
        return Whereabouts("is away: the center is saved, and `--resume` goes on with it")
    return Whereabouts(f"does not answer: it was on {posted.node} (pid {posted.pid}), listening on {posted.address}")


def _unposted(node: str, lineage: str) -> Whereabouts:
    """A host for its own machine alone."""
    if node != os.uname().nodename:
        return Whereabouts(f"is on {node}, listening to no other machine")
    if is_guarded(segment_path(shared_memory(), lineage)):
        return Whereabouts("is on this machine, listening to no other", is_alive=True)
    return Whereabouts("was killed: `--resume` goes on with what it had")


def _answers(posted: Posted) -> bool:
    try:
        posted.nearest.connect(_ANSWER_S).close()
    except OSError:
        return False
    return True
