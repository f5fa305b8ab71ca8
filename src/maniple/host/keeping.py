"""Keeping: a snapshot of the center together with all that must be found again beside it.

The leases, the positions of fixed shares and what the controller knows are read before the center is copied: what
counts as done in a snapshot is in its center.
"""

import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from maniple.center.locks import held
from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.center.snapshot import Manifest, prune, restore, write_snapshot
from maniple.errors import InvalidArgument
from maniple.host.best import go_back
from maniple.host.desk import Minutes
from maniple.host.restored import Restored
from maniple.record import Folder
from maniple.record.events import last_piece, parse_events, parts
from maniple.record.versions import versions
from maniple.sampler import position, table
from maniple.sampler.lease import Unfinished
from maniple.sampler.position import Position

_LEASES, _CONTROLLER, _POSITIONS, _LOOKS = "leases", "controller", "positions", "looks"
_SAVING = "saving"
_FRESH_S, _LOOK_S = 1.0, 0.02  # for the center of workers who meet
UNDER_WAY = ".saving"  # in the folder `center`: a file of arrays that somebody has asked for and that is not whole yet
_SAVING_S = 600.0  # for another who writes a large center to a slow disk


def set_most(segment: Segment, most: int) -> None:
    """So many of the newest snapshots are to be kept."""
    (segment.path / _SAVING).write_text(str(most))


def save(segment: Segment, folder: Folder, lineage: str, restored: Restored) -> Path | None:
    """Write the next snapshot, and remove all but the newest few; None if there is no center yet.

    Host and server may both be asked to: one comes after the other.
    """
    _announce(segment)
    with alone(segment):
        (folder.center / UNDER_WAY).unlink(missing_ok=True)  # of a server that was killed while writing it
        saved = keep(segment, folder, lineage, restored)
        if saved is not None and (most := (segment.path / _SAVING).read_text()):
            prune(folder.center, int(most))
    return saved


def _announce(segment: Segment) -> None:
    """Let workers save what the center does not have; those who meet also bring the center up to date, within a second.

    Of a run with long steps, the snapshot has the center of the last time.
    """
    (segment.path / position.SAVES).touch()
    before = position.common(position.read(segment.path))
    deadline = time.monotonic() + _FRESH_S
    while before is not None and segment.live and time.monotonic() < deadline:
        now = position.common(position.read(segment.path))
        if now is None or now.saved > before.saved:
            return
        time.sleep(_LOOK_S)


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
        _POSITIONS: msgspec.Raw(msgspec.json.encode(position.read(segment.path))),
        _LOOKS: msgspec.Raw(msgspec.json.encode((segment.path / position.LOOKS).exists())),
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
    if _POSITIONS in manifest.extra:
        for one in msgspec.json.decode(manifest.extra[_POSITIONS], type=list[Position]):
            one.write(segment.path)
    if _LOOKS in manifest.extra and msgspec.json.decode(manifest.extra[_LOOKS]):
        (segment.path / position.LOOKS).touch()
    if _CONTROLLER in manifest.extra:
        minutes = msgspec.json.decode(manifest.extra[_CONTROLLER], type=Minutes)
        minutes.write(segment.path)
        for key in minutes.known.counts:  # what new processes make is counted beside it
            rank, incarnation = key.split(".")
            segment.count_on(int(rank), int(incarnation))


def begin_again(segment: Segment) -> None:
    """The run goes on: the controller's reason to stop holds no longer, and workers begin with the samples left."""
    minutes = Minutes.read(segment.path)
    minutes.known.begin_again()
    minutes.write(segment.path)
    for _, path in table.tables(segment):
        one = table.Table(segment, path)
        one.begin_again()
        one.close()


def abandon_bests(segment: Segment, folder: Folder) -> list[str]:
    """After a restore: put aside what was validated as the best after the snapshot; gives the new names.

    The segment remembers that this is to be done, so a host that adopts it after a kill does it.
    """
    restored = Restored.read(segment.path)
    if not restored.snapshot:
        return []
    minutes = Minutes.read(segment.path)
    abandoned = go_back(folder.center, minutes.known, restored.snapshot, restored.count)
    minutes.write(segment.path)
    msgspec.structs.replace(restored, snapshot="").write(segment.path)
    return abandoned


def repeated_steps(folder: Folder, one: Position) -> int:
    """The steps that rows tell of, made after those that the center has, by workers who make them together."""
    steps, began = 0, 0.0
    newest = parts(folder.events(one.rank))[-2:]  # the last file may have just been begun
    for row in parse_events([line for path in newest for line in last_piece(path)]):
        if row.get("event") == "join":
            steps, began = 0, float(row["timestamp"])
        elif row.get("event") == "progress":
            steps = int(row["step"])
    return max(0, steps - (0 if began > one.saved else one.own_steps))


def is_kept_seldom(segment: Segment) -> bool:
    """The center is that of workers who meet, and bring it up to date from time to time."""
    notes: list[str] = []
    for path in segment.centers():
        if (center := Shared.open(segment, path)) is not None:
            notes.append(center.note)
            center.close()
    return any(note.startswith(("BSP(", "MSync(", "LocalSGD(")) or "sync=True" in note for note in notes)


def where(segment: Segment, one: Position | None) -> str:
    """Where in the data the workers continue, in words; nothing if there is nothing to continue."""
    if one is not None:
        data = next((one.samplers[number] for number in sorted(one.samplers)), None)
        told = "" if data is None else f", epoch {data[0]}, sample {data[1]:,} of {data[2]:,}"
        return f"it continues from step {one.steps:,} of worker {one.rank}{told}"
    for found in unfinished(segment).values():  # the first is that of the training data, as a rule
        epoch, done = found.progress
        if epoch or done:
            return f"it continues in epoch {epoch}, of which {done:,} of {found.terms.count:,} samples are done"
    if is_kept_seldom(segment):  # by workers elsewhere
        return "where it was in the data is not known: a script with fixed shares begins its epochs again"
    return ""


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
