"""The layout: places in the flat vectors, and how a difference between two workers is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.contracts import NO_STATE, Entry, StateNames
from maniple.errors import InvalidArgument, LayoutMismatch
from maniple.layout import Layout, RuleState, check_state_names

DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "float64"])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ENTRIES = st.lists(
    st.builds(Entry, st.text("abü.'\"", max_size=4), SHAPES, DTYPES), min_size=1, max_size=8, unique_by=lambda e: e.name
)

RESERVED = "__metadata__"
LARGE = 10**5000  # more digits than Python writes down
W = Entry("w", (2, 3), "float32")
B = Entry("b", (3,), "float32")
S = Entry("s", (1,), "float64")


def test_entries_lie_one_after_the_other_in_the_vector_of_their_dtype():
    layout = Layout([W, S, B])
    assert layout.places == [("float32", 0, 6), ("float64", 0, 1), ("float32", 6, 9)]
    assert layout.sizes == {"float32": 9, "float64": 1}
    assert layout.size_bytes == 44


def test_half_precision_is_kept_as_float32():
    layout = Layout([Entry("a", (2,), "float16"), Entry("b", (3,), "bfloat16")])
    assert layout.sizes == {"float32": 5}


@given(ENTRIES)
def test_views_cover_the_vectors_without_overlap(entries):
    layout = Layout(entries)
    flat = layout.allocate()
    for i, (view, entry) in enumerate(zip(layout.views(flat), entries, strict=True)):
        assert view.size == entry.size == int(np.prod(entry.shape))
        view += i + 1
    total = sum(float(vector.sum()) for vector in flat.values())
    assert total == sum((i + 1) * entry.size for i, entry in enumerate(entries))
    assert sum(layout.sizes.values()) == sum(entry.size for entry in entries)  # no holes
    assert layout.size_bytes == sum(vector.nbytes for vector in flat.values())


def test_scalar_has_one_place_and_an_empty_array_none():
    layout = Layout([Entry("empty", (0, 3), "float32"), Entry("scalar", (), "float32"), Entry("none", (0,), "float64")])
    assert [view.size for view in layout.views(layout.allocate())] == [0, 1, 0]


@given(ENTRIES)
def test_table_makes_the_same_layout_in_another_process(entries):
    layout = Layout(entries)
    again = Layout.from_table(layout.table)
    assert again.entries == layout.entries
    assert again.digest == layout.digest
    assert again.places == layout.places
    layout.require(again, "the center")


@given(ENTRIES, ENTRIES)
def test_digests_are_equal_exactly_when_entries_are(mine, theirs):
    assert (Layout(mine).digest == Layout(theirs).digest) == (mine == theirs)
    if mine != theirs:
        with pytest.raises(LayoutMismatch):
            Layout(mine).require(Layout(theirs), "the center")


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ([W], [W, B], "parameter 1 is nothing, but the center has 'b' float32[3] there"),
        ([W, B, S], [W, B], "parameter 2 is 's' float64[1], but the center has nothing there"),
        (
            [W, Entry("bias", (3,), "float32")],
            [W, B],
            "parameter 1 is 'bias' float32[3], but the center has 'b' float32[3]",
        ),
        (
            [Entry("w", (3, 2), "float32"), B],
            [W, B],
            "parameter 0 is 'w' float32[3, 2], but the center has 'w' float32[2, 3]",
        ),
        ([W, Entry("b", (3,), "float64")], [W, B], "parameter 1 is 'b' float64[3], but the center has 'b' float32[3]"),
        ([W, Entry("b", (3,), "float16")], [W, B], "parameter 1 is 'b' float16[3], but the center has 'b' float32[3]"),
        ([B, W], [W, B], "parameter 0 is 'b' float32[3], but the center has 'w' float32[2, 3]"),
    ],
    ids=["missing", "extra", "renamed", "reshaped", "other dtype", "half precision", "other order"],
)
def test_first_difference_is_named(mine, theirs, words):
    with pytest.raises(LayoutMismatch) as caught:
        Layout(mine).require(Layout(theirs), "the center")
    assert words in str(caught.value)


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(InvalidArgument, match="two arrays are named 'w'"):
        Layout([W, W])


def test_model_without_arrays_is_refused():
    with pytest.raises(InvalidArgument, match="no floating-point array"):
        Layout([])


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "float128", "<U3", ">f4"])
def test_dtype_that_cannot_be_averaged_is_refused_by_name(dtype):
    with pytest.raises(InvalidArgument, match=r"'counts' .*\[2\] cannot be shared"):
        Layout([W, Entry("counts", (2,), dtype)])


@pytest.mark.parametrize("name", ["nul\0x", "new\nline", "\x7f", "\x9b2J", "\u2028", "\ud800", "x" * 5000, RESERVED])
def test_name_that_files_and_terminals_would_take_for_something_else_is_refused(name):
    with pytest.raises(InvalidArgument, match=r"cannot name an array.*no control characters.*Rename it"):
        Layout([Entry(name, (2,), "float32")])


@pytest.mark.parametrize("shape", [(1,) * 33, (0, 10**30), (0, 1 << 40, 1 << 40), (-1,), (0, -1), (1 << 49,), (LARGE,)])
def test_shape_that_no_array_can_have_is_refused(shape):
    with pytest.raises(InvalidArgument, match=r"no shape of an array. It may have up to 32 axes.*Reshape it"):
        Layout([Entry("a", shape, "float32")])


@pytest.mark.parametrize("shape", [(1,) * 32, (0, 1 << 40), (), (0,) * 32])
def test_largest_shapes_are_shapes_of_arrays(shape):
    entry = Layout([Entry("a", shape, "float32")]).entries[0]
    assert np.empty(entry.size, "int8").reshape(shape).shape == shape


# Chunks

sizes_and_dtypes = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64", "bfloat16"])), min_size=1, max_size=12
)


@given(sizes_and_dtypes, st.sampled_from([0, 8, 32, 64, 1 << 20]))
def test_chunks_cover_every_element_once_and_never_mix_dtypes(shapes, chunk_bytes):
    entries = [Entry(f"e{i}", (size,), dtype) for i, (size, dtype) in enumerate(shapes)]
    layout = Layout(entries, chunk_bytes=chunk_bytes)
    reached, taken = dict.fromkeys(layout.sizes, 0), [0] * len(entries)
    for chunk in layout.chunks:
        assert chunk.start == reached[chunk.dtype], "chunks follow each other"
        assert chunk_bytes == 0 or chunk.size_bytes <= chunk_bytes
        reached[chunk.dtype], filled = chunk.stop, 0
        for part in chunk.parts:
            dtype, start, _ = layout.places[part.entry]
            assert (dtype, start + part.start) == (chunk.dtype, chunk.start + part.offset)
            assert (part.offset, part.start) == (filled, taken[part.entry]), "without a gap"
            filled, taken[part.entry] = filled + part.stop - part.start, part.stop
        assert filled == chunk.size
    assert (reached, taken) == (layout.sizes, [entry.size for entry in entries])


def test_small_entries_share_a_chunk_and_large_ones_have_several():
    sizes = {"a": 3, "b": 4, "c": 20, "d": 2}
    layout = Layout([Entry(name, (size,), "float32") for name, size in sizes.items()], chunk_bytes=32)
    assert [layout.names_in(k) for k in range(len(layout.chunks))] == [["a", "b"], ["c"], ["c"], ["c", "d"]]
    assert layout.names_at(0, np.array([2])) == ["a"]
    assert layout.names_at(0, np.array([3, 6])) == ["b"]
    assert layout.names_at(3, np.array([3, 4])) == ["c", "d"]


def test_named_array_is_one_chunk_whatever_its_size():
    assert len(Layout([Entry("a", (10_000_000,), "float32")], chunk_bytes=0).chunks) == 1


def test_rounding_a_chunk_changes_only_what_replicas_keep_in_half_precision():
    layout = Layout([Entry("a", (2,), "float32"), Entry("h", (2,), "float16")])
    value = np.full(4, 1 + 2**-20, "float32")
    layout.round_chunk(0, value)
    assert value.tolist() == [1 + 2**-20] * 2 + [1.0] * 2


def state_layout() -> Layout:
    entries = [Entry("w", (2, 3), "float32"), Entry("h", (5,), "float16"), Entry("s", (), "float64")]
    return Layout(entries, chunk_bytes=16, state=StateNames(("momentum", "slow"), ("count",)))


def test_state_of_a_rule_has_a_place_for_each_chunk_and_each_entry():
    layout = state_layout()
    state = RuleState.zeros(layout, layout.state)
    for number, (chunk, its) in enumerate(zip(layout.chunks, state.chunks, strict=True)):
        assert its["momentum"].shape == (chunk.size,) and its["count"].shape == (1,)
        its["slow"][:], its["count"][0] = number, number
    assert [its["slow"].size for its in state.entries] == [6, 5, 1]
    np.testing.assert_array_equal(state.scalars["count"], range(len(layout.chunks)))
    other = RuleState.zeros(layout, layout.state)
    other.load(state.arrays())
    for name, value in state.arrays().items():
        np.testing.assert_array_equal(other.arrays()[name], value)
    with pytest.raises(InvalidArgument, match="'momentum/float32' of the rule is missing, where 11 numbers are needed"):
        other.load({})


def test_record_of_a_chunk_holds_its_value_and_its_state():
    layout = state_layout()
    for k, chunk in enumerate(layout.chunks):
        value = np.arange(chunk.size).astype(chunk.dtype)
        its = {"count": np.array([7.0]), "slow": 3 * value, "momentum": 2 * value}
        record = layout.join_record(value, its)
        assert record.nbytes == layout.record_bytes(k)
        found, state = layout.split_record(k, record)
        np.testing.assert_array_equal(found, value)
        assert list(state) == ["momentum", "slow", "count"]
        for name in state:
            np.testing.assert_array_equal(state[name], its[name])


def test_table_carries_the_state_of_the_rule():
    layout = state_layout()
    again = Layout.from_table(layout.table)
    assert again.state == layout.state and again.digest == layout.digest
    plain = Layout(layout.entries)
    assert plain.digest != layout.digest and Layout.from_table(plain.table).state == NO_STATE
    with pytest.raises(
        LayoutMismatch, match="keeps nothing at the center, but the center has 'momentum', 'slow', 'coun"
    ):
        plain.require(layout, "the center")


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a", "a"), "used twice"), (("a/b",), "not made of"), (("x" * 65,), "not made of"), (("",), "not")],
)
def test_names_of_state_are_checked(names, said):
    with pytest.raises(InvalidArgument, match=said):
        check_state_names(StateNames(names[:1]), StateNames((), names[1:]))
