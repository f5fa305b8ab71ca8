"""The segment: the folder in shared memory that holds a run's center, and its removal after the run.

/dev/shm/maniple-<lineage>/host      JSON: pid and run folder; locked for as long as the host lives
                           members   one byte per rank: never, live, left or dead; how often each rank was taken; how
                                     many another launcher has started
                           node      the workers' own lock
                           host.sock the host's socket; with host.json and token, if it listens to no other machine
                           controller  JSON: what the controller knows
                           leases-0  which samples of the first `sampler()` are taken, and so on
                           center-0  the parameters shared by the first `share()`, and so on
                           array-*   a named array
                           stage-*   what one remote worker has under way, while it is connected
                           words     how far the contributions of each remote worker are in the center
                           feed-*/   a queue of batches
                           circle-*  who meets there; circle-0.RANK.* a worker's slots, circle-0.parcel-* for newcomers,
                                     circle-0.device-RANK and circle-0.engine where gradients lie and meet
                           producers one byte per producer that the launcher has started: how it ended
                           server    locked by the network side; saving: by who writes a snapshot, and how many are kept
                           restored  if the center began again from a snapshot; resumed: workers may continue with
                                     the optimizer state they have saved
                           position-* where each worker with fixed shares is in the data
                           saves     touched when a snapshot is begun, by which workers save their optimizer state
                           looks     there if the script looks at a batch before it trains
"""

import mmap
import os
import re
import shutil
import stat
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from maniple.center.locks import ByteLocks, Patience, is_locked, open_own
from maniple.center.memory import Memory
from maniple.errors import InvalidArgument, SharedMemoryFull, WaitedTooLong
from maniple.record.folder import Folder

NEVER, LIVE, LEFT, DEAD = range(4)
MAX_WORKERS = 4096
_PREFIX = "maniple-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")  # only what a host has made is ever removed
_LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAKING = "making"
_YOUNG_S = 60  # a segment without content may be in the making for so long
_WORD = struct.Struct("<I")
_CHANGES = MAX_WORKERS  # where the word stands that counts departures; the ranks' own words follow
_GUESTS = _CHANGES + _WORD.size * (1 + MAX_WORKERS)
_MEMBERS_BYTES = _GUESTS + _WORD.size


class Segment:
    """The shared-memory folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_own(path)
            with os.fdopen(open_own(path / "members", os.O_RDWR), "r+b") as file:
                self._members = mmap.mmap(file.fileno(), _MEMBERS_BYTES)
        except FileNotFoundError:
            raise InvalidArgument(
                f"the run's shared memory {path} is gone: its host has ended. Start the run again with `maniple run`."
            ) from None
        self._guard: ByteLocks | None = None

    @classmethod
    def create(cls, root: Path, lineage: str, run: Path, *, is_making: bool = False) -> "Segment":
        """Make the segment of a run and guard it for as long as this process lives.

        With `is_making`, what is in it counts for nothing until `made` is called: whoever finds it after a crash
        throws it away.
        """
        path = segment_path(root, lineage)
        with suppress(FileNotFoundError):
            check_own(path)
            if (path / _MAKING).exists():
                _discard(path)
        try:
            path.mkdir(mode=0o700)
            if is_making:
                (path / _MAKING).touch()
        except FileExistsError:
            raise InvalidArgument(
                f"the run {run} is going on, or its memory {path} is still being freed. End it first, or wait a minute."
            ) from None
        except OSError as error:
            raise refusal(root, error) from error
        try:
            guard = ByteLocks(path / "host")
            patience = Patience(timeout_s=10)
            while not guard.take(0):  # a sweep may be looking at it
                patience.wait(f"{path / 'host'}, which a sweep is looking at")
            (path / "host").write_bytes(msgspec.json.encode({"pid": os.getpid(), "run": str(run)}))
            with (path / "members").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _MEMBERS_BYTES)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise refusal(root, error) from error
        segment = cls(path)
        segment._guard = guard
        return segment

    @classmethod
    def adopt(cls, root: Path, lineage: str, run: Path) -> "Segment | None":
        """Take over the segment of a run whose host was killed; None if nothing of it is left."""
        path = segment_path(root, lineage)
        if not cls.is_there(root, lineage):
            return None
        guard = ByteLocks(path / "host")
        patience = Patience(timeout_s=3)
        try:
            while not guard.take(0):
                patience.wait(f"{path / 'host'}: the run's host is alive")
        except WaitedTooLong:
            guard.close()
            raise InvalidArgument(
                f"the run {run} is going on: its host is alive. Join it with `maniple join`, or end it first."
            ) from None
        _write_owner(path / "host", run)
        segment = cls(path)
        segment._guard = guard
        for old in path.glob("circle-*"):  # nobody is left of those who met there
            old.unlink(missing_ok=True)
        for rank in range(MAX_WORKERS):
            if segment.state(rank) == LIVE:
                segment.mark(rank, DEAD)
        return segment

    @classmethod
    def is_there(cls, root: Path, lineage: str) -> bool:
        """A host has made the segment of this lineage, and it was not removed."""
        path = segment_path(root, lineage)
        with suppress(FileNotFoundError):
            check_own(path)
            return (path / "members").exists() and not (path / _MAKING).exists()
        return False

    def made(self) -> None:
        """All is in it now."""
        (self.path / _MAKING).unlink(missing_ok=True)

    @property
    def live(self) -> int:
        """p, the workers alive now."""
        return self._members[:MAX_WORKERS].count(LIVE)

    @property
    def has_members(self) -> bool:
        """Some worker is here, or was."""
        return any(self._members[:MAX_WORKERS])  # NEVER is 0

    @property
    def departures(self) -> int:
        """Counts whenever a worker is no longer alive, so that one need not look at all of them."""
        return _WORD.unpack_from(self._members, _CHANGES)[0]

    @property
    def guests(self) -> int:
        """The workers that another launcher has started, the last time it has; 0 if none has."""
        return _WORD.unpack_from(self._members, _GUESTS)[0]

    @guests.setter
    def guests(self, count: int) -> None:
        _WORD.pack_into(self._members, _GUESTS, count)

    def incarnation(self, rank: int) -> int:
        """How often rank `rank` was taken: by this one can tell a worker from its predecessor."""
        return _WORD.unpack_from(self._members, self._place_of(rank))[0]

    def renew(self, rank: int) -> int:
        """Give rank `rank` to a new process, which has not joined yet; gives its incarnation."""
        self.mark(rank, NEVER)
        number = self.incarnation(rank) + 1
        _WORD.pack_into(self._members, self._place_of(rank), number)
        return number

    def count_on(self, rank: int, incarnation: int) -> None:
        """Rank `rank` was taken so often before this segment was made."""
        number = max(incarnation, self.incarnation(rank))
        _WORD.pack_into(self._members, self._place_of(rank), number)

    def is_live(self, rank: int, incarnation: int) -> bool:
        """That very process of worker `rank` is alive."""
        return self._members[rank] == LIVE and self.incarnation(rank) == incarnation

    def state(self, rank: int) -> int:
        """What became of worker `rank`: NEVER, LIVE, LEFT or DEAD."""
        return self._members[rank]

    def mark(self, rank: int, state: int) -> None:
        """Note what became of worker `rank`."""
        self._members[rank] = state
        if state != LIVE:
            _WORD.pack_into(self._members, _CHANGES, (self.departures + 1) & 0xFFFFFFFF)

    def _place_of(self, rank: int) -> int:
        return _CHANGES + _WORD.size * (1 + rank)

    def centers(self) -> list[Path]:
        """The files of the centers made so far."""
        return sorted([*self.path.glob("center-*"), *self.path.glob("array-*")])

    def close(self) -> None:
        """Let go of the mapping."""
        self._members.close()  # harmless when closed already, as is the guard's
        if self._guard is not None:
            self._guard.close()

    def remove(self) -> None:
        """Remove the segment from memory."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(root: Path, salvage: Callable[[Segment, Path], None]) -> list[Path]:
    """Remove the segments whose hosts are dead, after `salvage(segment, run folder)`. Gives what was removed.

    What cannot be saved, for want of disk space say or because the run folder is gone, is left where it is.
    """
    removed: list[Path] = []
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if _is_ours(path) and _sweep_one(path, salvage):
                removed.append(path)
        except Exception as error:  # whatever is wrong with a dead run must not stop a new one
            if path.exists():  # else another sweep was quicker
                warnings.warn(f"{path} of a dead run is left where it is, it could not be saved: {error}", stacklevel=2)
    return removed


def segment_path(root: Path, lineage: str) -> Path:
    """Where the segment of a run is."""
    if not _LINEAGE.fullmatch(lineage):  # it comes from a file, and must not lead elsewhere
        raise InvalidArgument(
            f"{lineage[:100]!r} is no lineage of a run: run.json was changed. Give another run folder."
        )
    return root / f"{_PREFIX}{lineage}"


def abandoned(root: Path) -> list[Path]:
    """The segments of this user whose hosts are dead; nothing is changed."""
    return [path for path in sorted(root.glob(f"{_PREFIX}*")) if _is_ours(path) and not is_guarded(path)]


def homeless(path: Path) -> Path | None:
    """Where the run folder of an abandoned segment was, if it is gone and there is a center to save; else None."""
    with suppress(OSError, msgspec.DecodeError, KeyError):
        run = _run_of(path)
        if run_folder(run, path.name.removeprefix(_PREFIX)) is None and _has_center(path):
            return run
    return None


def _has_center(path: Path) -> bool:
    return any(Memory.is_ready(file) for kind in ("center-*", "array-*") for file in path.glob(kind))


def _run_of(path: Path) -> Path:
    return Path(str(msgspec.json.decode((path / "host").read_bytes(), type=dict[str, str | int])["run"]))


def is_guarded(path: Path) -> bool:
    """The host of a segment is alive, or has only begun to make it."""
    if not is_own(path):
        return False
    try:
        with os.fdopen(open_own(path / "host", os.O_RDWR), "r+b") as file:
            return is_locked(file.fileno(), 0)
    except (OSError, InvalidArgument):
        return path.exists() and time.time() - path.stat().st_mtime < _YOUNG_S


def is_own(path: Path) -> bool:
    """There is a segment, and it is this user's alone."""
    try:
        check_own(path)
    except (InvalidArgument, OSError):
        return False
    return True


def check_own(path: Path) -> None:
    """Raise InvalidArgument unless the segment `path` is a folder that only this user can enter.

    All users of a machine can write to /dev/shm, and run.json tells the names of segments, so somebody else may have
    made one of that name. FileNotFoundError if there is none.
    """
    about, me = path.lstat(), os.getuid()
    wrong = (
        "is a link" if stat.S_ISLNK(about.st_mode)
        else "is no folder" if not stat.S_ISDIR(about.st_mode)
        else f"belongs to user {about.st_uid}, and this process is of user {me}" if about.st_uid != me
        else f"can be entered by others (mode {stat.S_IMODE(about.st_mode):04o})" if about.st_mode & 0o077
        else ""
    )  # fmt: skip
    if wrong:
        raise InvalidArgument(
            f"the shared memory {path} {wrong}; a run uses only a folder of its own user with mode 0700. Call this as "
            "its owner, or let its owner remove it; MANIPLE_SHM=FOLDER uses another place for shared memory."
        )


def _is_ours(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and is_own(path)


def refusal(root: Path, error: OSError) -> SharedMemoryFull:
    """The error for a folder in memory that grants no room."""
    return SharedMemoryFull(
        f"{root} refuses the run's shared memory: {error.strerror}. "
        "Free some space there, or set MANIPLE_SHM to another folder that is held in memory."
    )


def _write_owner(path: Path, run: Path) -> None:
    """Write who owns a segment over what stood there, without a moment in which nothing does."""
    record = msgspec.json.encode({"pid": os.getpid(), "run": str(run)})
    with path.open("r+b") as file:
        file.write(record.ljust(path.stat().st_size))


def _discard(path: Path) -> None:
    """Remove a segment that a host was killed over while making it."""
    guard = ByteLocks(path / "host")
    try:
        if guard.take(0):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        guard.close()


def _save_first(segment: Segment, run: Path, salvage: Callable[[Segment, Path], None]) -> None:
    """Have the center of a dead host saved to its run folder, wherever that is now; an error if it cannot be."""
    folder = run_folder(run, segment.path.name.removeprefix(_PREFIX))
    if folder is not None:
        salvage(segment, folder)
    elif _has_center(segment.path):
        raise FileNotFoundError(
            f"its run folder {run} is gone: moved, or on a file system that is not mounted. {remedy(segment.path)}"
        )


def run_folder(run: Path, lineage: str) -> Path | None:
    """The folder of the run of this lineage: `run`, or if that was renamed, its new name beside it; else None.

    Another run may have taken the name since, so a folder counts only if its run.json has the lineage.
    """
    beside = run.parent.iterdir() if run.parent.is_dir() else ()
    for folder in (run, *beside):
        with suppress(OSError, InvalidArgument):
            if not folder.is_symlink() and Folder(folder).read().get("lineage") == lineage:
                return folder
    return None


def remedy(path: Path) -> str:
    """What to do about a center in memory whose run folder is gone."""
    return (
        "Put the folder back, and the next run saves the center there; or go on with it from where the folder is now "
        f"(`maniple run --resume FOLDER ...`). To give the center up, `rm -r {path}`."
    )


def _sweep_one(path: Path, salvage: Callable[[Segment, Path], None]) -> bool:
    if not (path / "host").exists():
        is_old = time.time() - path.stat().st_mtime > _YOUNG_S
        if is_old:
            shutil.rmtree(path, ignore_errors=True)
        return is_old
    guard = ByteLocks(path / "host")
    try:
        if not guard.take(0):
            return False  # its host is alive
        if (path / _MAKING).exists():
            shutil.rmtree(path, ignore_errors=True)
            return True
        try:
            run = _run_of(path)
            segment = Segment(path)
        except (msgspec.DecodeError, KeyError, ValueError, InvalidArgument):
            # Its host was killed while making it, or is making it right now: there is nothing to save yet.
            if time.time() - path.stat().st_mtime < _YOUNG_S:
                return False
            if any(path.glob("center-*")) or any(path.glob("array-*")):
                raise ValueError("it does not say which run it belongs to") from None
        else:
            try:
                _save_first(segment, run, salvage)
            finally:
                segment.close()
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        guard.close()
