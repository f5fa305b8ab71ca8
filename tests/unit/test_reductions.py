"""Sums over workers: what they are, and that the compiled ones are the same to the bit."""

import itertools
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maniple.collectives import reductions as sums

FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
SIZES = st.sampled_from([0, 1, 2, 15, 16, 17, 1000, 70_000])


def values(count: int, size: int, dtype: str) -> list[np.ndarray]:
    dice = np.random.default_rng(size + count)
    return [(dice.normal(size=size) * 3 + 1).astype(dtype) for _ in range(count)]


@given(
    op=st.sampled_from(list(FOLDS)),
    count=st.integers(1, 5),
    size=SIZES,
    dtype=st.sampled_from(["float32", "float64", "int32", "int64"]),
    alias=st.integers(-1, 4),
)
@settings(max_examples=120, deadline=None)
def test_sum_is_that_of_all_also_in_the_place_of_one_of_them(op: str, count: int, size: int, dtype: str, alias: int):
    if op == "mean" and dtype.startswith("int"):
        return
    pieces = values(count, size, dtype)
    expected = reduce(FOLDS[op], [piece.copy() for piece in pieces])
    expected = expected / np.dtype(dtype).type(count) if op == "mean" else expected
    out = pieces[alias] if 0 <= alias < count else np.empty(size, dtype)
    others = [piece.copy() for i, piece in enumerate(pieces) if piece is not out]
    sums.combine(op, pieces, [1.0] * count, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(others, (p for p in pieces if p is not out), strict=True))


@given(weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.5]), min_size=1, max_size=4), size=SIZES)
@settings(max_examples=60, deadline=None)
def test_mean_counts_weights_and_leaves_out_what_has_none(weights: list[float], size: int):
    if not sum(weights):
        return
    pieces = values(len(weights), size, "float64")
    expected = sum(w * p for w, p in zip(weights, pieces, strict=True)) / sum(weights)
    for piece, weight in zip(pieces, weights, strict=True):
        if not weight:
            piece[:] = np.nan
    out = np.empty(size)
    sums.combine("mean", pieces, weights, out)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@given(size=st.integers(0, 10_000), parts=st.integers(1, 9))
def test_parts_cover_all_and_none_twice(size: int, parts: int):
    bounds = sums.bounds(size, parts)
    assert len(bounds) == parts and bounds[0][0] == 0 and bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(low % 16 == 0 or low == size for low, _ in bounds)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.0, 1.0), (2.0, 5.0, 1.0, 0.0), (3.0,)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_sums_are_the_same_to_the_bit(op: str, weights: tuple[float, ...], dtype: str):
    pytest.importorskip("numba")
    results = []
    for is_compiled in (False, True):
        vectors, block, progress = values(len(weights), 5000, dtype), np.zeros(512, dtype), np.zeros(1, np.int64)
        sums.SlicePart(vectors, (16, 4999), block, progress, is_compiled=is_compiled).combine(op, weights)
        assert progress[0] == 2 * 10
        results.append([vector.tobytes() for vector in vectors])
    assert results[0] == results[1]
    first, *others = (np.frombuffer(one, dtype)[16:4999].tobytes() for one in results[0])
    assert all(other == first for other in others)
