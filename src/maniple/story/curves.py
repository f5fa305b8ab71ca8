"""Curves: every number that was logged or measured, against the clock, for each worker and for the center."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maniple.record import Row
from maniple.story.series import Series

CENTER = -1  # stands for the shared parameters where else the rank of a worker stands
# What a row says beside its values.
ABOUT = {"event", "timestamp", "datestamp", "worker", "step", "center", "dropped"}
_MOST_NAMES = 100
_NUMBERS = {int, float}
_LARGEST = sys.float_info.max  # JSON knows larger ones
BROKEN = {"nan", "inf", "-inf"}  # as a worker writes what JSON has no number for


class Curves:
    """Named curves, one for each worker that has told of it.

    Attributes:
        named: by name and rank; the rank is CENTER for what was said of the shared parameters.
        broken: how many values of each name were no finite numbers.

    `limits` gives some names a limit of their own.
    """

    def __init__(self, limit: int, limits: Mapping[str, int] | None = None) -> None:
        self.named: dict[str, dict[int, Series]] = {}
        self.broken: dict[str, int] = {}
        self._limit, self._limits = limit, dict(limits or {})

    def note(self, rank: int, rows: Iterable[Row]) -> None:
        """All numbers of some rows of one worker; words and lists are none."""
        found: dict[tuple[str, int], list[tuple[list[float], list[float]]]] = {}
        for (is_center, names), alike in _alike(rows).items():
            who = CENTER if is_center else rank
            times = [row["timestamp"] for row in alike]
            for name in names:
                if name not in ABOUT:
                    points = self._numbers(name, times, [row[name] for row in alike])
                    found.setdefault((name, who), []).append(points)
        for (name, who), pieces in found.items():
            xs, ys = pieces[0] if len(pieces) == 1 else _merged(pieces)
            if xs:
                self.add(name, who, xs, ys)

    def _numbers(self, name: str, times: list[float], values: list[Any]) -> tuple[list[float], list[float]]:
        """Those of `values` that are finite numbers, with their times; the others are counted."""
        if set(map(type, values)) <= _NUMBERS and max(map(abs, values)) <= _LARGEST:
            return times, values
        if broken := sum(isinstance(y, str) and y in BROKEN for y in values):
            self.broken[name] = self.broken.get(name, 0) + broken
        known = [(x, y) for x, y in zip(times, values, strict=True) if type(y) in _NUMBERS and abs(y) <= _LARGEST]
        return [x for x, _ in known], [y for _, y in known]

    def add(self, name: str, rank: int, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> None:
        """More points of one curve."""
        if name in self.named or name in self._limits or len(self.named) < _MOST_NAMES:
            ranks = self.named.setdefault(name, {})
            if rank not in ranks:
                ranks[rank] = Series(self._limits.get(name, self._limit))
            ranks[rank].add(xs, ys)


def _alike(rows: Iterable[Row]) -> dict[tuple[bool, tuple[str, ...]], list[Row]]:
    """The rows by what they tell, and whether of the center: a script logs the same few names again and again."""
    groups: dict[tuple[bool, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((bool(row.get("center")), tuple(row)), []).append(row)
    return groups


def _merged(pieces: list[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The points of several groups of rows, in the order of time."""
    points = sorted((x, y) for xs, ys in pieces for x, y in zip(xs, ys, strict=True))
    return [x for x, _ in points], [y for _, y in points]
