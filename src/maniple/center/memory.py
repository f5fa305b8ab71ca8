"""The file of a center in shared memory.

offset 0     header     magic, state, bytes of the table, parameters
64           note       of its creator
4096         table      names, shapes, dtypes (JSON), by which a joiner is checked
...          versions   one per parameter; odd while somebody writes
             holders    rank + 1 of the last who locked it
...          one flat vector per dtype
"""

import mmap
import os
from pathlib import Path

import numpy as np

from maniple.contracts import Array, Entry, Model
from maniple.errors import InvalidArgument, SharedMemoryFull
from maniple.layout import Layout

_MAGIC = 0x31454C50494E414D  # "MANIPLE1"
_READY = 1
_PAGE = 4096
_NOTE = 64


class Memory:
    """A mapping of the file. It ends with the last array that points into it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = memory = mmap.mmap(file.fileno(), 0)
        header = np.frombuffer(memory, np.int64, 4)
        count = int(header[3])
        self.layout = Layout.from_table(memory[_PAGE : _PAGE + int(header[2])])
        offsets, _ = _offsets(self.layout)
        counters = memoryview(memory)[offsets["counters"] :]
        self.versions = counters[: 8 * count].cast("q")
        self.holders = counters[8 * count : 16 * count].cast("q")
        self.arrays = self.layout.views(_vectors(self.layout, memory, offsets))

    @staticmethod
    def is_ready(path: Path) -> bool:
        """Its creator has finished it."""
        with path.open("rb") as file:
            head = np.frombuffer(file.read(16), np.int64)
        return len(head) == 2 and head[0] == _MAGIC and head[1] == _READY

    @staticmethod
    def create(path: Path, layout: Layout, model: Model, note: str) -> None:
        """Fill the file, which is there and locked by its creator, with the values of `model`."""
        offsets, size = _offsets(layout)
        with path.open("r+b") as file:
            file.truncate(0)  # what a creator who failed has left
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                file.truncate(0)
                space = os.statvfs(path.parent)
                raise SharedMemoryFull(
                    f"the center needs {_megabytes(size)} in {path.parent.parent}, which has "
                    f"{_megabytes(space.f_bavail * space.f_frsize)} free ({error.strerror}). Enlarge it "
                    "(`mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`), remove what fills it, "
                    "or set MANIPLE_SHM to another folder that is held in memory."
                ) from error
            memory = mmap.mmap(file.fileno(), size)
        memory[_PAGE : _PAGE + len(layout.table)] = layout.table
        header = np.frombuffer(memory, np.int64, 4)
        header[2:] = len(layout.table), len(layout.entries)
        text = note.encode()[: _PAGE - _NOTE - 8]
        memory[_NOTE : _NOTE + 8 + len(text)] = len(text).to_bytes(8, "little") + text
        model.begin()
        views = layout.views(_vectors(layout, memory, offsets))
        for i, (entry, place) in enumerate(zip(layout.entries, views, strict=True)):
            value = model.array(i)
            require_finite(entry, value)
            place[:] = value
        header[:2] = _MAGIC, _READY

    @property
    def note(self) -> str:
        """What the creator noted."""
        size = int.from_bytes(self._memory[_NOTE : _NOTE + 8], "little")
        return self._memory[_NOTE + 8 : _NOTE + 8 + size].decode(errors="replace")

    def release(self) -> None:
        """Let this process' view of the pages go; they stay in shared memory and come back when touched."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def file_bytes(layout: Layout) -> int:
    """The size of the file of a center with these parameters."""
    return _offsets(layout)[1]


def require_finite(entry: Entry, value: Array) -> None:
    """Raise InvalidArgument if a model with this value cannot become the center."""
    if value.dtype.kind in "fc" and not np.isfinite(value).all():
        raise InvalidArgument(
            f"parameter {entry.name!r} holds values that are not finite, so it cannot become the center. "
            "Look at the model's initialisation."
        )


def _offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """Where the parts of the file begin, and its size."""
    offsets: dict[str, int] = {}
    end = _PAGE + _whole_pages(len(layout.table))
    offsets["counters"] = end
    end += _whole_pages(16 * len(layout.entries))
    for dtype, size in layout.sizes.items():
        offsets[dtype] = end
        end += _whole_pages(np.dtype(dtype).itemsize * size)
    return offsets, end


def _vectors(layout: Layout, memory: mmap.mmap, offsets: dict[str, int]) -> dict[str, Array]:
    return {dtype: np.frombuffer(memory, dtype, size, offsets[dtype]) for dtype, size in layout.sizes.items()}


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
