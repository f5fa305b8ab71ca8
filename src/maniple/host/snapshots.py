"""Snapshots and exports: what a host writes of its run's memory to the folder `center`, and restores from there.

snapshot-000007          centers, named arrays, leases, positions and the controller's record
candidate                the same when the last validation began
best -> best-000003      the one with the best validation, its loss in validated.json
best-000003-abandoned-1  a best that was validated after the snapshot that the run was restored from
epoch-0004               the one after 4 epochs, if a worker asked to keep it
NAME.safetensors, .h5    an export: the arrays alone, as one file for other programs

All appear as a whole. Numbered snapshots and exports are written one after the other, by the host and its server.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import msgspec
import numpy as np

from maniple.center.shared import SharedCenter
from maniple.center.snapshot import (
    HDF5,
    Manifest,
    Readable,
    entry_readers,
    prune,
    readable,
    restore,
    write_hdf5,
    write_snapshot,
    write_tensors,
)
from maniple.clock import Deadline, clock
from maniple.contracts import Array, Entry
from maniple.controller import WorkerProcess
from maniple.errors import InvalidArgument
from maniple.host.controller_requests import ControllerRecord, recording_failure, withdraw_stop
from maniple.memory.locks import held
from maniple.memory.segment import Segment
from maniple.record import Events, RunFolder
from maniple.record.events import parse_events, parts
from maniple.record.folder import point, sync_folder, versions, write_json
from maniple.rules import noted_rule
from maniple.sampler import leases, position
from maniple.sampler.leases import LeaseSnapshot
from maniple.sampler.position import Position
from maniple.text import read_end

EXPORT_IN_PROGRESS = ".saving"  # in the folder `center`: an export that is not complete yet
_RESTORED_FILE, _LIMIT_FILE = "restored", "saving"  # in the segment
_LEASES, _CONTROLLER, _POSITIONS, _LOOKS = "leases", "controller", "positions", "looks"  # keys of a manifest's `extra`
_FRESH_TIMEOUT_S, _FRESH_POLL_S = 1.0, 0.02  # for synchronous workers to update the center before a snapshot
_CANDIDATE, _VALIDATED = "candidate", "validated.json"
_SNAPSHOT_NAMES = re.compile(r"(snapshot|best|epoch)-|(best|candidate)$")  # of folders in `center`
_EVENTS_BYTES = 1 << 20  # of the end of a file: thousands of steps
_EXCLUSIVE_TIMEOUT_S = 600.0  # another process may be writing a large center to a slow disk


def set_limit(segment: Segment, limit: int) -> None:
    """Keep only the newest `limit` snapshots from now on."""
    (segment.path / _LIMIT_FILE).write_text(str(limit))


def save(segment: Segment, folder: RunFolder) -> Path | None:
    """Write the next snapshot and remove the oldest ones; None if there is no center yet."""
    _request_update(segment)
    with _exclusive(segment):
        (folder.center / EXPORT_IN_PROGRESS).unlink(missing_ok=True)  # of a server killed during an export
        saved = write(segment, folder)
        if saved is not None and (limit := (segment.path / _LIMIT_FILE).read_text()):
            prune(folder.center, int(limit))
    return saved


def write(segment: Segment, folder: RunFolder, *, name: str | None = None) -> Path | None:
    """Write a snapshot, numbered if it has no name; None if there is no center yet or the run was resumed elsewhere."""
    restored = RestorePoint.read(segment.path)
    if is_superseded(folder, restored):
        return None
    extra = {
        _LEASES: unfinished_samples(segment),
        _CONTROLLER: ControllerRecord.read(segment.path),
        _POSITIONS: position.read(segment.path),
        _LOOKS: (segment.path / position.LOOKS).exists(),
    }
    return write_snapshot(
        segment,
        folder.center,
        lineage=lineage_of(segment),
        restored=restored.count,
        versions=versions(),
        applied=restored.applied,
        words=restored.words,
        forgotten=restored.forgotten,
        extra={key: msgspec.Raw(msgspec.json.encode(value)) for key, value in extra.items()},
        name=name,
    )


def export_arrays(segment: Segment, folder: RunFolder, name: str) -> str:
    """Write all named arrays and centers to `center/NAME` and return the file's path."""
    target = _checked_target(folder, name)
    with _exclusive(segment), readable(segment) as (centers, _):
        parameters = [(center, i) for center in centers for i in range(len(center.layout.entries))]
        names = [center.layout.entries[i].name for center, i in parameters]
        if len(set(names)) < len(names):  # two models with the same names
            names = [f"{center.name}.{name}" for (center, _), name in zip(parameters, names, strict=True)]
        dtypes = [center.layout.places[i][0] for center, i in parameters]
        entries = [
            Entry(name, center.layout.entries[i].shape, str(np.dtype(dtype)))
            for name, (center, i), dtype in zip(names, parameters, dtypes, strict=True)
        ]

        def read_chunk(center: Readable, k: int) -> Array:
            return center.read(k)

        readers = entry_readers(centers, read_chunk)

        def read(i: int) -> Array:
            return readers[i]()

        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.center / EXPORT_IN_PROGRESS
        try:
            if target.suffix in HDF5:
                write_hdf5(unfinished, entries, read)
            else:
                write_tensors(unfinished, entries, dtypes, read)
            unfinished.replace(target)
            sync_folder(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    return str(target)


class BestCenter:
    """Keeps the centers that the controller asks for, and tells it which workers are alive (`HostActions`).

    A center that cannot be written is recorded as the event "unsaved", and the run continues.
    """

    def __init__(self, segment: Segment, folder: RunFolder, events: Events) -> None:
        self._segment, self._run, self._events, self._folder = segment, folder, events, folder.center
        for name in (_CANDIDATE, "epoch-*"):
            for path in self._folder.glob(f".{name}.*"):  # of a server killed while writing it
                shutil.rmtree(path, ignore_errors=True)

    @property
    def live(self) -> int:
        """The number of live workers."""
        return self._segment.live

    def is_live(self, who: WorkerProcess) -> bool:
        """Whether a worker's process is alive."""
        return self._segment.is_live(*who)

    def keep_candidate(self) -> None:
        """Keep the center as it is now, in case its validation turns out to be the best."""
        self.discard_candidate()  # even if the new one cannot be written
        with recording_failure(self._events):
            self._write(_CANDIDATE)

    def discard_candidate(self) -> None:
        """Remove a candidate that was not the best."""
        shutil.rmtree(self._folder / _CANDIDATE, ignore_errors=True)

    def keep_best(self, number: int, loss: float) -> None:
        """Make the candidate the best so far, the `number`-th; without a candidate, the center as it is now.

        A server that was killed in between may repeat it.
        """
        candidate, path = self._folder / _CANDIDATE, self._folder / f"best-{number:06d}"
        with recording_failure(self._events):
            if not path.exists():
                if not candidate.exists() and self._write(_CANDIDATE) is None:
                    return
                write_json(candidate / _VALIDATED, {"loss": loss})
                candidate.rename(path)
                sync_folder(self._folder)
            point(self._folder / "best", path.name)
            self._events.write("best", loss=loss, name=path.name)

    def prune_bests(self, number: int) -> None:
        """Remove bests before the `number`-th, unless that one is missing because the disk was full."""
        found = dict(_bests(self._folder))
        for path in (path for other, path in found.items() if other < number and number in found):
            shutil.rmtree(path, ignore_errors=True)

    def keep_epoch(self, number: int) -> str | None:
        """Keep the center as it is now, after `number` epochs; returns the snapshot's name."""
        with recording_failure(self._events):
            if (path := self._write(f"epoch-{number:04d}")) is not None:
                self._events.write("snapshot", name=path.name)
                return path.name
        return None

    def _write(self, name: str) -> Path | None:
        return write(self._segment, self._run, name=name)


class RestorePoint(msgspec.Struct):
    """The snapshot that a center was restored from, and the contributions that it contains. Count 0: never restored."""

    count: int = 0  # how often this lineage was restored from a snapshot
    saved: float = 0.0  # when that snapshot was written; 0: nothing was contributed after it
    applied: dict[
        str, dict[str, list[int]]
    ] = {}  # worker -> center -> the applied number of each chunk when it was copied
    words: dict[str, int] = {}  # worker -> its word, if it was the same for all copies
    forgotten: int = 0  # workers whose words were no longer known
    snapshot: str = ""  # name of the snapshot, until bests that were validated after it are abandoned

    @classmethod
    def read(cls, segment: Path) -> "RestorePoint":
        """Read it from the segment."""
        path = segment / _RESTORED_FILE
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, segment: Path) -> None:
        """Store it in the segment."""
        write_json(segment / _RESTORED_FILE, msgspec.to_builtins(self))

    def includes(self, worker: str, center: str, i: int, word: int) -> bool:
        """Whether the snapshot's copy of parameter `i` contains the contribution that brought `worker` to `word`."""
        words = self.applied.get(worker, {}).get(center, [])
        return self.words.get(worker, 0) >= word or (0 <= i < len(words) and words[i] >= word)

    def knows(self, worker: str) -> bool:
        """Whether a contribution of `worker` that is not recorded here cannot be in the snapshot."""
        return not self.forgotten or worker in self.words or worker in self.applied


def lineage_of(segment: Segment) -> str:
    """The lineage of the run, by which workers recognize it: part of the segment's name."""
    return segment.path.name.partition("-")[2]


def is_superseded(folder: RunFolder, restored: RestorePoint) -> bool:
    """Whether the run was restored from a snapshot elsewhere since, so that this memory holds an abandoned branch.

    This happens on a node that a queue considered dead, or whose host was killed and resumed on another machine.
    """
    with suppress(OSError, InvalidArgument):  # an unreadable run.json says nothing
        return int(folder.read().get("restored", 0)) > restored.count
    return False


def restore_snapshot(segment: Segment, path: Path, manifest: Manifest) -> None:
    """Restore everything that a snapshot contains into a new segment."""
    restore(segment, path, manifest)
    extra = manifest.extra
    if _LEASES in extra:
        for number, saved in msgspec.json.decode(extra[_LEASES], type=dict[int, LeaseSnapshot]).items():
            leases.restore(segment, number, saved)
    if _POSITIONS in extra:
        for saved in msgspec.json.decode(extra[_POSITIONS], type=list[Position]):
            saved.write(segment.path)
    if _LOOKS in extra and msgspec.json.decode(extra[_LOOKS]):
        (segment.path / position.LOOKS).touch()
    if _CONTROLLER in extra:
        record = msgspec.json.decode(extra[_CONTROLLER], type=ControllerRecord)
        record.write(segment.path)
        for key in record.policy_state.counts:  # steps of new processes are counted under new incarnations
            rank, incarnation = key.split(".")
            segment.restore_incarnation(int(rank), int(incarnation))


def prepare_resume(segment: Segment) -> None:
    """Clear the controller's reason to stop, and let workers start with the samples that are left."""
    record = ControllerRecord.read(segment.path)
    record.policy_state.reset_for_resume()
    record.write(segment.path)
    withdraw_stop(segment.path)
    for _, table in leases.tables(segment):
        table.reset_passes()


def abandon_bests(segment: Segment, folder: RunFolder) -> list[str]:
    """After a restore, rename best centers that were validated after the snapshot; returns the new names.

    They do not belong to the run that continues. If the best of that time is no longer there, the next validation is
    the best. The segment remembers whether this was done, so a host that adopts it after a kill completes it.
    """
    restored, center = RestorePoint.read(segment.path), folder.center
    if not restored.snapshot:
        return []
    record = ControllerRecord.read(segment.path)
    state = record.policy_state
    shutil.rmtree(center / _CANDIDATE, ignore_errors=True)  # of a validation that was cut off
    own = next((number for number, path in _bests(center) if path.name == restored.snapshot), 0)
    if own > state.bests:  # the snapshot is a best, written when its validation began
        state.bests, state.best = own, _loss(center / restored.snapshot)
    abandoned: list[str] = []
    for number, path in _bests(center):
        if number > state.bests:
            abandoned.append(path.rename(path.with_name(f"{path.name}-abandoned-{restored.count}")).name)
    current = center / f"best-{state.bests:06d}"
    if current.is_dir():
        point(center / "best", current.name)
    else:
        state.best = None
        if (center / "best").is_symlink():
            (center / "best").unlink()
    record.write(segment.path)
    msgspec.structs.replace(restored, snapshot="").write(segment.path)
    return abandoned


def discard_changes(segment: Segment, *, rule: bool, pace: bool) -> None:
    """Discard changes made by `maniple change` to settings that are given again on resume."""
    record = ControllerRecord.read(segment.path)
    record.changes = record.changes.without(rule=rule, pace=pace)
    record.write(segment.path)


def repeated_steps(folder: RunFolder, saved: Position) -> int:
    """How many steps synchronous workers made after the center was last updated, as far as events tell."""
    steps, began = 0, 0.0
    newest = parts(folder.events(saved.rank))[-2:]  # the last file may have just been started
    for row in parse_events([line for path in newest for line in read_end(path, _EVENTS_BYTES).split(b"\n")]):
        if row.get("event") == "join":
            steps, began = 0, float(row["timestamp"])
        elif row.get("event") == "progress":
            steps = int(row["step"])
    return max(0, steps - (0 if began > saved.saved else saved.own_steps))


def open_centers(segment: Segment) -> Iterator[SharedCenter]:
    """The centers of shared models, each open until the next."""
    for path in sorted(segment.path.glob("center-*")):
        if (center := SharedCenter.open(segment, path)) is not None:
            with closing(center):
                yield center


def has_synchronous_rule(segment: Segment) -> bool:
    """Whether a model is shared by a synchronous rule, whose workers update the center only from time to time."""
    notes = [center.note for center in open_centers(segment)]
    rules = [noted_rule(note) for note in notes]  # None for a class of the user's, which may derive from one of ours
    return any(rule.is_synchronous if rule else "sync=True" in note for rule, note in zip(rules, notes, strict=True))


def resume_text(segment: Segment, saved: Position | None) -> str:
    """Where in the data the workers continue, for people; "" if they start from the beginning."""
    if saved is not None:
        data = next((saved.samplers[number] for number in sorted(saved.samplers)), None)
        where = "" if data is None else f", epoch {data[0]}, sample {data[1]:,} of {data[2]:,}"
        return f"it continues from step {saved.steps:,} of worker {saved.rank}{where}"
    for left in unfinished_samples(segment).values():  # the first sampler is usually that of the training data
        epoch, done = left.progress
        if epoch or done:
            return f"it continues in epoch {epoch}, of which {done:,} of {left.terms.count:,} samples are done"
    if has_synchronous_rule(segment):  # with all workers on other machines
        return "where it was in the data is not known: a script with fixed shares begins its epochs again"
    return ""


def unfinished_samples(segment: Segment) -> dict[int, LeaseSnapshot]:
    """The progress of each sampler of the run, by its number."""
    return {number: table.snapshot() for number, table in leases.tables(segment)}


def _bests(folder: Path) -> Iterator[tuple[int, Path]]:
    """Numbers and folders of the best centers."""
    for path in sorted(folder.glob("best-*")):
        if path.name[5:].isdigit():
            yield int(path.name[5:]), path


def _loss(path: Path) -> float | None:
    try:
        return msgspec.json.decode((path / _VALIDATED).read_bytes(), type=dict[str, float | None])["loss"]
    except (OSError, msgspec.MsgspecError, KeyError):
        return None


def _exclusive(segment: Segment) -> AbstractContextManager[None]:
    """Hold the lock that serialises snapshots and exports."""
    return held(segment.path / _LIMIT_FILE, timeout_s=_EXCLUSIVE_TIMEOUT_S, what="another snapshot to be written")


def _request_update(segment: Segment) -> None:
    """Ask workers to save optimizer states, and synchronous ones to update the center; wait up to a second for these.

    If steps take longer, the snapshot has the center of the last update.
    """
    (segment.path / position.SAVES).touch()
    before = position.common(position.read(segment.path))
    deadline = Deadline(_FRESH_TIMEOUT_S)
    while before is not None and segment.live and not deadline.is_over():
        now = position.common(position.read(segment.path))
        if now is None or now.saved > before.saved:
            return
        clock.sleep(_FRESH_POLL_S)


def _checked_target(folder: RunFolder, name: str) -> Path:
    """The file for an export called `name`. Raises InvalidArgument if it would leave `center` or change a snapshot."""
    path = Path(name)
    if (
        not name.isprintable()
        or path.is_absolute()
        or ".." in path.parts
        or any(part.startswith(".") for part in path.parts)
        or not path.name
        or path.suffix not in (".safetensors", *HDF5)
    ):
        raise InvalidArgument(
            f"save({name!r}) cannot be written. Give a name inside the run's `center` folder, without `..`, hidden "
            "files or control characters, that ends with .safetensors or .h5."
        )
    first = path.parts[0].casefold()  # on some file systems Best-000001 is best-000001
    if len(path.parts) == 1 and (path.stem.casefold() == "arrays" or first.startswith("center-")):
        raise InvalidArgument(f"save({name!r}) would stand where the newest snapshot does. Choose another name.")
    parts = [folder.center / part for part in (path, *path.parents) if part.parts]
    if (len(path.parts) > 1 and _SNAPSHOT_NAMES.match(first)) or any(part.is_symlink() for part in parts):
        raise InvalidArgument(f"save({name!r}) would change a snapshot. Choose another name.")
    return folder.center / path
