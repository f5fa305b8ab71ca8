"""The best center so far, as a snapshot of its own.

center/candidate             the center as it was when the last validation began
center/best -> best-000003   the one whose validation was the best, with its loss in validated.json
center/best-000003-abandoned-1   the best of a time that the run has gone back behind
center/epoch-0004            the center after 4 epochs, where somebody asked for it
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from maniple.decisions import Known
from maniple.record.folder import point, sync_folder, write_json

_CANDIDATE = "candidate"
_VALIDATED = "validated.json"


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

    def keep(self, number: int, loss: float | None = None) -> Path | None:
        """The candidate is the best so far, for the `number`-th time; without one, the center as it is now.

        It may be repeated: who was killed in the middle of it finds what was done.
        """
        candidate, path = self._folder / _CANDIDATE, self._folder / f"best-{number:06d}"
        if not path.exists():
            if not candidate.exists() and self._write(_CANDIDATE) is None:
                return None
            write_json(candidate / _VALIDATED, {"loss": loss})
            candidate.rename(path)
            sync_folder(self._folder)
        point(self._folder / "best", path.name)
        return path

    def keep_epoch(self, number: int) -> Path | None:
        """Keep the center as it is now, after so many epochs."""
        return self._write(f"epoch-{number:04d}")

    def prune(self, number: int) -> None:
        """Remove what was the best before, once its successor is there: a full disk may have kept that from it."""
        found = dict(_bests(self._folder))
        for path in (path for other, path in found.items() if other < number and number in found):
            shutil.rmtree(path, ignore_errors=True)


def go_back(folder: Path, known: Known, snapshot: str, count: int) -> list[str]:
    """The run begins again from `snapshot`, for the `count`-th time, with `known` as it was then.

    A best that was validated later does not belong to what continues: it stays under another name, and is given. If
    the best of that time is no longer there, the next validation is the best. Repeating it changes nothing.
    """
    shutil.rmtree(folder / _CANDIDATE, ignore_errors=True)  # of a validation that nobody will end
    own = next((number for number, path in _bests(folder) if path.name == snapshot), 0)
    if own > known.bests:  # it was written when its validation began
        known.bests, known.best = own, _loss(folder / snapshot)
    abandoned: list[str] = []
    for number, path in _bests(folder):
        if number > known.bests:
            path.rename(path.with_name(f"{path.name}-abandoned-{count}"))
            abandoned.append(f"{path.name}-abandoned-{count}")
    current = folder / f"best-{known.bests:06d}"
    if current.is_dir():
        point(folder / "best", current.name)
    else:
        known.best = None
        if (folder / "best").is_symlink():
            (folder / "best").unlink()
    return abandoned


def _bests(folder: Path) -> Iterator[tuple[int, Path]]:
    """The best centers that are there, by their numbers."""
    for path in sorted(folder.glob("best-*")):
        if path.name[5:].isdigit():
            yield int(path.name[5:]), path


def _loss(path: Path) -> float | None:
    try:
        return msgspec.json.decode((path / _VALIDATED).read_bytes(), type=dict[str, float | None])["loss"]
    except (OSError, msgspec.MsgspecError, KeyError):
        return None
