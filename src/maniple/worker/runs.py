"""The runs of a launch: which folders the workers of another launcher have made, and whether a host serves one of them.

They are known by their name, which is the same for all workers of a launch, and perhaps for those of another one.
"""

import re
import time
from pathlib import Path

from maniple.center.segment import is_guarded, is_own
from maniple.place import JOIN_DEADLINE_S, Place
from maniple.place.launch import Launch, is_elastic
from maniple.record import Folder
from maniple.wire.posted import FILE, Posted

LOOK_S = 0.05
_ANSWER_S = 5.0  # for the machine of a host elsewhere
_TRY_S = 1.0


def folders(launch: Launch) -> list[Path]:
    """The folders of all runs of that name, from the oldest to the newest."""
    pattern = re.compile(re.escape(launch.name) + r"(?:\.(\d+))?")
    names = [path.name for path in launch.runs.iterdir()] if launch.runs.is_dir() else []
    found = {int(match[1] or 1): launch.runs / match[0] for name in names if (match := pattern.fullmatch(name))}
    return [found[number] for number in sorted(found)]


def fresh(launch: Launch) -> str:
    """The launch's name, or `name.2` and so on if runs of earlier launches had the same."""
    count = len(folders(launch))
    return launch.name if count == 0 else f"{launch.name}.{count + 1}"


def living(launch: Launch, *, is_here: bool = False) -> Path | None:
    """The folder of the run whose host serves this launch, `is_here`: on this machine; None if there is none yet."""
    candidates = folders(launch) if launch.resume is None else [launch.resume]
    for path in reversed(candidates):
        host = Posted.read(path / FILE)
        is_over = Folder(path).read().get("ended") is not None
        if host is None or is_over or not host.segment:
            continue
        if is_guarded(Path(host.segment)) if host.is_here else not is_here:
            return path.resolve()
    return None


def before(place: Place, launch: Launch) -> list[Path]:
    """The runs that this launch may have begun, from the oldest to the newest, if its workers were started before.

    torchrun counts the starts after a failure alone, and not those with other machines.
    """
    if place.restarts:
        return folders(launch)
    return of_launch(launch) if is_elastic() else []


def of_launch(launch: Launch) -> list[Path]:
    """The runs that have begun since the launcher has, which are those of no other launch."""
    return [run for run in folders(launch) if Folder(run).read().get("started", 0.0) > launch.started]


def begun(launch: Launch) -> Path | None:
    """The host that this worker's predecessor has started, also if it is still beginning."""
    deadline = time.monotonic() + JOIN_DEADLINE_S
    while (folder := living(launch)) is None:
        newest = next(reversed(folders(launch)), None)
        is_beginning = newest is not None and not (newest / FILE).exists() and not Folder(newest).read().get("ended")
        if not is_beginning or time.monotonic() > deadline:
            return None
        time.sleep(LOOK_S)
    return folder


def has_center(folder: Path) -> bool:
    """A run can go on: there is a snapshot, or its memory is still there."""
    host = Posted.read(folder / FILE)
    memory = Path(host.segment) if host is not None and host.is_here else None
    is_in_memory = memory is not None and is_own(memory) and (memory / "members").exists()
    return is_in_memory or any(folder.glob("center/snapshot-*"))


def answers(folder: Path) -> bool:
    """The host can be reached, if it is on another machine: that may be gone, without a word in the folder."""
    deadline = time.monotonic() + _ANSWER_S
    while (host := Posted.read(folder / FILE)) is not None and not host.is_here:
        try:
            host.nearest.connect(_TRY_S).close()
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
    return True
