"""A curve of bounded size: of many points, the lowest and the highest of each stretch are kept.

The range of x is cut into `limit` buckets of equal width. When there are four times as many points as buckets, each
bucket keeps its lowest and its highest point: peaks stay visible however long a run becomes.
"""

from array import array
from collections.abc import Sequence

import numpy as np


class Series:
    """Points whose x (almost) never goes back.

    Attributes:
        xs, ys: the points.
        epoch: how often points were dropped; as long as it stays, points are only added at the end.
    """

    def __init__(self, limit: int = 500) -> None:
        self.xs, self.ys = array("d"), array("d")
        self.epoch = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self.xs)

    def add(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> None:
        """More points, as many as there are of each."""
        new_xs, new_ys = np.asarray(xs, np.float64), np.asarray(ys, np.float64)  # or nothing, if one of them cannot be
        self.xs.frombytes(new_xs.tobytes())
        self.ys.frombytes(new_ys.tobytes())
        if len(self.xs) > 4 * self._limit:
            self._shorten()

    def points(self, first: int = 0) -> tuple[list[float], list[float]]:
        """All points from number `first` on."""
        return self.xs[first:].tolist(), self.ys[first:].tolist()

    def _shorten(self) -> None:
        x, y = np.array(self.xs), np.array(self.ys)
        kept = extremes(x, y, self._limit)
        self.xs, self.ys = array("d", x[kept].tobytes()), array("d", y[kept].tobytes())
        self.epoch += 1


def extremes(x: np.ndarray, y: np.ndarray, buckets: int) -> np.ndarray:
    """Where in `x` the lowest and highest `y` of each bucket are, and the first and the last point: sorted."""
    width = (x.max() - x.min()) / buckets
    bucket = np.zeros(len(x)) if width <= 0 else np.minimum(buckets - 1, (x - x.min()) // width)
    order = np.lexsort((y, bucket))
    edges = np.flatnonzero(np.diff(bucket[order])) + 1
    lowest, highest = order[np.r_[0, edges]], order[np.r_[edges - 1, len(x) - 1]]
    return np.unique(np.r_[0, lowest, highest, len(x) - 1])
