"""Keeping: a snapshot of the center together with all that must be found again beside it.

The leases and what the controller knows are read before the center is copied: what counts as done in a snapshot is
in its center.
"""

from pathlib import Path

import msgspec

from maniple.center.segment import Segment
from maniple.center.snapshot import Manifest, restore, write_snapshot
from maniple.host.desk import Minutes
from maniple.host.restored import Restored
from maniple.record import Folder
from maniple.record.versions import versions
from maniple.sampler import table
from maniple.sampler.lease import Unfinished

_LEASES, _CONTROLLER = "leases", "controller"


def keep(segment: Segment, folder: Folder, lineage: str, restored: Restored, *, name: str | None = None) -> Path | None:
    """Write a snapshot; None if there is no center yet."""
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
        extra=extra,
        name=name,
    )


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


def unfinished(segment: Segment) -> dict[int, Unfinished]:
    """How far each sampler of the run is."""
    found: dict[int, Unfinished] = {}
    for number, path in table.tables(segment):
        one = table.Table(segment, path)
        found[number] = one.unfinished()
        one.close()
    return found
