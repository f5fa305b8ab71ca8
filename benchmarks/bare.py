"""The least that synchronous training can cost on one machine: a sum of flat gradients in shared memory, by hand.

Two processes, a buffer for each in one mapped file, a count for each to wait for; awake all the time, no check of
anything, no thought of deaths. What it costs against unsynchronised processes is the price of being synchronous here.
"""

import mmap
import os
import time
from typing import Any

import numpy as np

_COUNTS = 512  # words at the beginning of the file; those of the two lie on cache lines of their own
_DEADLINE_S = 120.0


class Bare:
    """The gradients of one of two processes."""

    def __init__(self, path: str, rank: int, parameters: list[Any]) -> None:
        import torch

        self._parameters, self._meetings = parameters, 0
        size = sum(p.numel() for p in parameters)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, 8 * _COUNTS + 2 * 4 * size)
        memory = mmap.mmap(file, 0)
        os.close(file)
        counts = np.frombuffer(memory, np.int64, _COUNTS)
        self._own, self._other = counts[64 * rank :], counts[64 * (1 - rank) :]
        flat = torch.from_numpy(np.frombuffer(memory, np.float32, 2 * size, 8 * _COUNTS)).view(2, size)
        half = slice(0, size // 2) if rank == 0 else slice(size // 2, size)
        self._parts = flat[rank, half], flat[1 - rank, half]
        ends = np.cumsum([p.numel() for p in parameters]).tolist()
        self._views = [flat[rank, end - p.numel() : end].view_as(p) for p, end in zip(parameters, ends, strict=True)]

    def average(self) -> None:
        """Set the gradients of both to their mean."""
        import torch

        with torch.no_grad():
            torch._foreach_copy_(self._views, [p.grad for p in self._parameters])
            self._meet()
            mine, other = self._parts
            mine.add_(other).mul_(0.5)
            other.copy_(mine)
            self._meet()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _meet(self) -> None:
        self._meetings += 1
        self._own[0] = self._meetings
        end = time.monotonic() + _DEADLINE_S
        while self._other[0] < self._meetings:
            if time.monotonic() > end:
                raise TimeoutError(f"the other process has not come within {_DEADLINE_S} s")
