"""Chunks of a model: gathered from its entries and scattered back, and nothing is lost when a pass is cut short."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.adapters import adapt
from maniple.center.chunked_model import ChunkedModel, chunks_of
from maniple.layout import Layout

SIZES = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["float16", "float32", "float64"])), min_size=1, max_size=8
)


def some(sizes: list[tuple[int, str]]) -> dict[str, np.ndarray]:
    return {f"p{i}": np.arange(size).astype(dtype) for i, (size, dtype) in enumerate(sizes)}


@given(SIZES, st.sampled_from([0, 16, 64, 1 << 20]))
def test_pass_over_the_chunks_reaches_every_element_once(sizes, chunk_bytes):
    params = some(sizes)
    model = adapt(params)
    layout = Layout(model.entries, chunk_bytes=chunk_bytes)
    chunks = ChunkedModel(model, layout)
    for _ in range(2):
        chunks.begin()
        for k in reversed(range(len(layout.chunks))):
            chunks.array(k)[:] += 1
            assert chunks.array(k) is not None, "asked for again before it is committed"
            chunks.commit(k)
        chunks.end()
    for (size, _), value in zip(sizes, params.values(), strict=True):
        np.testing.assert_array_equal(value, np.arange(size) + 2)


@given(SIZES, st.sampled_from([0, 16, 64, 1 << 20]))
def test_pieces_are_the_model_s_own_memory_where_the_dtype_allows_it(sizes, chunk_bytes):
    params = some(sizes)
    model = adapt(params)
    layout = Layout(model.entries, chunk_bytes=chunk_bytes)
    chunks = ChunkedModel(model, layout)
    chunks.begin()
    for k, chunk in enumerate(layout.chunks):
        reached = np.zeros(chunk.size)
        for where, x in chunks.pieces(k):
            x += 1
            reached[where] += 1
            assert x.size == 0 or any(np.shares_memory(x, one) for one in params.values()) or k in layout.half_chunks
        assert (reached == 1).all()
        chunks.commit(k)
    chunks.end()
    for (size, _), value in zip(sizes, params.values(), strict=True):
        np.testing.assert_array_equal(value, np.arange(size) + 1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_chunks_that_were_committed_before_a_pass_was_cut_short_count(dtype):
    """The entry of half precision is a copy, which is written back as a whole."""
    params = {"w": np.zeros(20, dtype)}
    model = adapt(params)
    chunks = ChunkedModel(model, Layout(model.entries, chunk_bytes=32))
    chunks.begin()
    chunks.array(0)[:] = 1
    chunks.commit(0)
    chunks.end()
    assert params["w"].tolist() == [1] * 8 + [0] * 12


def test_pass_within_a_pass_keeps_what_was_committed():
    """As when the connection breaks in the middle of an exchange, and lost replies are handled before it continues."""
    params = {"w": np.zeros(20, "float16")}
    model = adapt(params)
    chunks = ChunkedModel(model, Layout(model.entries, chunk_bytes=32))
    chunks.begin()
    chunks.array(0)[:] = 1
    chunks.array(1)
    chunks.commit(0)
    chunks.begin()
    chunks.array(1)[:] = 2
    chunks.commit(1)
    chunks.end()
    chunks.array(2)[:] = 3
    chunks.commit(2)
    chunks.end()
    assert params["w"].tolist() == [1] * 8 + [2] * 8 + [3] * 4


def test_values_of_one_pass_are_not_used_in_the_next():
    params = {"a": np.zeros(2, "float32"), "b": np.zeros(2, "float32")}
    model = adapt(params)
    chunks = ChunkedModel(model, Layout(model.entries))
    chunks.begin()
    chunks.array(0)[:] = 9  # gathered, and given up
    params["b"][:] = 5
    chunks.begin()
    assert chunks.array(0).tolist() == [0, 0, 5, 5]


def test_chunks_of_a_model_are_kept_for_the_next_exchange():
    model = adapt({"a": np.zeros(2)})
    layout = Layout(model.entries)
    first = chunks_of(model, layout, None)
    assert chunks_of(model, layout, first) is first
    assert chunks_of(adapt({"a": np.zeros(2)}), layout, first) is not first
