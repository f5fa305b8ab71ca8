"""Where the host of a run is, and whether it lives, as far as its run folder and its address tell."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maniple.center.segment import check_own, is_guarded, segment_path
from maniple.errors import InvalidArgument
from maniple.launch.death import short
from maniple.place import shared_memory
from maniple.record import Folder
from maniple.wire.posted import FILE, Posted

_ANSWER_S = 3.0


@dataclass(frozen=True)
class Whereabouts:
    """What is known of a host."""

    words: str
    is_alive: bool = False
    has_ended: bool = False  # in order: what it had to save is saved
    is_dead: bool = False  # for sure, for it was on this machine
    is_assumed: bool = False  # to be alive: it is on another machine, and listens to none


def find_host(run: Path) -> Whereabouts:
    """Look for the host of the run in folder `run`."""
    about = Folder(run).read()
    if not about:
        raise InvalidArgument(f"{run} is no run folder: it has no run.json. Give runs/NAME or runs/last.")
    if about.get("exit_code") is not None:
        return Whereabouts(f"has ended with exit code {about['exit_code']}", has_ended=True)
    posted, lineage, node = Posted.read(run / FILE), about.get("lineage"), about.get("node")
    if lineage is None:
        return Whereabouts("has not begun yet")
    is_here = (posted.node if posted else node) == os.uname().nodename
    try:
        check_own(segment_path(shared_memory(), str(lineage)))
    except FileNotFoundError:
        pass
    except InvalidArgument as error:
        if posted is None:  # else its address can tell
            return Whereabouts(f"cannot be looked for: {error}")
    # By its memory one that listens no more, and saves the center, is seen too.
    is_alive = is_here and is_guarded(segment_path(shared_memory(), str(lineage)))
    if posted is not None:
        where = f"on {posted.node} (pid {posted.pid}), listening on {posted.address}"
        is_alive = is_alive or _answers(posted)
    else:
        where = f"on {node}, listening to no other machine"
    is_assumed = not is_alive and posted is None and not is_here and not about.get("ended")  # its rows will tell
    if is_alive or is_assumed:
        words = "cannot be asked from here: it is" if is_assumed else "is alive"
        return Whereabouts(f"{words} {where}", is_alive=True, is_assumed=is_assumed)
    if about.get("ended"):
        return Whereabouts("is away: the center is saved, and `--resume` goes on with it", has_ended=True)
    words = f"{'is dead' if is_here else 'does not answer'}: it was {where}"
    return Whereabouts(f"{words}. To continue: {resume_command(run, about)}", is_dead=is_here)


def resume_command(run: Path, about: Mapping[str, Any]) -> str:
    """The command that continues a run of which run.json says `about`."""
    asked: Mapping[str, Any] = about.get("asked") or {}
    if Folder(run).is_submitted or asked.get("ray"):
        return f"maniple submit {'--ray' if asked.get('ray') else '--slurm'} --resume {short(run)}, and the script"
    if (launcher := asked.get("launcher", "maniple")) != "maniple":
        return f"MANIPLE_RESUME={short(run)} in the environment of {launcher}"
    return f"maniple {'run' if asked.get('script') or asked.get('model') else 'serve'} --resume {short(run)}"


def check_gone(run: Path) -> None:
    """Raise InvalidArgument if the host of a run is alive on another machine. Of this one, its memory will tell."""
    deadline = time.monotonic() + _ANSWER_S  # one that was killed just now may seem alive for a moment
    while (posted := Posted.read(run / FILE)) is not None and not posted.is_here and _answers(posted):
        if time.monotonic() > deadline:
            raise InvalidArgument(
                f"the run {run} is going on: its host answers on {posted.address}, and two would be two centers. End "
                f"it first by `maniple stop`. If it is another program that answers there, remove {run / FILE}."
            )
        time.sleep(0.1)


def _answers(posted: Posted) -> bool:
    try:
        posted.nearest.connect(_ANSWER_S).close()
    except OSError:
        return False
    return True
