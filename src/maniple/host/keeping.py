"""Keeping: a snapshot of the center together with all that must be found again beside it.

The leases and what the controller knows are read before the center is copied: what counts as done in a snapshot is
in its center.
"""

from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from maniple.center.locks import held
from maniple.center.segment import Segment
from maniple.center.snapshot import Manifest, prune, restore, write_snapshot
from maniple.errors import InvalidArgument
from maniple.host.desk import Minutes
from maniple.host.restored import Restored
from maniple.record import Folder
from maniple.record.versions import versions
from maniple.sampler import table
from maniple.sampler.lease import Unfinished

_LEASES, _CONTROLLER = "leases", "controller"
_SAVING = "saving"
UNDER_WAY = ".saving"  # in the folder `center`: a file of arrays that somebody has asked for and that is not whole yet
_SAVING_S = 600.0  # for another who writes a large center to a slow disk


def set_most(segment: Segment, most: int) -> None:
    """So many of the newest snapshots are to be kept."""
    (segment.path / _SAVING).write_text(str(most))


def save(segment: Segment, folder: Folder, lineage: str, restored: Restored) -> Path | None:
    """Write the next snapshot, and remove all but the newest few; None if there is no center yet.

    Host and server may both be asked to: one comes after the other.
    """
    with alone(segment):
        (folder.center / UNDER_WAY).unlink(missing_ok=True)  # of a server that was killed while writing it
        saved = keep(segment, folder, lineage, restored)
        if saved is not None and (most := (segment.path / _SAVING).read_text()):
            prune(folder.center, int(most))
    return saved


def alone(segment: Segment) -> AbstractContextManager[None]:
    """Let nobody else write snapshots or files of arrays meanwhile."""
    return held(segment.path / _SAVING, timeout_s=_SAVING_S, what="another snapshot to be written")


def keep(segment: Segment, folder: Folder, lineage: str, restored: Restored, *, name: str | None = None) -> Path | None:
    """Write a snapshot; None if there is no center yet, or the run goes on without this one."""
    if is_overtaken(folder, restored):
        return None
    extra = {
        _LEASES: msgspec.Raw(msgspec.json.encode(unfinished(segment))),
        _CONTROLLER: msgspec.Raw(msgspec.json.encode(Minutes.read(segment.path))),
    }
    return write_snapshot(
        segment,
        folder.center,
        lineage=lineage,
        restored=restored.count,
        versions=versions(),
        applied=restored.applied,
        words=restored.words,
        forgotten=restored.forgotten,
        extra=extra,
        name=name,
    )


def is_overtaken(folder: Folder, restored: Restored) -> bool:
    """The run has begun again from a snapshot since: what this memory holds is of a past that was given up.

    So it is on a node that a queue took for dead, and on one whose host was killed and went on elsewhere.
    """
    with suppress(OSError, InvalidArgument):  # what cannot be read tells nothing
        return int(folder.read().get("restored", 0)) > restored.count
    return False


def find_again(segment: Segment, path: Path, manifest: Manifest) -> None:
    """Make all that a snapshot has kept."""
    restore(segment, path, manifest)
    if _LEASES in manifest.extra:
        saved = msgspec.json.decode(manifest.extra[_LEASES], type=dict[int, Unfinished])
        for number, one in saved.items():
            table.restore(segment, number, one)
    if _CONTROLLER in manifest.extra:
        minutes = msgspec.json.decode(manifest.extra[_CONTROLLER], type=Minutes)
        minutes.write(segment.path)
        for key in minutes.known.counts:  # what new processes make is counted beside it
            rank, incarnation = key.split(".")
            segment.count_on(int(rank), int(incarnation))


def begin_again(segment: Segment) -> None:
    """The run goes on: the controller's reason to stop holds no longer."""
    minutes = Minutes.read(segment.path)
    minutes.known.begin_again()
    minutes.write(segment.path)


def forget_changes(segment: Segment, *, rule: bool, pace: bool) -> None:
    """Somebody has said anew what the rule or the pace is to be: what was changed before holds no longer."""
    minutes = Minutes.read(segment.path)
    minutes.changes = minutes.changes.without(rule=rule, pace=pace)
    minutes.write(segment.path)


def unfinished(segment: Segment) -> dict[int, Unfinished]:
    """How far each sampler of the run is."""
    found: dict[int, Unfinished] = {}
    for number, path in table.tables(segment):
        one = table.Table(segment, path)
        found[number] = one.unfinished()
        one.close()
    return found
