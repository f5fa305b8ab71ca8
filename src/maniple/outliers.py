"""Limits that are learned from recent values: the median plus k times the median absolute deviation (MAD).

    limit = median(v) + k max(MAD, median(v) / 10),    MAD = median(|v - median(v)|)

Up to half of the values may be outliers without moving the limit far, which a mean and a standard deviation do not
allow. The MAD counts as at least a tenth of the median: of values that are all equal it is 0, and any other value would
be beyond the limit.

Leys et al.: Detecting outliers: do not use standard deviation around the mean, use absolute deviation around the
median, 2013.
"""

from typing import Any

import numpy as np

from maniple.contracts import Array

_LEAST_MAD = 0.1  # of the median


def learned_limit(values: Array, k: float) -> tuple[float, float]:
    """The limit for the next value, and the median; there is at least one value, and none is negative."""
    # Not np.median, which takes ten times as long for a few values.
    ordered = np.sort(values)
    median = _middle(ordered)
    mad = _middle(np.sort(np.abs(ordered - median)))
    return median + k * max(mad, _LEAST_MAD * median), median


def _middle(ordered: Array) -> float:
    last = ordered.size - 1
    total: Any = ordered[last // 2] + ordered[(last + 1) // 2]
    return float(total) / 2
