"""The segment: the folder in shared memory that holds a run's center and tables, and its removal after the run.

/dev/shm/maniple-<lineage>/host      JSON: pid and run folder; locked for as long as the host lives
                           members   state and incarnation of each rank (`_MEMBERS`)
                           node      the lock behind `worker.lock()`
                           host.sock the host's socket; with host.json and token, if it listens to no other machine
                           controller  JSON: the controller's state
                           leases-0  which samples of the first `sampler()` are taken, and so on
                           center-0  the parameters shared by the first `share()`, and so on
                           gate-*    the norms with which a gate compares the contributions to a center
                           array-*   a named array
                           stage-*   the contribution that a connected remote worker is sending
                           applied   how far the contributions of each remote worker are in the center
                           feed-*/   a queue of batches
                           collectives-*  member table of one group; collectives-0.RANK.* a worker's slots,
                                     collectives-0.parcel-* state for newcomers, collectives-0.device-RANK and
                                     collectives-0.engine: the device of each worker's gradients and the engine chosen
                           peers-0.* mailboxes of the workers that share the first model by gossip; publish: the lock of
                                     the worker that brings the center up to date
                           producers one byte per producer that the launcher has started: how it ended
                           server    locked by the network side; saving: by who writes a snapshot, and how many are kept
                           restored  if the center began again from a snapshot; resumed: workers may continue with
                                     the optimizer state they have saved
                           position-* where each worker with fixed shares is in the data
                           saves     touched when a snapshot is begun, by which workers save their optimizer state
                           looks     there if the script looks at a batch before it trains

A segment whose `host` file is not locked belongs to a dead host: the next run saves its center and removes it.
"""

import mmap
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np

from maniple.contracts import Array, FlatModel
from maniple.errors import InvalidArgument, ManipleError, WaitedTooLong
from maniple.layout import Layout, RuleState
from maniple.memory.locks import ByteLocks, is_locked
from maniple.memory.shm import map_file, open_owned, shared_memory_full
from maniple.record.folder import RunFolder

NEVER, LIVE, LEFT, DEAD = range(4)  # states of a rank; NEVER: its process has not joined yet
MAX_WORKERS = 4096
_MEMBERS = np.dtype(
    [
        ("state", "u1", MAX_WORKERS),
        ("departures", "<u4"),
        ("incarnation", "<u4", MAX_WORKERS),
        ("external_workers", "<u4"),
    ]
)
_PREFIX = "maniple-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")  # only what a host has created is ever removed
_LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INCOMPLETE = "making"
_CREATION_S = 60  # a segment without content this young may still be under creation
_ADOPT_S = 3.0  # a host that is shutting down releases its lock within this time
_GUARD_S = 10.0  # a sweep that looks at a new segment holds its lock for milliseconds


class Segment:
    """The shared-memory folder of one run.

    Attributes:
        died_with_host: the ranks that were alive until their host was killed, if this is a run that was adopted.
    """

    died_with_host: frozenset[int] = frozenset()

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_owner(path)
            members = np.frombuffer(map_file(path / "members"), _MEMBERS, 1)
        except FileNotFoundError:
            raise InvalidArgument(
                f"the run's shared memory {path} is gone: its host has ended. Start the run again with `maniple run`."
            ) from None
        self._states, self._incarnations = members["state"][0], members["incarnation"][0]
        self._departures, self._external_workers = members["departures"], members["external_workers"]
        self._guard: ByteLocks | None = None

    @classmethod
    def create(cls, root: Path, lineage: str, run: Path, *, is_incomplete: bool = False) -> "Segment":
        """Create the segment of a run and hold its lock for as long as this process lives.

        With `is_incomplete`, its content is worthless until `mark_complete` is called; after a crash the
        next host discards it.
        """
        path = segment_path(root, lineage)
        with suppress(FileNotFoundError):
            check_owner(path)
            if (path / _INCOMPLETE).exists():
                _discard(path)
        try:
            path.mkdir(mode=0o700)
            if is_incomplete:
                (path / _INCOMPLETE).touch()
        except FileExistsError:
            raise InvalidArgument(
                f"the run {run} is going on, or its memory {path} is still being freed. End it first, or wait a minute."
            ) from None
        except OSError as error:
            raise shared_memory_full(root, error) from error
        try:
            guard = ByteLocks(path / "host")
            guard.retry_until(0, timeout_s=_GUARD_S, what=f"{path / 'host'}, which a sweep is looking at")
            _write_owner(path / "host", run)
            map_file(path / "members", _MEMBERS.itemsize)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, ManipleError):
                raise
            raise shared_memory_full(root, error) from error
        segment = cls(path)
        segment._guard = guard
        return segment

    @classmethod
    def adopt(cls, root: Path, lineage: str, run: Path) -> "Segment | None":
        """Take over the segment of a run whose host was killed; None if nothing of it is left."""
        path = segment_path(root, lineage)
        if not cls.exists(root, lineage):
            return None
        guard = ByteLocks(path / "host")
        try:
            guard.retry_until(0, timeout_s=_ADOPT_S, what=f"{path / 'host'}: the run's host is alive")
        except WaitedTooLong:
            guard.close()
            raise InvalidArgument(
                f"the run {run} is going on: its host is alive. Join it with `maniple join`, or end it first."
            ) from None
        _write_owner(path / "host", run)
        segment = cls(path)
        segment._guard = guard
        for old in path.glob("collectives-*"):  # all their members have died with the host
            old.unlink(missing_ok=True)
        segment.died_with_host = frozenset(map(int, np.flatnonzero(segment._states == LIVE)))
        for rank in segment.died_with_host:
            segment.mark(rank, DEAD)
        for center in filter(CenterFile.is_ready, path.glob("center-*")):
            CenterFile(center).let_workers_decide()
        return segment

    @classmethod
    def exists(cls, root: Path, lineage: str) -> bool:
        """Whether the segment of this lineage was completed, and not removed."""
        path = segment_path(root, lineage)
        with suppress(FileNotFoundError):
            check_owner(path)
            return (path / "members").exists() and not (path / _INCOMPLETE).exists()
        return False

    def mark_complete(self) -> None:
        """Declare the content complete, after `create(..., is_incomplete=True)`."""
        (self.path / _INCOMPLETE).unlink(missing_ok=True)

    @property
    def live(self) -> int:
        """p, the number of workers alive now."""
        return self._states.tobytes().count(LIVE)

    @property
    def has_members(self) -> bool:
        """Whether any worker has joined so far."""
        return bool(self._states.any())  # NEVER is 0

    @property
    def departures(self) -> int:
        """A counter that changes whenever a worker stops being alive: cheaper to watch than all states."""
        return int(self._departures[0])

    @property
    def external_workers(self) -> int:
        """How many workers another launcher started, the last time it did; 0 if none has."""
        return int(self._external_workers[0])

    @external_workers.setter
    def external_workers(self, count: int) -> None:
        self._external_workers[0] = count

    def incarnation(self, rank: int) -> int:
        """How many processes have had rank `rank`: it tells a worker from its predecessor."""
        return int(self._incarnations[rank])

    def renew(self, rank: int) -> int:
        """Give rank `rank` to a new process, which has not joined yet. Returns its incarnation."""
        self.mark(rank, NEVER)
        self._incarnations[rank] += 1
        return self.incarnation(rank)

    def restore_incarnation(self, rank: int, incarnation: int) -> None:
        """Continue the count of rank `rank` from a segment before this one."""
        self._incarnations[rank] = max(incarnation, self.incarnation(rank))

    def is_live(self, rank: int, incarnation: int) -> bool:
        """Whether this incarnation of worker `rank` is alive."""
        return self.state(rank) == LIVE and self.incarnation(rank) == incarnation

    def state(self, rank: int) -> int:
        """NEVER, LIVE, LEFT or DEAD."""
        return int(self._states[rank])

    def mark(self, rank: int, state: int) -> None:
        """Set the state of worker `rank`."""
        self._states[rank] = state
        if state != LIVE:
            self._departures += np.uint32(1)  # wraps around

    def centers(self) -> list[Path]:
        """The files of the centers and named arrays."""
        return _center_files(self.path)

    def close(self) -> None:
        """Release the host's lock, if this process holds it. May be called twice."""
        if self._guard is not None:
            self._guard.close()

    def remove(self) -> None:
        """Remove the segment from memory."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def segment_path(root: Path, lineage: str) -> Path:
    """The folder of the segment of a run."""
    if not _LINEAGE.fullmatch(lineage):  # it comes from a file, and must not lead elsewhere
        raise InvalidArgument(
            f"{lineage[:100]!r} is no lineage of a run: run.json was changed. Give another run folder."
        )
    return root / f"{_PREFIX}{lineage}"


def has_live_host(path: Path) -> bool:
    """Whether the host of a segment is alive, or has only begun to create it."""
    if not is_owned(path):
        return False
    try:
        with os.fdopen(open_owned(path / "host", os.O_RDWR), "r+b") as file:
            return is_locked(file.fileno(), 0)
    except (OSError, InvalidArgument):
        return path.exists() and _is_young(path)


def is_owned(path: Path) -> bool:
    """Whether there is a segment at `path` that belongs to this user alone."""
    try:
        check_owner(path)
    except (InvalidArgument, OSError):
        return False
    return True


def check_owner(path: Path) -> None:
    """Raise InvalidArgument unless the segment `path` is a folder that only this user can enter.

    All users of a machine can write to /dev/shm, and run.json tells the names of segments, so somebody else may have
    created one of that name. FileNotFoundError if there is none.
    """
    about, me = path.lstat(), os.getuid()
    wrong = (
        "is a link" if stat.S_ISLNK(about.st_mode)
        else "is no folder" if not stat.S_ISDIR(about.st_mode)
        else f"belongs to user {about.st_uid}, and this process runs as user {me}" if about.st_uid != me
        else f"can be entered by others (mode {stat.S_IMODE(about.st_mode):04o})" if about.st_mode & 0o077
        else ""
    )  # fmt: skip
    if wrong:
        raise InvalidArgument(
            f"the shared memory {path} {wrong}; a run uses only a folder of its own user with mode 0700. Call this as "
            "its owner, or let its owner remove it; MANIPLE_SHM=FOLDER uses another place for shared memory."
        )


def sweep(root: Path, salvage: Callable[[Segment, Path], None]) -> list[Path]:
    """Remove the segments whose hosts are dead, after `salvage(segment, run folder)`. Returns those it removed.

    A segment that cannot be saved, because the disk is full or the run folder is gone, is left where it is.
    """
    removed: list[Path] = []
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if _is_ours(path) and _sweep_one(path, salvage):
                removed.append(path)
        except Exception as error:  # a dead run must not stop a new one, whatever is wrong with it
            if path.exists():  # else another sweep was quicker
                warnings.warn(f"{path} of a dead run is left where it is, it could not be saved: {error}", stacklevel=2)
    return removed


def abandoned_segments(root: Path) -> list[Path]:
    """The segments of this user whose hosts are dead."""
    return [path for path in sorted(root.glob(f"{_PREFIX}*")) if _is_ours(path) and not has_live_host(path)]


def missing_run_folder(path: Path) -> Path | None:
    """Where the run folder of an abandoned segment was, if it is gone and there is a center to save; else None."""
    with suppress(OSError, msgspec.DecodeError, KeyError):
        run = _run_of(path)
        if _find_run_folder(run, path) is None and _has_center(path):
            return run
    return None


def salvage_hint(path: Path) -> str:
    """How to save or give up a center in memory whose run folder is gone."""
    return (
        "Put the folder back, and the next run saves the center there; or resume it from where the folder is now "
        f"(`maniple run --resume FOLDER ...`). To give the center up, `rm -r {path}`."
    )


def _sweep_one(path: Path, salvage: Callable[[Segment, Path], None]) -> bool:
    """Remove one segment unless its host is alive or may still be creating it."""
    if not (path / "host").exists():
        if _is_young(path):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    with closing(ByteLocks(path / "host")) as guard:
        if not guard.take(0):
            return False  # its host is alive
        if not (path / _INCOMPLETE).exists():
            try:
                run = _run_of(path)
                segment = Segment(path)
            except (msgspec.DecodeError, KeyError, ValueError, InvalidArgument):
                # Its host was killed while creating it, or is creating it right now: there is nothing to save yet.
                if _is_young(path):
                    return False
                if _center_files(path):
                    raise ValueError("it does not say which run it belongs to") from None
            else:
                _save_center(segment, run, salvage)
        shutil.rmtree(path, ignore_errors=True)
        return True


def _save_center(segment: Segment, run: Path, salvage: Callable[[Segment, Path], None]) -> None:
    """Save the center of a dead host to its run folder, wherever that is now."""
    folder = _find_run_folder(run, segment.path)
    if folder is not None:
        salvage(segment, folder)
    elif _has_center(segment.path):
        raise FileNotFoundError(
            f"its run folder {run} is gone: moved, or on a file system that is not mounted. "
            f"{salvage_hint(segment.path)}"
        )


def _find_run_folder(run: Path, segment: Path) -> Path | None:
    """The run folder of a segment: `run`, or if that was renamed, its new name beside it; else None.

    Another run may have taken the name since, so a folder counts only if its run.json has the lineage.
    """
    lineage = segment.name.removeprefix(_PREFIX)
    beside = run.parent.iterdir() if run.parent.is_dir() else ()
    for folder in (run, *beside):
        with suppress(OSError, InvalidArgument):
            if not folder.is_symlink() and RunFolder(folder).read().get("lineage") == lineage:
                return folder
    return None


def _discard(path: Path) -> None:
    """Remove a segment whose host was killed while creating it."""
    with closing(ByteLocks(path / "host")) as guard:
        if guard.take(0):
            shutil.rmtree(path, ignore_errors=True)


def _write_owner(path: Path, run: Path) -> None:
    """Write this process and its run over what the file says, without an instant in which it says nothing."""
    record = msgspec.json.encode({"pid": os.getpid(), "run": str(run)})
    with path.open("r+b") as file:
        file.write(record.ljust(path.stat().st_size))


def _run_of(path: Path) -> Path:
    return Path(str(msgspec.json.decode((path / "host").read_bytes(), type=dict[str, str | int])["run"]))


def _center_files(path: Path) -> list[Path]:
    return sorted([*path.glob("center-*"), *path.glob("array-*")])


def _has_center(path: Path) -> bool:
    return any(CenterFile.is_ready(file) for file in _center_files(path))


def _is_ours(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and is_owned(path)


def _is_young(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < _CREATION_S


_HEADER = np.dtype(
    [("magic", "<i8"), ("state", "<i8"), ("table_bytes", "<i8"), ("chunk_bytes", "<i8"), ("gated", "<i8")]
)
_MAGIC = 0x32454C50494E414D  # "MANIPLE2"
_READY = 1
UNDECIDED, UNGATED, GATED, GATE_KEPT = range(4)  # what workers have agreed on; kept: until one brings another
_PAGE = 4096
_NOTE = 64


class CenterFile:
    """A mapping of the file, which ends with the last array that points into it."""

    def __init__(self, path: Path) -> None:
        self._memory = memory = map_file(path)
        self._header = header = np.frombuffer(memory, _HEADER, 1)[0]
        table = memory[_PAGE : _PAGE + int(header["table_bytes"])]
        self.layout = Layout.from_table(table, chunk_bytes=int(header["chunk_bytes"]))
        count = len(self.layout.chunks)
        offsets, _ = _offsets(self.layout)
        counters = memoryview(memory)[offsets["counters"] :]
        self.versions = counters[: 8 * count].cast("q")
        self.holders = counters[8 * count : 16 * count].cast("q")
        self.stuck = counters[16 * count : 24 * count].cast("q")
        self.vectors = _vectors(self.layout, memory, offsets)
        self.arrays = self.layout.chunk_views(self.vectors)
        self.state = RuleState(
            self.layout,
            {name: _vectors(self.layout, memory, offsets, name) for name in self.layout.state.vectors},
            {name: np.frombuffer(memory, np.float64, count, offsets[name]) for name in self.layout.state.scalars},
        )

    @staticmethod
    def is_ready(path: Path) -> bool:
        """Whether its creator has finished it."""
        with os.fdopen(open_owned(path, os.O_RDONLY), "rb") as file:
            head = np.frombuffer(file.read(16), np.int64)
        return len(head) == 2 and head[0] == _MAGIC and head[1] == _READY

    @staticmethod
    def create(path: Path, layout: Layout, model: FlatModel, note: str) -> None:
        """Fill the file with the values of `model`. It exists, and its creator holds its lock."""
        offsets, size = _offsets(layout)
        with path.open("r+b") as file:
            file.truncate(0)  # discard the work of a creator that failed
        memory = map_file(path, size, what="the center")
        memory[_PAGE : _PAGE + len(layout.table)] = layout.table
        header = np.frombuffer(memory, _HEADER, 1)
        header["table_bytes"], header["chunk_bytes"] = len(layout.table), layout.chunk_bytes
        text = note.encode()[: _PAGE - _NOTE - 8]
        memory[_NOTE : _NOTE + 8 + len(text)] = len(text).to_bytes(8, "little") + text
        model.begin()
        views = layout.views(_vectors(layout, memory, offsets))
        for i, (entry, view) in enumerate(zip(layout.entries, views, strict=True)):
            value = model.array(i)
            if value.dtype.kind in "fc" and not np.isfinite(value).all():
                raise InvalidArgument(
                    f"parameter {entry.name!r} holds values that are not finite, so it cannot become the center. "
                    "Look at the model's initialisation."
                )
            view[:] = value
        header["magic"], header["state"] = _MAGIC, _READY

    @property
    def gated(self) -> int:
        """What the workers have agreed on: UNDECIDED, UNGATED, GATED or GATE_KEPT (`center.gate_memory`)."""
        return int(self._header["gated"])

    @gated.setter
    def gated(self, value: int) -> None:
        self._header["gated"] = value

    def let_workers_decide(self) -> None:
        """The run was resumed: the next worker may bring another gate. Until then this one holds."""
        self.gated = {UNGATED: UNDECIDED, GATED: GATE_KEPT}.get(self.gated, self.gated)

    @property
    def note(self) -> str:
        """The note of its creator."""
        size = int.from_bytes(self._memory[_NOTE : _NOTE + 8], "little")
        return self._memory[_NOTE + 8 : _NOTE + 8 + size].decode(errors="replace")

    def release(self) -> None:
        """Drop the pages from this process's resident memory; they stay in shared memory and return when touched."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def file_bytes(layout: Layout) -> int:
    """The size of the file of a center with these parameters."""
    return _offsets(layout)[1]


def _offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """Where the parts of the file begin, and its size."""
    offsets: dict[str, int] = {}
    end = _PAGE + _whole_pages(len(layout.table))
    offsets["counters"] = end
    end += _whole_pages(24 * len(layout.chunks))
    for name in ("", *layout.state.vectors):
        for dtype, size in layout.sizes.items():
            offsets[f"{name}/{dtype}"] = end
            end += _whole_pages(np.dtype(dtype).itemsize * size)
    for name in layout.state.scalars:
        offsets[name] = end
        end += _whole_pages(8 * len(layout.chunks))
    return offsets, end


def _vectors(layout: Layout, memory: mmap.mmap, offsets: dict[str, int], name: str = "") -> dict[str, Array]:
    """The flat vectors of the parameters, or of the rule's state `name`."""
    return {
        dtype: np.frombuffer(memory, dtype, size, offsets[f"{name}/{dtype}"]) for dtype, size in layout.sizes.items()
    }


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
