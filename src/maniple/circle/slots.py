"""Slots: memory of one worker that the others of its machine read, each in a file of its own."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from maniple.contracts import Array
from maniple.errors import SharedMemoryFull


class Slots:
    """The slots of a circle, seen by one worker."""

    def __init__(self, folder: Path, name: str, rank: int, incarnation: int) -> None:
        self._folder, self._name, self._rank, self._incarnation = folder, name, rank, incarnation
        self._mapped: dict[tuple[int, int, int], Array] = {}
        self._serials: list[int] = []

    def clear(self) -> None:
        """Remove the slots of the processes before this one, once nobody reads them any more."""
        mine = f"{self._name}.{self._rank}.{self._incarnation}."
        for path in self._folder.glob(f"{self._name}.{self._rank}.*"):
            if not path.name.startswith(mine):
                path.unlink(missing_ok=True)

    def make(self, size: int) -> tuple[int, Array]:
        """A new slot of this worker: its serial number and its bytes."""
        serial = self._serials[-1] + 1 if self._serials else 1
        path = self._path(self._rank, self._incarnation, serial)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
        except OSError as error:
            path.unlink()
            space = os.statvfs(path.parent)
            raise SharedMemoryFull(
                f"this worker's slot needs {size / 1e6:,.0f} MB in {path.parent.parent}, which has "
                f"{space.f_bavail * space.f_frsize / 1e6:,.0f} MB free ({error.strerror}). Enlarge it (`mount -o "
                "remount,size=8G /dev/shm`; in a container `--shm-size=8g`), or set MANIPLE_SHM to another folder that "
                "is held in memory."
            ) from error
        finally:
            os.close(file)
        self._serials.append(serial)
        return serial, self._keep((self._rank, self._incarnation, serial), memory)

    def of(self, rank: int, incarnation: int, serial: int) -> Array:
        """The bytes of a slot of worker `rank`."""
        key = (rank, incarnation, serial)
        if (known := self._mapped.get(key)) is not None:
            return known
        for old in [k for k in self._mapped if k[0] == rank and (k[1] != incarnation or k[2] < serial - 1)]:
            del self._mapped[old]  # the mapping ends with the last array that points into it
        with self._path(*key).open("r+b") as file:
            return self._keep(key, mmap.mmap(file.fileno(), 0))

    def forget(self, serial: int) -> None:
        """A slot of this worker that nobody will look for any more."""
        with suppress(FileNotFoundError):
            self._path(self._rank, self._incarnation, serial).unlink()
        self._mapped.pop((self._rank, self._incarnation, serial), None)

    def close(self) -> None:
        """Remove this worker's slots. Those who have mapped one keep it."""
        self._mapped.clear()

    def _keep(self, key: tuple[int, int, int], memory: mmap.mmap) -> Array:
        self._mapped[key] = array = np.frombuffer(memory, np.uint8)
        return array

    def _path(self, rank: int, incarnation: int, serial: int) -> Path:
        return self._folder / f"{self._name}.{rank}.{incarnation}.{serial}"
