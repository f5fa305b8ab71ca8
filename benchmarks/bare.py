"""A lower bound for synchronous training on one machine: a hand-written sum of flat gradients in shared memory.

Two processes map one file with a buffer and a counter for each. They spin all the time, check nothing and do not
tolerate a death. The difference to unsynchronised processes is the cost of synchronisation itself on the machine.
"""

import mmap
import os
import time
from typing import Any

import numpy as np

_COUNTS = 512  # words at the start of the file; the two counters are on separate cache lines
_DEADLINE_S = 120.0


class Bare:
    """Averages the gradients of one of two processes with those of the other."""

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
        """Set the gradients of both processes to their mean."""
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
