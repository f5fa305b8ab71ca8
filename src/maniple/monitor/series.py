"""Series of bounded size: values over time, and what a worker's time was spent on.

The range of x is divided into `limit` buckets of equal width. When there are four times as many points as buckets, each
bucket keeps its lowest and its highest point, so that peaks stay visible however long a run becomes.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maniple.record import Row
from maniple.record.rows import METADATA_KEYS, NON_FINITE
from maniple.record.times import PARTS


class Series:
    """Points in the order of x; only a clock that was set back breaks the order.

    Attributes:
        generation: number of times that points were dropped. While it stays, points are only appended.
    """

    def __init__(self, limit: int = 500) -> None:
        self.xs, self.ys = array("d"), array("d")
        self.generation = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self.xs)

    def add(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> None:
        """Append points. Both are converted first, so that an error leaves the series as it was."""
        new_xs, new_ys = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
        self.xs.frombytes(new_xs.tobytes())
        self.ys.frombytes(new_ys.tobytes())
        if len(self.xs) > 4 * self._limit:
            self._thin()

    def points(self, first: int = 0) -> tuple[list[float], list[float]]:
        """The points from index `first` on."""
        return self.xs[first:].tolist(), self.ys[first:].tolist()

    def _thin(self) -> None:
        x, y = np.array(self.xs), np.array(self.ys)
        kept = extremes(x, y, self._limit)
        self.xs, self.ys = array("d", x[kept].tobytes()), array("d", y[kept].tobytes())
        self.generation += 1


def extremes(x: np.ndarray, y: np.ndarray, buckets: int) -> np.ndarray:
    """Sorted indices of the lowest and highest `y` of each bucket, and of the first and last point."""
    width = (x.max() - x.min()) / buckets
    bucket = np.zeros(len(x)) if width <= 0 else np.minimum(buckets - 1, (x - x.min()) // width)
    order = np.lexsort((y, bucket))
    edges = np.flatnonzero(np.diff(bucket[order])) + 1
    lowest, highest = order[np.r_[0, edges]], order[np.r_[edges - 1, len(x) - 1]]
    return np.unique(np.r_[0, lowest, highest, len(x) - 1])


class TimeSplit:
    """What one worker's time was spent on, in intervals. The worker was absent at times that no interval covers.

    When there are too many, neighbours are merged, so that a long run has longer intervals.

    Attributes:
        intervals: an array with a row for each: begin, end, then the seconds of each of PARTS.
        generation: number of times that intervals were merged. While it stays, intervals are only appended.
    """

    def __init__(self, limit: int) -> None:
        self.intervals: np.ndarray[Any, Any] = np.empty((0, 2 + len(PARTS)))
        self.generation = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self.intervals)

    def add(self, intervals: np.ndarray) -> None:
        """Append intervals."""
        all_ = np.concatenate([self.intervals, intervals])
        while len(all_) > 2 * self._limit:
            first, second = all_[: len(all_) // 2 * 2 : 2], all_[1::2]
            joined = np.column_stack([first[:, 0], second[:, 1], first[:, 2:] + second[:, 2:]])
            all_ = np.concatenate([joined, all_[len(joined) * 2 :]])
            self.generation += 1
        self.intervals = all_


CENTER = -1  # in place of a rank: values of the shared parameters
_MAX_NAMES = 100  # a script that makes up names must not fill the memory of its viewers
_NUMBERS = {int, float}
_LARGEST = sys.float_info.max  # JSON allows larger integers


class NamedSeries:
    """Named series, one for each worker.

    Args:
        limits: limits of single names that differ from `limit`.

    Attributes:
        named: by name and rank; the rank is CENTER for values of the shared parameters.
        non_finite: the number of values of each name that were not finite.
    """

    def __init__(self, limit: int, limits: Mapping[str, int] | None = None) -> None:
        self.named: dict[str, dict[int, Series]] = {}
        self.non_finite: dict[str, int] = {}
        self._limit, self._limits = limit, dict(limits or {})

    def keep_fine(self, name: str, limit: int) -> None:
        """Keep more points of `name`. Series that exist already keep their limit."""
        self._limits[name] = max(limit, self._limits.get(name, 0))

    def add_rows(self, rank: int, rows: Iterable[Row]) -> None:
        """Append all numbers of some rows of one worker; strings and lists are skipped."""
        found: dict[tuple[str, int], list[tuple[list[float], list[float]]]] = {}
        for (is_center, names), alike in _grouped(rows).items():
            who = CENTER if is_center else rank
            times = [row["timestamp"] for row in alike]
            for name in names:
                if name not in METADATA_KEYS:
                    points = self._numbers(name, times, [row[name] for row in alike])
                    found.setdefault((name, who), []).append(points)
        for (name, who), pieces in found.items():
            xs, ys = pieces[0] if len(pieces) == 1 else _merged(pieces)
            if xs:
                self.add(name, who, xs, ys)

    def _numbers(self, name: str, times: list[float], values: list[Any]) -> tuple[list[float], list[float]]:
        """The finite numbers among `values`, with their times; others are counted."""
        if set(map(type, values)) <= _NUMBERS and max(map(abs, values)) <= _LARGEST:
            return times, values
        if non_finite := sum(isinstance(y, str) and y in NON_FINITE for y in values):
            self.non_finite[name] = self.non_finite.get(name, 0) + non_finite
        known = [(x, y) for x, y in zip(times, values, strict=True) if type(y) in _NUMBERS and abs(y) <= _LARGEST]
        return [x for x, _ in known], [y for _, y in known]

    def add(self, name: str, rank: int, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> None:
        """Append points of one series."""
        if name in self.named or name in self._limits or len(self.named) < _MAX_NAMES:
            ranks = self.named.setdefault(name, {})
            if rank not in ranks:
                ranks[rank] = Series(self._limits.get(name, self._limit))
            ranks[rank].add(xs, ys)


def _grouped(rows: Iterable[Row]) -> dict[tuple[bool, tuple[str, ...]], list[Row]]:
    """The rows by their keys and whether they are about the center: scripts log the same few names repeatedly."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((bool(row.get("center")), tuple(row)), []).append(row)
    return groups


def _merged(pieces: list[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The points of several groups of rows, ordered by time."""
    points = sorted((x, y) for xs, ys in pieces for x, y in zip(xs, ys, strict=True))
    return [x for x, _ in points], [y for _, y in points]
