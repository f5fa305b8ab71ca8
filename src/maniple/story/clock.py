"""One clock for all workers: how many samples all of them together had seen at any moment."""

from collections.abc import Iterable

import numpy as np

from maniple.story.series import Series


def samples_at(moments: np.ndarray, seen: Iterable[Series]) -> np.ndarray:
    """The samples of all workers at each of `moments`; `seen` are each worker's own against time, from 0 on."""
    total = np.zeros(len(moments))
    for series in seen:
        if len(series):
            total += np.interp(moments, np.array(series.xs), np.maximum.accumulate(np.array(series.ys)))
    return total
