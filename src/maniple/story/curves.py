"""Curves: every number that was logged or measured, against the clock, for each worker and for the center."""

import math
from collections.abc import Iterable
from typing import Any

from maniple.record import Row
from maniple.story.series import Series

CENTER = -1  # stands for the shared parameters where else the rank of a worker stands
_ABOUT = {"event", "timestamp", "datestamp", "worker", "step", "center", "dropped"}
_MOST_NAMES = 100
_BROKEN = {"nan", "inf", "-inf"}  # as a worker writes what JSON has no number for


class Curves:
    """Named curves, one for each worker that has told of it.

    Attributes:
        named: by name and rank; the rank is CENTER for what was said of the shared parameters.
        broken: how many values of each name were no finite numbers.
    """

    def __init__(self, limit: int) -> None:
        self.named: dict[str, dict[int, Series]] = {}
        self.broken: dict[str, int] = {}
        self._limit = limit

    def note(self, rank: int, rows: Iterable[Row]) -> None:
        """All numbers of some rows of one worker; words and lists are none."""
        found: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
        for row in rows:
            x, who = row["timestamp"], CENTER if "center" in row else rank
            for name, value in row.items():
                if name in _ABOUT:
                    continue
                kind = type(value)
                if kind is int or (kind is float and math.isfinite(value)):
                    points = found.get((name, who))
                    if points is None:
                        points = found[name, who] = ([], [])
                    points[0].append(x)
                    points[1].append(value)
                elif kind is str and value in _BROKEN:
                    self.broken[name] = self.broken.get(name, 0) + 1
        for (name, who), (xs, ys) in found.items():
            self.add(name, who, xs, ys)

    def add(self, name: str, rank: int, xs: Iterable[float], ys: Iterable[Any]) -> None:
        """More points of one curve."""
        if name in self.named or len(self.named) < _MOST_NAMES:
            ranks = self.named.setdefault(name, {})
            if rank not in ranks:
                ranks[rank] = Series(self._limit)
            ranks[rank].add(xs, ys)
