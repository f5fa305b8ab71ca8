"""The host: owns a run's center, its shared memory and its folder, from before the first worker to after the last."""

import platform
import secrets
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from maniple.center import Segment, Shared, save_snapshot, sweep
from maniple.center.segment import DEAD, LIVE, NEVER
from maniple.record import Events, Folder


class Host:
    """One run, as its owner sees it."""

    def __init__(self, shared_memory: Path, runs: Path, name: str, asked: dict[str, Any]) -> None:
        self.salvaged = sweep(shared_memory, _salvage)
        self.lineage = secrets.token_hex(8)
        self.folder = Folder.create(runs, name)
        try:
            self.segment = Segment.create(shared_memory, self.lineage, self.folder.path)
        except BaseException:
            self.folder.discard()
            raise
        self._joined: set[int] = set()
        self.events = Events(self.folder.events("host"))
        self.folder.describe(
            asked=asked, lineage=self.lineage, started=time.time(), versions=_versions(), node=platform.node()
        )
        self.events.write("start", lineage=self.lineage, **asked)

    @property
    def has_joined(self) -> bool:
        """Some worker has called `join()`."""
        return bool(self._joined)

    def expect(self, rank: int) -> None:
        """Get ready for a new process of worker `rank`, which has not joined yet."""
        self.segment.mark(rank, NEVER)

    def bury(self, rank: int, exit_code: int) -> bool:
        """Note that the process of worker `rank` has ended; True if it had joined."""
        had_joined = self.segment.state(rank) != NEVER
        if had_joined:
            self._joined.add(rank)
        died = self.segment.state(rank) == LIVE
        if died:
            self.segment.mark(rank, DEAD)
        self.events.write("exit", worker=rank, exit_code=exit_code, died=died)
        return had_joined

    def save(self) -> list[Path]:
        """Write the centers to the run folder; gives the files."""
        return _save(self.segment, self.folder, self.lineage)

    def close(self, exit_code: int) -> list[Path]:
        """Save the center, remove the shared memory, and write down how the run ended.

        If the center cannot be saved (OSError), it stays in memory, and a later run saves it.
        """
        try:
            saved = self.save()
            self.segment.remove()
        finally:
            self.segment.close()
            self.events.write("end", exit_code=exit_code)
            self.events.close()
            with suppress(OSError):
                self.folder.describe(ended=time.time(), exit_code=exit_code)
        return saved


def _save(segment: Segment, folder: Folder, lineage: str) -> list[Path]:
    saved: list[Path] = []
    for path in segment.centers():
        center = Shared.open(segment, path)
        if center is not None:
            target = folder.center / f"{path.name}.safetensors"
            save_snapshot(center, target, lineage=lineage)
            center.close()
            saved.append(target)
    return saved


def _salvage(segment: Segment, run: Path) -> None:
    """Save what a host that was killed has left in memory."""
    folder = Folder(run)
    _save(segment, folder, segment.path.name.rpartition("-")[2])
    folder.describe(exit_code=None, ended="its host was killed; the center was saved by a later run")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("maniple", "numpy", "torch", "numba"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
