"""The host: owns a run's centers, shared memory and folder, from before the first worker until after the last."""

import platform
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from maniple.center import Segment, sweep
from maniple.center.arrays import array_file, single_array
from maniple.center.shared import SharedCenter, finish_all
from maniple.center.snapshot import Manifest, check_snapshot, newest_snapshot, read_arrays, snapshots
from maniple.clock import clock
from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.host.controller_requests import ControllerRecord, recording_failure, request_stop
from maniple.host.snapshots import (
    EXPORT_IN_PROGRESS,
    RestorePoint,
    abandon_bests,
    has_synchronous_rule,
    is_superseded,
    prepare_resume,
    repeated_steps,
    restore_snapshot,
    resume_text,
    save,
    set_limit,
    unfinished_samples,
    write,
)
from maniple.memory.segment import DEAD, LIVE, NEVER, segment_path
from maniple.peers.mean import collect_into_centers
from maniple.record import Events, RunFolder
from maniple.record.folder import versions
from maniple.sampler import position
from maniple.sampler.position import Position, commit_positions, give_up
from maniple.settings.options import KEEP

UNSAVED = 3  # exit code of a successful run whose center could not be saved

Settings = dict[str, Any]  # those of the job, for run.json and the event "start"


class Host:
    """One run, as its owner sees it. `start` begins a new one, `resume` continues one whose host is gone.

    Attributes:
        notices: what to tell the person who started it.
        salvaged: run folders of other, killed hosts whose centers were saved at the start.
        unfinished: samples that were leased and not finished when the run ended.
        missed: samples of started epochs that were never leased.
        lost: by rank, why a worker is gone for good while the others continue.
        has_joined: a worker started by the launcher has called `join()`, and its process has ended.
    """

    def __init__(self, folder: RunFolder, segment: Segment, lineage: str, settings: Settings, *, keep: int) -> None:
        self.folder, self.segment, self.lineage = folder, segment, lineage
        self.notices: list[str] = []
        self.salvaged: list[Path] = []
        self.unfinished = self.missed = 0
        self.lost: dict[int, str] = {}
        self.has_joined = False
        self._ends: dict[str, str] = {}  # by rank: how each worker started by the launcher ended
        self._owns_folder = True  # else it was prepared by somebody else
        self._is_adopted = False
        set_limit(segment, keep)
        self._restored = RestorePoint.read(segment.path)
        self.events = Events(folder.events("host"))
        self.events.write("start", lineage=lineage, restored=self._restored.count, **settings)

    @classmethod
    def start(
        cls,
        shared_memory: Path,
        runs: Path,
        name: str,
        settings: Settings,
        *,
        keep: int = KEEP,
        arrays: Path | None = None,
    ) -> "Host":
        """Start a run with a new folder, segment and lineage; `arrays` is a file with initial named arrays."""
        salvaged = sweep(shared_memory, _salvage)
        folder = RunFolder.create(runs, name)
        try:
            host = cls._create(shared_memory, folder, secrets.token_hex(8), settings, keep=keep, arrays=arrays)
        except BaseException:
            folder.discard()
            raise
        host.salvaged = salvaged
        return host

    @classmethod
    def start_prepared(cls, shared_memory: Path, run: Path, settings: Settings, *, keep: int = KEEP) -> "Host":
        """Start the run of a folder that was prepared for it, or resume it if it was started before."""
        folder = RunFolder(run.resolve())
        lineage = folder.read().get("lineage")
        if lineage is not None and (snapshots(folder.center) or Segment.exists(shared_memory, lineage)):
            return cls.resume(shared_memory, run, settings, falls_back=True, keep=keep)
        sweep(shared_memory, _salvage)
        # If it was started and ended before there was anything to save, it keeps its lineage, which workers know.
        host = cls._create(shared_memory, folder, lineage or secrets.token_hex(8), settings, keep=keep)
        host._owns_folder = False
        folder.describe(exit_code=None, ended=None)
        return host

    @classmethod
    def _create(
        cls,
        shared_memory: Path,
        folder: RunFolder,
        lineage: str,
        settings: Settings,
        *,
        keep: int,
        arrays: Path | None = None,
    ) -> "Host":
        segment = Segment.create(shared_memory, lineage, folder.path, is_incomplete=True)
        try:
            if arrays is not None:
                _load_arrays(segment, arrays)
            segment.mark_complete()
            node = platform.node()
            folder.describe(asked=settings, lineage=lineage, started=clock.time(), versions=versions(), node=node)
            return cls(folder, segment, lineage, settings, keep=keep)
        except BaseException:
            segment.remove()
            raise

    @classmethod
    def resume(
        cls,
        shared_memory: Path,
        run: Path,
        settings: Settings,
        *,
        which: str | None = None,
        falls_back: bool = False,
        keep: int = KEEP,
    ) -> "Host":
        """Continue the run in folder `run`.

        If its segment survives in shared memory, and the run was not resumed elsewhere since, it is adopted. Otherwise
        a snapshot is restored.

        Args:
            which: the snapshot, by number or as "best"; None: the segment, or the newest snapshot.
            falls_back: if the newest snapshot is damaged, use an older one instead of raising.
        """
        folder = RunFolder(run.resolve())
        lineage = folder.read().get("lineage")
        if lineage is None:
            raise InvalidArgument(
                f"{run} is no run folder: it has no run.json with a lineage. Give runs/NAME or runs/last."
            )
        segment: Segment | None = None
        if which is None and Segment.exists(shared_memory, lineage):
            restored = RestorePoint.read(segment_path(shared_memory, lineage))
            if not is_superseded(folder, restored):
                segment = Segment.adopt(shared_memory, lineage, folder.path)
        is_adopted = segment is not None
        is_newest, notices = True, list[str]()
        if segment is not None:
            common, notice, event = _adopt(folder, segment, settings)
        else:
            sweep(shared_memory, _salvage)
            path, manifest = _choose_snapshot(folder, lineage, which, falls_back=falls_back, notices=notices)
            is_newest = which is None or manifest.number == snapshots(folder.center)[-1][0]
            segment = Segment.create(shared_memory, lineage, folder.path, is_incomplete=True)
            common, notice, event = _restore(folder, segment, path, manifest, settings)
        host = cls(folder, segment, lineage, settings, keep=keep)
        host._is_adopted = is_adopted
        host.events.write("adopted" if is_adopted else "restored", **event)
        notices.append(notice)
        for name in abandon_bests(segment, folder):
            host.events.write("abandoned", name=name)
            notices.append(
                f"the best center was validated after that: it is kept as {name}, and center/best starts over"
            )
        host.notices = [*notices, *filter(None, [resume_text(segment, common)])]
        if is_newest:
            (segment.path / position.RESUMED).touch()  # workers may use the optimizer states that were saved
        elif folder.optimizers():  # of a branch that is abandoned, perhaps because it went wrong
            host.notices.append("optimizer states that were saved after that snapshot are not used")
        prepare_resume(segment)
        return host

    @property
    def validated(self) -> tuple[int, int]:
        """How often there was a new best validation, and how many have brought nothing better since."""
        state = ControllerRecord.read(self.segment.path).policy_state
        return state.bests, state.misses

    def request_stop(self, reason: str) -> None:
        """Let the controller stop all workers, each after its next heartbeat."""
        with recording_failure(self.events):
            request_stop(self.segment.path, reason)

    def expect(self, rank: int) -> None:
        """Prepare for a new process of worker `rank`, which has not joined yet."""
        self.segment.renew(rank)

    def record_exit(
        self, rank: int, exit_code: int, killed_by: str = "", *, was_stopped: bool = False, killed_after_s: float = 0.0
    ) -> bool:
        """Record the end of a worker's process; returns whether it had joined.

        Args:
            killed_by: the signal that ended it, if any.
            was_stopped: the launcher had asked it to end.
            killed_after_s: seconds from then until the launcher killed it; 0 if it did not.
        """
        had_joined = self.segment.state(rank) != NEVER
        self.has_joined |= had_joined
        died = self.segment.state(rank) in {LIVE, DEAD}  # the server may have marked it first
        if died:
            self.segment.mark(rank, DEAD)
        details: dict[str, Any] = {}
        if exit_code == 0:
            end = "done"
        elif was_stopped and died and killed_after_s:
            end, details = f"killed after {killed_after_s:.0f} s", {"killed_after": killed_after_s}
        elif was_stopped and (killed_after_s or killed_by == "SIGTERM"):  # it left, perhaps before it was killed
            end, details, died = "stopped", {"stopped": True}, False
        else:
            end = f"killed by {killed_by}" if killed_by else f"exit code {exit_code}"
        self._ends[str(rank)] = end
        self.events.write("exit", worker=rank, exit_code=exit_code, died=died, **details)
        return had_joined

    def lose(self, rank: int, why: str, *, node: str | None = None) -> None:
        """Record that worker `rank` is gone for good, and let the others take over its share of the samples."""
        self.lost[rank] = self._ends[str(rank)] = why
        give_up(self.segment.path, rank)
        self.events.write("given up", worker=rank, node=node, reason=why)
        with suppress(OSError):  # written again at the end
            self.folder.describe(ends=self._ends)

    def save(self) -> Path | None:
        """Write a snapshot to the run folder and remove old ones; None if there is no center yet."""
        started = time.perf_counter()
        path = save(self.segment, self.folder)
        if path is not None:
            self.events.write("snapshot", name=path.name, duration=time.perf_counter() - started)
        return path

    def abandon(self) -> None:
        """Undo the start of a run that cannot continue; what was there before stays."""
        self.events.close()
        if self._is_adopted:
            self.segment.close()
            return
        self.segment.remove()
        if self._restored.count == 0 and self._owns_folder:
            self.folder.discard()

    def pause(self) -> list[Path]:
        """Save the center and remove the shared memory, to resume later. The server must have ended."""
        finish_all(self.segment)
        return self.close(None)

    def close(self, exit_code: int | None, *, result: dict[str, Any] | None = None) -> list[Path]:
        """Save the center, remove the shared memory and record how the run ended; returns the center's files.

        If the center cannot be saved it stays in memory, and a later run saves it; the exit code is then UNSAVED
        unless there was another error before.
        """
        problem: dict[str, Any] = {}
        try:
            path = self.save()
            for number, sampler in unfinished_samples(self.segment).items():
                rest = {"unfinished": sampler.samples, "missed": sampler.missed}
                self.events.write("sampled", sampler=number, epochs=sampler.handed_out[-3:], **rest)
                self.unfinished += sampler.samples
                self.missed += sampler.missed
            self.segment.remove()
            for left in self.folder.optimizers(".center-*"):  # by workers killed while writing them
                with suppress(OSError):
                    left.unlink()
        except Exception as error:
            if exit_code is not None:
                exit_code = exit_code or UNSAVED
            problem = {"end": f"the center could not be saved, and is kept in {self.segment.path}: {error}"}
            raise
        finally:
            self.segment.close()
            self.events.write("end", exit_code=exit_code)
            self.events.close()
            with suppress(OSError):
                if not is_superseded(self.folder, self._restored):
                    ends = ({"ends": self._ends} if self._ends else {}) | ({"result": result} if result else {})
                    is_saved = not problem
                    self.folder.describe(ended=clock.time(), exit_code=exit_code, is_saved=is_saved, **ends, **problem)
        return [] if path is None else [self.folder.center / file.name for file in sorted(path.glob("*.safetensors"))]


def _adopt(folder: RunFolder, segment: Segment, settings: Settings) -> tuple[Position | None, str, dict[str, Any]]:
    """Take over a segment that survived its host.

    Returns:
        The position common to all workers, if any, a notice for people, and the values of the event.
    """
    finished = finish_all(segment)
    collect_into_centers(segment)
    common = commit_positions(segment.path, position.read(segment.path), int(settings.get("workers") or 0))
    if common is not None:
        lost = _repeated_text(folder, common)
    elif has_synchronous_rule(segment):  # its workers update the center only from time to time
        lost = "steps since it was brought up to date are lost"
    else:
        lost = "no exchange was lost"
    folder.describe(resumed=clock.time(), exit_code=None, ended=None, ends={}, result=None, **_new_settings(settings))
    event = {"finished": finished, "saved": None if common is None else common.saved}
    return common, f"the center has survived in shared memory: {lost}", event


def _restore(
    folder: RunFolder, segment: Segment, path: Path, manifest: Manifest, settings: Settings
) -> tuple[Position | None, str, dict[str, Any]]:
    """Fill a new segment from a snapshot; returns the same as `_adopt`."""
    is_complete = _is_final(folder, manifest)
    count = int(folder.read().get("restored", 0)) + 1
    try:
        restore_snapshot(segment, path, manifest)
        saved, name = 0.0 if is_complete else manifest.saved, path.resolve().name
        RestorePoint(count, saved, manifest.applied, manifest.words, manifest.forgotten, name).write(segment.path)
        for rank in folder.ranks():  # they may return; new workers get other ranks
            segment.mark(rank, DEAD)
        segment.mark_complete()
        ended: dict[str, Any] = {"exit_code": None, "ended": None, "ends": {}, "result": None}
        folder.describe(resumed=clock.time(), restored=count, **ended, **_new_settings(settings))
    except BaseException:
        segment.remove()
        raise
    common = commit_positions(segment.path, position.read(segment.path), int(settings.get("workers") or 0))
    lost = _lost_text(folder, manifest, common, is_complete=is_complete)
    event = {"snapshot": path.name, "saved": manifest.saved, "updates": manifest.updates}
    event |= {"rounds": None if common is None else common.rounds}
    return common, f"the center begins again from {path.name} of {_date(manifest.saved)}: {lost}", event


def _choose_snapshot(
    folder: RunFolder, lineage: str, which: str | None, *, falls_back: bool, notices: list[str]
) -> tuple[Path, Manifest]:
    if which is not None:
        path = folder.center / (f"snapshot-{int(which):06d}" if which.isdigit() else which)
        return path, check_snapshot(path, lineage)
    path, manifest, reasons = newest_snapshot(folder.center, lineage)
    if reasons and not falls_back:
        raise InvalidArgument(
            f"the newest snapshot of {folder.path} cannot be used: {' '.join(reasons)} The next older one that is "
            f"whole is {path.name}, of {_date(manifest.saved)}. Add --snapshot {manifest.number} to begin from it."
        )
    notices += [f"a snapshot was passed over: {reason}" for reason in reasons]
    return path, manifest


def _is_final(folder: RunFolder, manifest: Manifest) -> bool:
    """Whether the host ended in order and saved this snapshot then, so that nothing is lost."""
    run = folder.read()
    ended = run.get("ended")
    return (
        run.get("is_saved", True)
        and isinstance(ended, float)
        and manifest.saved <= ended
        and manifest.number == snapshots(folder.center)[-1][0]
    )


def _new_settings(settings: Settings) -> Settings:
    """What run.json records of a resumed run: the settings given now, unless it is a host without workers."""
    return {"asked": settings} if settings.get("script") else {}


def _repeated_text(folder: RunFolder, common: Position) -> str:
    """How many steps synchronous workers repeat, for people."""
    steps = repeated_steps(folder, common)
    return f"about {steps:,} steps that were made after it are repeated" if steps else "a few steps may be repeated"


def _lost_text(folder: RunFolder, manifest: Manifest, common: Position | None, *, is_complete: bool) -> str:
    """What was done after a snapshot and is lost, for people."""
    if common is not None and (not is_complete or repeated_steps(folder, common)):
        return _repeated_text(folder, common)
    ago_s = clock.time() - manifest.saved
    return "nothing was lost" if is_complete else f"what was contributed after that ({ago_s:,.0f} s ago) is lost"


def _date(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def _load_arrays(segment: Segment, path: Path) -> None:
    """Create named arrays from a safetensors or HDF5 file."""
    for name, value in read_arrays(path).items():
        entry = Entry(name, value.shape, str(value.dtype))
        center, _ = SharedCenter.open_or_create(segment, array_file(name), single_array(entry, value), rank=-1)
        center.close()


def _salvage(segment: Segment, run: Path) -> None:
    """Save the center that a killed host has left in memory."""
    folder = RunFolder(run)
    if is_superseded(folder, RestorePoint.read(segment.path)):
        return
    finish_all(segment)
    collect_into_centers(segment)
    (folder.center / EXPORT_IN_PROGRESS).unlink(missing_ok=True)
    write(segment, folder)
    end = "its host was killed; the center was saved by a later run"
    folder.describe(exit_code=None, ended=clock.time(), is_saved=True, end=end)
