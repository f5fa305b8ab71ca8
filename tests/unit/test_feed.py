"""Batches as bytes: what a list of arrays becomes, and comes back as."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from maniple.environment import Environment, read_environment, variables_for
from maniple.errors import BadFrame, InvalidArgument
from maniple.feed.local_feed import Feed
from maniple.feed.ring import FeedBatch, read
from maniple.worker import Worker
from maniple.worker.worker import connect_to_host

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays.complex_number_dtypes(endianness="?", sizes=(64, 128)),
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LISTS = st.lists(arrays.arrays(DTYPES, SHAPES), max_size=5)


def written(batch: FeedBatch) -> np.ndarray:
    buffer = np.full(batch.size_bytes, 0xAB, np.uint8)
    batch.write(buffer)
    return buffer


@settings(max_examples=80, deadline=None)
@given(LISTS, st.booleans())
def test_a_batch_comes_back_as_it_was(values, is_turned):
    if is_turned:  # not as it lies in memory
        values = [value.T[::-1] if value.ndim else value for value in values]
    batch = FeedBatch.of(values)
    for buffer in (written(batch), np.frombuffer(b"".join(map(bytes, batch.parts())), np.uint8)):
        assert buffer.nbytes == batch.size_bytes
        back = read(buffer)
        assert len(back) == len(values)
        for one, value in zip(back, values, strict=True):
            assert one.shape == value.shape and one.dtype == value.dtype.newbyteorder("=")
            np.testing.assert_array_equal(one, value)


def test_arrays_begin_where_vector_units_like_it():
    batch = FeedBatch.of([np.zeros(3, np.int8), np.zeros(5), np.zeros(1)])
    assert [offset % 64 for offset in batch.offsets] == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [np.array(["a"]), np.array([None]), np.array(["2020"], "M8[Y]"), [[1, 2], [3]]],
    ids=["U", "O", "M", "ragged"],
)
def test_what_holds_no_numbers_is_refused_by_its_place(wrong):
    with pytest.raises(InvalidArgument, match="array 1 of the batch"):
        FeedBatch.of([np.zeros(2), wrong])


@settings(max_examples=120, deadline=None)
@given(LISTS, st.integers(0, 10_000), st.integers(0, 255))
def test_bytes_that_are_no_batch_are_refused_or_harmless(values, environment, byte):
    buffer = written(FeedBatch.of(values))
    buffer[environment % min(buffer.nbytes, 64)] = byte  # in the table, mostly
    try:
        back = read(buffer)
    except BadFrame:
        return
    assert all(one.dtype.kind in "biufc" and one.nbytes <= buffer.nbytes for one in back)


@pytest.mark.parametrize("cut", [0, 4, 9, 63, -1])
def test_a_batch_cut_short_is_refused(cut):
    buffer = written(FeedBatch.of([np.arange(40.0)]))
    with pytest.raises(BadFrame):
        read(buffer[:cut])
    with pytest.raises(BadFrame):
        read(np.append(buffer, np.uint8(0)))


@pytest.mark.parametrize("shape", [[-1], [1 << 60, 0, 1 << 60], [1] * 40, [1 << 70]])
def test_a_shape_that_cannot_be_is_refused(shape):
    table = msgspec.msgpack.encode([("<f4", shape)]) if max(shape) < 1 << 64 else b"\x91\x92\xa3<f4\x91\xc0"
    head = len(table).to_bytes(8, "little") + table
    with pytest.raises(BadFrame):
        read(np.frombuffer(head.ljust(4096, b"\0"), np.uint8))


def test_a_producer_cannot_join_as_a_worker():
    with pytest.raises(InvalidArgument, match="cannot join as a worker"):
        connect_to_host(Environment(segment=Path("nowhere"), producer=0, producer_number=0), lambda: (0, 0, False))


def test_a_worker_alone_has_no_feed_and_a_producer_alone_no_run():
    with pytest.raises(InvalidArgument, match=r"this worker runs alone(?s:.*)Prefetch"):
        Worker(Environment()).feed()
    with pytest.raises(InvalidArgument, match="there is no run to push to"):
        Feed()


def test_a_producer_finds_its_place_in_the_environment():
    environment = Environment(segment=Path("x"), producer=1, producers=3, producer_number=4)
    found = read_environment(variables_for(environment))
    assert (found.producer, found.producers, found.producer_number) == (1, 3, 4)
    assert not any("PRODUCER" in name for name in variables_for(Environment()))
