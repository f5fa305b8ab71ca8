"""Limits that are learned from recent values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.outliers import learned_limit

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(VALUES)
def test_the_limit_is_the_median_and_k_times_the_mad(values):
    median = float(np.median(values))
    mad = max(float(np.median(np.abs(np.array(values) - median))), median / 10)
    assert learned_limit(np.array(values), 3.0) == pytest.approx((median + 3 * mad, median))


@given(st.lists(st.floats(1, 2), min_size=5, max_size=40), st.floats(0, 1e30))
def test_fewer_than_half_of_the_values_cannot_move_the_limit_out_of_the_range_of_the_others(values, outlier):
    few = [outlier] * ((len(values) - 1) // 2)
    limit, median = learned_limit(np.array(values + few), 6.0)
    assert 1 <= median <= 2
    assert limit <= 2 + 6 * 1


def test_equal_values_leave_room_for_slightly_larger_ones():
    limit, median = learned_limit(np.full(64, 2.0), 6.0)
    assert median == 2
    assert limit == pytest.approx(2 + 6 * 0.2)


def test_values_of_zero_give_a_limit_of_zero():
    assert learned_limit(np.zeros(5), 6.0) == (0, 0)
