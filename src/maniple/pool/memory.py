"""Memory: a file in shared memory that grows, mapped by the process that owns it and by those that look at it."""

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from maniple.center.segment import refusal
from maniple.contracts import Array

_LEAST = 1 << 16
_MORE = 1.25  # than was asked for: what grows once often grows again


class Memory:
    """The bytes of one file. Arrays that were made over them before they grew stay valid, and the same bytes."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self._path = path
        self._capacity = 0
        self._mapped = np.empty(0, np.uint8)
        if is_new:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    @property
    def capacity(self) -> int:
        """The bytes that are there without growing."""
        return self._capacity

    def reserve(self, size: int) -> None:
        """Be of so many bytes at least; what is there stays. Only for the owner."""
        if size <= self._capacity:
            return
        capacity = max(_LEAST, size if not self._capacity else int(size * _MORE))
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, capacity)
        except OSError as error:
            os.ftruncate(file, self._capacity)
            raise refusal(self._path.parent.parent, error) from error
        finally:
            os.close(file)
        self._map()

    def view(self, dtype: str | np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
        """An array over the bytes; maps what another process has added."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if not size:
            return np.empty(shape, dtype)
        if offset + size > self._capacity:
            self._map()
        return self._mapped[offset : offset + size].view(dtype).reshape(shape)

    def remove(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more."""
        self._path.unlink(missing_ok=True)
        self._mapped, self._capacity = np.empty(0, np.uint8), 0

    def _map(self) -> None:
        with self._path.open("r+b") as file:
            self._mapped = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self._capacity = self._mapped.size
