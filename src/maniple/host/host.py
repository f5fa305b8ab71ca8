"""The host: owns a run's center, its shared memory and its folder, from before the first worker to after the last."""

import platform
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from maniple.center import Segment, sweep
from maniple.center.arrays import Brought, array_file
from maniple.center.segment import DEAD, LIVE, NEVER, segment_path
from maniple.center.shared import Shared
from maniple.center.snapshot import (
    Manifest,
    check_snapshot,
    newest_snapshot,
    snapshots,
)
from maniple.center.stage import finish_all
from maniple.center.tensors import read_arrays
from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.host.desk import Minutes
from maniple.host.keeping import (
    UNDER_WAY,
    abandon_bests,
    begin_again,
    find_again,
    is_kept_seldom,
    is_overtaken,
    keep,
    repeated_steps,
    save,
    set_most,
    unfinished,
    where,
)
from maniple.host.restored import Restored
from maniple.record import Events, Folder
from maniple.record.versions import versions
from maniple.sampler import position
from maniple.sampler.position import Position, give_up, settle

KEEP = 3
UNSAVED = 3  # the exit code of a run that went well, but whose center could not be saved


class Host:
    """One run, as its owner sees it. `start` begins a new one, `resume` goes on with one whose host is gone."""

    def __init__(self, folder: Folder, segment: Segment, lineage: str, asked: dict[str, Any], *, most: int) -> None:
        self.folder, self.segment, self.lineage = folder, segment, lineage
        self.news: list[str] = []  # what the person who started it should know
        self.salvaged: list[Path] = []
        self.unfinished = 0  # samples that were handed out and not done when the run ended
        self.missed = 0  # samples of the epochs begun that were not handed out
        set_most(segment, most)
        self._is_adopted = False
        self.is_prepared = False  # the folder is not its own to remove
        self._restored = Restored.read(segment.path)
        self._joined: set[int] = set()
        self.ends: dict[str, str] = {}  # by rank: how each worker that the launcher has started came to its end
        self.lost: dict[int, str] = {}  # by rank: why a worker is gone, without which the others continue
        self.events = Events(folder.events("host"))
        self.events.write("start", lineage=lineage, restored=self._restored.count, **asked)

    @classmethod
    def start(
        cls,
        shared_memory: Path,
        runs: Path,
        name: str,
        asked: dict[str, Any],
        *,
        most: int = KEEP,
        arrays: Path | None = None,
    ) -> "Host":
        """Begin a run: a new folder, a new segment, a new lineage; with the named arrays of a file, if one is given."""
        salvaged = sweep(shared_memory, _salvage)
        folder = Folder.create(runs, name)
        try:
            host = cls._begun(shared_memory, folder, secrets.token_hex(8), asked, most=most, arrays=arrays)
        except BaseException:
            folder.discard()
            raise
        host.salvaged = salvaged
        return host

    @classmethod
    def _begun(
        cls,
        shared_memory: Path,
        folder: Folder,
        lineage: str,
        asked: dict[str, Any],
        *,
        most: int,
        arrays: Path | None = None,
    ) -> "Host":
        segment = Segment.create(shared_memory, lineage, folder.path, is_making=True)
        try:
            if arrays is not None:
                _bring(segment, arrays)
            segment.made()
            node = platform.node()
            folder.describe(asked=asked, lineage=lineage, started=time.time(), versions=versions(), node=node)
            return cls(folder, segment, lineage, asked, most=most)
        except BaseException:
            segment.remove()
            raise

    @classmethod
    def go_on(cls, shared_memory: Path, run: Path, asked: dict[str, Any], *, most: int = KEEP) -> "Host":
        """Begin the run of a folder that was made for it, or go on with it if it was begun, here or elsewhere."""
        folder = Folder(run.resolve())
        lineage = folder.read().get("lineage")
        if lineage is not None and (snapshots(folder.center) or Segment.is_there(shared_memory, lineage)):
            return cls.resume(shared_memory, run, asked, falls_back=True, most=most)
        sweep(shared_memory, _salvage)
        # Begun and ended before there was anything to save: it keeps its name, by which workers know it.
        host = cls._begun(shared_memory, folder, lineage or secrets.token_hex(8), asked, most=most)
        host.is_prepared = True
        folder.describe(exit_code=None, ended=None)
        return host

    @classmethod
    def resume(
        cls,
        shared_memory: Path,
        run: Path,
        asked: dict[str, Any],
        *,
        which: str | None = None,
        falls_back: bool = False,
        most: int = KEEP,
    ) -> "Host":
        """Go on with the run in folder `run`.

        If its center survives in shared memory, and the run has not gone on elsewhere since, that is taken over;
        else the newest snapshot is restored, or `which`: a number, or "best". If the newest is damaged, the next older
        one is offered in the error, or taken with `falls_back`.
        """
        folder = Folder(run.resolve())
        lineage = folder.read().get("lineage")
        if lineage is None:
            raise InvalidArgument(
                f"{run} is no run folder: it has no run.json with a lineage. Give runs/NAME or runs/last."
            )
        news: list[str] = []
        is_newest = True
        is_there = Segment.is_there(shared_memory, lineage)
        left = Restored.read(segment_path(shared_memory, lineage)) if is_there else Restored()
        is_wanted = which is None and not is_overtaken(folder, left)
        segment = Segment.adopt(shared_memory, lineage, folder.path) if is_wanted else None
        if segment is not None:
            finished = finish_all(segment.path, lambda name: Shared.open(segment, segment.path / name))
            one = settle(segment.path, position.read(segment.path), int(asked.get("workers") or 0))
            # Workers who meet bring the center up to date from time to time only; others with each exchange.
            lost = (
                "steps since it was brought up to date are lost" if is_kept_seldom(segment) else "no exchange was lost"
            )
            lost = lost if one is None else _repeated(folder, one)
            news.append(f"the center has survived in shared memory: {lost}")
            folder.describe(resumed=time.time(), exit_code=None, ended=None, ends={}, **_asked_now(asked))
            host = cls(folder, segment, lineage, asked, most=most)
            host._is_adopted = True
            host.events.write("adopted", finished=finished, saved=None if one is None else one.saved)
        else:
            sweep(shared_memory, _salvage)
            path, manifest = _chosen(folder, lineage, which, falls_back=falls_back, news=news)
            is_all = _has_all(folder, manifest)
            is_newest = which is None or manifest.number == snapshots(folder.center)[-1][0]
            segment = Segment.create(shared_memory, lineage, folder.path, is_making=True)
            count = int(folder.read().get("restored", 0)) + 1
            try:
                find_again(segment, path, manifest)
                saved = 0.0 if is_all else manifest.saved
                had = Restored(count, saved, manifest.applied, manifest.words, manifest.forgotten, path.resolve().name)
                had.write(segment.path)
                for rank in folder.ranks():  # they may return; those who are new get ranks of their own
                    segment.mark(rank, DEAD)
                segment.made()
                anew: dict[str, Any] = {"exit_code": None, "ended": None, "ends": {}}
                folder.describe(resumed=time.time(), restored=count, **anew, **_asked_now(asked))
            except BaseException:
                segment.remove()
                raise
            one = settle(segment.path, position.read(segment.path), int(asked.get("workers") or 0))
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved))
            lost = _lost(folder, manifest, one, is_all=is_all)
            news.append(f"the center begins again from {path.name} of {when}: {lost}")
            host = cls(folder, segment, lineage, asked, most=most)
            made = {"updates": manifest.updates, "rounds": None if one is None else one.rounds}
            host.events.write("restored", snapshot=path.name, saved=manifest.saved, **made)
        host.news = [*news, *host._put_bests_aside(), *filter(None, [where(segment, one)])]
        host._offer_optimizers(is_newest=is_newest)
        begin_again(segment)
        return host

    def _put_bests_aside(self) -> list[str]:
        """After a restore: rename the best center if it was validated after the snapshot; gives what to say of it."""
        said: list[str] = []
        for name in abandon_bests(self.segment, self.folder):
            self.events.write("abandoned", name=name)
            said.append(f"the best center was validated after that: it is kept as {name}, and center/best begins anew")
        return said

    def _offer_optimizers(self, *, is_newest: bool) -> None:
        """Let workers continue with the optimizer states that were saved, unless the run goes back behind them."""
        if is_newest:
            (self.segment.path / position.RESUMED).touch()
        elif self.folder.optimizers():  # of a training that is given up, perhaps because it went wrong
            self.news.append("optimizer states that were saved after that snapshot are not used")

    @property
    def has_joined(self) -> bool:
        """Some worker has called `join()`."""
        return bool(self._joined)

    @property
    def validations(self) -> int:
        """How often the center's loss was told to the controller, in this life of the run."""
        return Minutes.read(self.segment.path).known.validations

    def expect(self, rank: int) -> None:
        """Get ready for a new process of worker `rank`, which has not joined yet."""
        self.segment.renew(rank)

    def bury(
        self, rank: int, exit_code: int, killed_by: str = "", *, is_told: bool = False, killed_after_s: float = 0.0
    ) -> bool:
        """Note that the process of worker `rank` has ended; True if it had joined.

        Args:
            killed_by: the signal that has ended it, if one has.
            is_told: the launcher had told it to end.
            killed_after_s: and has killed it so many seconds later.
        """
        had_joined = self.segment.state(rank) != NEVER
        if had_joined:
            self._joined.add(rank)
        died = self.segment.state(rank) in {LIVE, DEAD}  # the server may have noted it first
        if died:
            self.segment.mark(rank, DEAD)
        how: dict[str, Any] = {}
        if exit_code == 0:
            end = "done"
        elif is_told and died and killed_after_s:
            end, how = f"killed after {killed_after_s:.0f} s", {"killed_after": killed_after_s}
        elif is_told and (killed_after_s or killed_by == "SIGTERM"):  # it has left, perhaps before it was killed
            end, how, died = "stopped", {"stopped": True}, False
        else:
            end = f"killed by {killed_by}" if killed_by else f"exit code {exit_code}"
        self.ends[str(rank)] = end
        self.events.write("exit", worker=rank, exit_code=exit_code, died=died, **how)
        return had_joined

    def lose(self, rank: int, why: str, *, node: str | None = None) -> None:
        """Note that worker `rank` is gone for good, and that the others continue without it."""
        self.lost[rank] = self.ends[str(rank)] = why
        give_up(self.segment.path, rank)
        self.events.write("given up", worker=rank, node=node, reason=why)
        with suppress(OSError):  # written again at the end
            self.folder.describe(ends=self.ends)

    def save(self) -> Path | None:
        """Write a snapshot to the run folder, and remove all but the newest few; None if there is no center yet."""
        begin = time.perf_counter()
        path = save(self.segment, self.folder, self.lineage, self._restored)
        if path is not None:
            self.events.write("snapshot", name=path.name, duration=time.perf_counter() - begin)
        return path

    def abandon(self) -> None:
        """Undo the beginning of a run that cannot go on; what was there before stays."""
        self.events.close()
        if self._is_adopted:
            self.segment.close()
            return
        self.segment.remove()
        if self._restored.count == 0 and not self.is_prepared:
            self.folder.discard()

    def pause(self) -> list[Path]:
        """Save the center and remove the shared memory, to go on later. There must be no server any more."""
        finish_all(self.segment.path, lambda name: Shared.open(self.segment, self.segment.path / name))
        return self.close(None)

    def close(self, exit_code: int | None) -> list[Path]:
        """Save the center, remove the shared memory, and write down how the run ended; gives the files.

        If the center cannot be saved, it stays in memory, and a later run saves it; the exit code is then UNSAVED,
        unless it was another error before.
        """
        ended: dict[str, Any] = {}
        try:
            path = self.save()
            for number, one in unfinished(self.segment).items():
                rest = {"unfinished": one.samples, "missed": one.missed}
                self.events.write("sampled", sampler=number, epochs=one.handed_out[-3:], **rest)
                self.unfinished += one.samples
                self.missed += one.missed
            self.segment.remove()
            for left in self.folder.optimizers(".center-*"):  # by workers that were killed while writing them
                with suppress(OSError):
                    left.unlink()
        except Exception as error:
            if exit_code is not None:
                exit_code = exit_code or UNSAVED
            ended = {"end": f"the center could not be saved, and is kept in {self.segment.path}: {error}"}
            raise
        finally:
            self.segment.close()
            self.events.write("end", exit_code=exit_code)
            self.events.close()
            with suppress(OSError):
                if not is_overtaken(self.folder, self._restored):
                    ends = {"ends": self.ends} if self.ends else {}
                    self.folder.describe(ended=time.time(), exit_code=exit_code, is_saved=not ended, **ends, **ended)
        return [] if path is None else [self.folder.center / file.name for file in sorted(path.glob("*.safetensors"))]


def _has_all(folder: Folder, manifest: Manifest) -> bool:
    """The host ended in order, and this snapshot is what it saved then."""
    run = folder.read()
    ended = run.get("ended")
    return (
        run.get("is_saved", True)
        and isinstance(ended, float)
        and manifest.saved <= ended
        and manifest.number == snapshots(folder.center)[-1][0]
    )


def _asked_now(asked: dict[str, Any]) -> dict[str, Any]:
    """What run.json is to say of a run that is resumed: what was asked for now, unless it is a host alone."""
    return {"asked": asked} if asked.get("script") else {}


def _repeated(folder: Folder, one: Position) -> str:
    """The steps that were made after the center was brought up to date, as far as rows tell of them."""
    steps = repeated_steps(folder, one)
    return f"about {steps:,} steps that were made after it are repeated" if steps else "a few steps may be repeated"


def _lost(folder: Folder, manifest: Manifest, one: Position | None, *, is_all: bool) -> str:
    """What was done after a snapshot; `is_all`: the host has ended in order with it."""
    if one is not None and (not is_all or repeated_steps(folder, one)):
        return _repeated(folder, one)
    ago_s = time.time() - manifest.saved
    return "nothing was lost" if is_all else f"what was contributed after that ({ago_s:,.0f} s ago) is lost"


def _chosen(
    folder: Folder, lineage: str, which: str | None, *, falls_back: bool, news: list[str]
) -> tuple[Path, Manifest]:
    if which is not None:
        path = folder.center / (f"snapshot-{int(which):06d}" if which.isdigit() else which)
        return path, check_snapshot(path, lineage)
    path, manifest, reasons = newest_snapshot(folder.center, lineage)
    if reasons and not falls_back:
        raise InvalidArgument(
            f"the newest snapshot of {folder.path} cannot be used: {' '.join(reasons)} The next older one that is "
            f"whole is {path.name}, of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.saved))}. "
            f"Add --snapshot {manifest.number} to begin from it."
        )
    news += [f"a snapshot was passed over: {reason}" for reason in reasons]
    return path, manifest


def _bring(segment: Segment, path: Path) -> None:
    """Make named arrays of a safetensors or HDF5 file that somebody has brought."""
    for name, value in read_arrays(path).items():
        entry = Entry(name, value.shape, str(value.dtype))
        center, _ = Shared.open_or_create(segment, array_file(name), Brought(entry, value), rank=-1)
        center.close()


def _salvage(segment: Segment, run: Path) -> None:
    """Save what a host that was killed has left in memory."""
    folder, restored = Folder(run), Restored.read(segment.path)
    if is_overtaken(folder, restored):
        return
    finish_all(segment.path, lambda name: Shared.open(segment, segment.path / name))
    (folder.center / UNDER_WAY).unlink(missing_ok=True)
    keep(segment, folder, segment.path.name.rpartition("-")[2], restored)
    end = "its host was killed; the center was saved by a later run"
    folder.describe(exit_code=None, ended=time.time(), is_saved=True, end=end)
