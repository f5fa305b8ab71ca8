"""Lanes: what each worker's time was spent for, stretch by stretch, in bounded memory."""

from typing import Any

import numpy as np

from maniple.record.times import PARTS


class Lane:
    """The stretches of one worker's time. What no stretch covers, the worker was not there.

    When there are too many, neighbours become one, so that a long run has longer stretches.

    Attributes:
        stretches: a row for each: begin, end, then the seconds of each of PARTS.
        epoch: how often neighbours have become one; as long as it stays, stretches are only added at the end.
    """

    def __init__(self, limit: int) -> None:
        self.stretches: np.ndarray[Any, Any] = np.empty((0, 2 + len(PARTS)))
        self.epoch = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self.stretches)

    def add(self, stretches: np.ndarray) -> None:
        """More of them."""
        all_ = np.concatenate([self.stretches, stretches])
        while len(all_) > 2 * self._limit:
            first, second = all_[: len(all_) // 2 * 2 : 2], all_[1::2]
            joined = np.column_stack([first[:, 0], second[:, 1], first[:, 2:] + second[:, 2:]])
            all_ = np.concatenate([joined, all_[len(joined) * 2 :]])
            self.epoch += 1
        self.stretches = all_
