"""The best center so far, as a snapshot of its own.

center/candidate             the center as it was when the last validation began
center/best -> best-000003   the one whose validation was the best
center/epoch-0004            the center after 4 epochs, where somebody asked for it
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from maniple.record.folder import point, sync_folder

_CANDIDATE = "candidate"


class Best:
    """Keeps the best of the centers that were validated. `write` writes a snapshot of this name to the folder."""

    def __init__(self, folder: Path, write: Callable[[str], Path | None]) -> None:
        self._folder, self._write = folder, write
        for name in (_CANDIDATE, "epoch-*"):
            for path in folder.glob(f".{name}.*"):  # of a server that was killed while writing it
                shutil.rmtree(path, ignore_errors=True)

    def keep_candidate(self) -> None:
        """Keep the center as it is now."""
        self.discard_candidate()  # also if the new one cannot be written
        self._write(_CANDIDATE)

    def discard_candidate(self) -> None:
        """The candidate was not the best."""
        shutil.rmtree(self._folder / _CANDIDATE, ignore_errors=True)

    def keep(self, number: int) -> Path | None:
        """The candidate is the best so far, for the `number`-th time; without one, the center as it is now.

        It may be repeated: who was killed in the middle of it finds what was done.
        """
        candidate, path = self._folder / _CANDIDATE, self._folder / f"best-{number:06d}"
        if not path.exists():
            if not candidate.exists() and self._write(_CANDIDATE) is None:
                return None
            candidate.rename(path)
            sync_folder(self._folder)
        point(self._folder / "best", path.name)
        return path

    def keep_epoch(self, number: int) -> Path | None:
        """Keep the center as it is now, after so many epochs."""
        return self._write(f"epoch-{number:04d}")

    def prune(self, number: int) -> None:
        """Remove what was the best before."""
        for path in self._folder.glob("best-*"):
            if path.name[5:].isdigit() and int(path.name[5:]) < number:
                shutil.rmtree(path, ignore_errors=True)
