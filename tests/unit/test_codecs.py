"""The codecs: how small values become, how much they lose by it, and that what is lost comes later."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.center.contributions import ErrorFeedback
from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.wire import codecs, quantized, topk
from maniple.wire.codecs import CODECS, get_codec
from tests.unit.engines import engine

NAMES = ["float32", "bfloat16", "float16", "int8", "int4", "topk"]
DENSE = NAMES[:5]  # each value arrives, more or less exactly
SMALLER = NAMES[1:4]  # those that carry values too
CHANGES = NAMES[4:]
LENGTHS = [0, 1, 255, 256, 257, 70_000]
LARGEST = float(np.finfo(np.float32).max)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = hnp.arrays(np.float32, st.integers(0, 600), elements=FINITE)
LENGTHS_AND_DTYPES = [*((n, d) for n in LENGTHS for d in (np.float32, np.float64)), (7_000_001, np.float32)]


def pack(name, values):
    how = get_codec(name)
    data = np.empty(how.size_bytes(values.size, values.itemsize), np.uint8)
    how.pack(values, data)
    return data


def unpack(name, data, values):
    got = np.full_like(values, 77)
    get_codec(name).unpack(data, got)
    return got


def travel(name, values):
    before = values.copy()
    got = unpack(name, pack(name, values), values)
    np.testing.assert_array_equal(values, before)  # packing has not changed them
    return got


def some(count, dtype=np.float32, seed=1):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def bound(name, values):
    """How far each value may move. Of float16, in its range."""
    size = np.abs(values.astype(np.float64))
    if name == "float32":
        return np.zeros(values.size)
    if name == "bfloat16":
        return size * 2**-8 + 2**-133  # where float32 itself is subnormal, half of bfloat16's last bit
    if name == "float16":
        return size * 2**-10 + 2**-25
    groups = np.append(size, np.zeros(-size.size % 256)).reshape(-1, 256)
    scale = np.repeat(groups.max(axis=1), 256)[: size.size]
    if name == "int4":
        return np.maximum((2**0.5 - 1) * size, scale * 2**-7) * (1 + 1e-6) + 2**-149
    scale /= 127
    return scale * (0.5 + 1e-4) + 127 * 2.0**-127  # scales below that have no inverse


def test_there_are_six():
    assert list(CODECS) == NAMES
    with pytest.raises(InvalidArgument, match="wire='gzip' is not a codec"):
        get_codec("gzip")


def test_codecs_for_changes_name_the_one_for_values():
    assert [name for name in NAMES if get_codec(name).is_for_changes] == CHANGES
    assert {get_codec(name).for_values for name in CHANGES} == {"bfloat16"}
    assert all(get_codec(name).for_values == name for name in NAMES if name not in CHANGES)


@pytest.mark.parametrize("count", [*LENGTHS, 4095, 4096, 4097, 10**9])
def test_sizes_follow_their_formula(count):
    groups, chunks = -(-count // 256), -(-count // 4096)
    kept = 64 * (count // 4096) + -(-64 * (count % 4096) // 4096)
    sizes = {name: get_codec(name).size_bytes(count, 4) for name in NAMES}
    assert sizes == {
        "float32": 4 * count,
        "bfloat16": 2 * count,
        "float16": 2 * count,
        "int8": count + 4 * groups,
        "int4": -(-count // 2) + 4 * groups,
        "topk": -(-12 * kept // 8) + -(-2 * kept // 8) + 8 * chunks,
    }
    of_float64 = {name: get_codec(name).size_bytes(count, 8) for name in NAMES}
    assert of_float64 == sizes | {"float32": 8 * count}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", DENSE)
def test_values_arrive_within_their_bound(name, count, dtype):
    values = some(count, dtype)
    assert (np.abs(travel(name, values) - values.astype(np.float64)) <= bound(name, values)).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
@given(values=VALUES)
def test_any_finite_values_arrive_within_their_bound(name, values):
    got = travel(name, values)
    assert np.isfinite(got).all()
    assert (np.abs(got.astype(np.float64) - values) <= bound(name, values)).all()


@given(values=VALUES)
def test_float16_keeps_its_range_and_clips_the_rest(values):
    clipped = np.clip(values, -65504, 65504)
    assert (np.abs(travel("float16", values).astype(np.float64) - clipped) <= bound("float16", clipped)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name, count, dtype):
    for zero in (0.0, -0.0):
        assert (travel(name, np.full(count, zero, dtype)) == 0).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_minus_zero_keeps_its_sign(name):
    assert np.signbit(travel(name, np.float32([-0.0]))).all()


@pytest.mark.parametrize("name", SMALLER)
def test_what_fits_exactly_arrives_exactly(name):
    values = np.float32([-127, -64, -1, 0, 1, 2, 100, 127])
    np.testing.assert_array_equal(travel(name, values), values)


@pytest.mark.parametrize("name", [*SMALLER, "int4"])
def test_what_has_arrived_once_travels_on_unchanged(name):
    once = travel(name, some(1000))
    np.testing.assert_allclose(travel(name, once), once, rtol=1e-6 if name == "int8" else 0)


@pytest.mark.parametrize("tiny", [1e-30, 1e-37, 2.0**-126, 1e-40, 2.0**-149])
@pytest.mark.parametrize("name", DENSE)
def test_tiny_values_come_near_or_become_zero(name, tiny):
    values = np.float32([tiny, -tiny, 0, tiny / 2])
    got = travel(name, values)
    assert (np.abs(got.astype(np.float64) - values) <= bound(name, values)).all()
    assert (np.sign(got) * np.sign(values) >= 0).all()


@pytest.mark.parametrize("name", DENSE)
def test_the_largest_values_stay_finite(name):
    values = np.float32([LARGEST, -LARGEST, 1, 65504, 65519, 65520, -1e6, 3.3895314e38, 3.3962e38])
    got = travel(name, values)
    assert np.isfinite(got).all()
    assert (np.sign(got[:2]) == [1, -1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_so(name, bad, dtype):
    for at in (0, 255, 256, 299):
        values = some(300, dtype)
        values[at] = bad
        got = travel(name, values)
        assert not np.isfinite(got[at])
        if name in {"int8", *CHANGES}:  # values that share a scale or levels are all refused
            group = 4096 if name == "topk" else 256
            of_group = np.arange(300) // group == at // group
            assert (np.isfinite(got) == ~of_group).all()
        else:
            assert np.isfinite(np.delete(got, at)).all()
            assert np.isnan(got[at]) == np.isnan(bad)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_every_kind_of_nan_stays_one(name):
    bits = np.uint32([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF])
    assert np.isnan(travel(name, bits.view(np.float32))).all()


def test_bfloat16_rounds_as_torch_does():
    torch = engine("torch")
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (generator.integers(0, 2**16, 1000, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    is_ordinary = np.isfinite(values) & torch.isfinite(theirs).numpy()  # what torch makes infinite, we clip
    ours = pack("bfloat16", values).view(np.int16)
    np.testing.assert_array_equal(ours[is_ordinary], theirs.view(torch.int16).numpy()[is_ordinary])


@pytest.mark.parametrize(("count", "dtype"), LENGTHS_AND_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_packing_in_place_is_packing(name, count, dtype):
    values = some(count, dtype)
    data = pack(name, values)
    if data.size <= values.nbytes:  # else it cannot be done in place
        there = values.view(np.uint8)[: data.size]
        get_codec(name).pack(values, there)
        np.testing.assert_array_equal(there, data)


@pytest.mark.parametrize(("count", "dtype"), LENGTHS_AND_DTYPES)
@pytest.mark.parametrize("name", NAMES[1:])
def test_unpacking_in_place_is_unpacking(name, count, dtype):
    values = some(count, dtype)
    data = pack(name, values)
    room = np.empty(values.nbytes + -(-data.size // 32) * 8, np.uint8)  # as the host reserves it
    there = room[room.size - data.size :]
    there[:] = data
    got = room[: values.nbytes].view(dtype)
    get_codec(name).unpack(there, got)
    np.testing.assert_array_equal(got, unpack(name, data, values))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SMALLER)
def test_what_a_push_loses_comes_with_the_next(name, dtype):
    feedback = ErrorFeedback(Layout([Entry("w", (700,), dtype)]), name)
    values = some(700, dtype)
    values[:256] *= 1e-3  # small ones, and in int8 beside a large one
    values[10] = 5
    sent, worst = np.zeros(700), []
    for count in range(1, 201):
        data = feedback.compress(0, values)
        sent += unpack(name, data, values)
        worst.append(np.abs(sent - count * values.astype(np.float64)).max())
    once = np.abs(travel(name, values) - values.astype(np.float64)).max()
    assert max(worst[100:]) <= 2.1 * once + 1e-5  # one push's loss is owed at any time, not the sum of all


@pytest.mark.parametrize("name", SMALLER)
def test_without_what_is_owed_the_loss_would_grow(name):
    values = some(700)
    sent = 200 * travel(name, values).astype(np.float64)
    assert np.abs(sent - 200 * values).max() > 20 * np.abs(travel(name, values) - values).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SMALLER)
def test_nothing_is_owed_for_what_is_not_finite(name, bad):
    feedback = ErrorFeedback(Layout([Entry("w", (300,), "float32")]), name)
    values = some(300)
    values[7] = bad
    assert not np.isfinite(unpack(name, feedback.compress(0, values), values)[7])
    values[7] = 1
    for _ in range(3):
        assert np.isfinite(unpack(name, feedback.compress(0, values), values)).all()


def test_plain_values_and_whole_numbers_are_sent_as_they_are():
    layout = Layout([Entry("w", (5,), "float32"), Entry("n", (5,), "int64")], is_numeric=True)
    for name in NAMES:
        feedback = ErrorFeedback(layout, name)
        whole = np.arange(5)
        assert feedback.compress(1, whole) is whole
        assert feedback.compress_change(1, whole) is whole
        assert feedback.codec(0).name == get_codec(name).for_values
        assert feedback.codec(0, is_change=True).name == name
    real = some(5)
    assert ErrorFeedback(layout, "float32").compress(0, real) is real


@pytest.mark.parametrize("name", [*SMALLER, "int4"])
def test_a_change_becomes_what_is_really_said(name):
    feedback = ErrorFeedback(Layout([Entry("w", (300,), "float32")]), name)
    change = some(300)
    before = change.copy()
    data = feedback.compress_change(0, change)
    np.testing.assert_array_equal(change, unpack(name, data, change))
    assert (np.abs(change - before) <= bound(name, before)).all()


# The codecs for changes


def test_int4_takes_the_nearest_level_by_the_logarithm():
    levels = np.float32([0, *(2.0**-k for k in range(7))])
    values = np.float32([1, *np.geomspace(2**-8, 1, 254), 0])
    got = travel("int4", values)
    assert set(got.tolist()) <= set(levels.tolist())
    for value, found in zip(values, got, strict=True):
        if value >= 2**-7:
            assert abs(np.log2(found / value)) <= 0.5 + 1e-6 or found == np.float32(2**-6), value
        else:
            assert found == 0
    np.testing.assert_array_equal(travel("int4", -values), -got)


def test_int4_has_one_scale_for_256_values():
    values = np.repeat(np.float32([1, 1e-6, 300]), 256)
    np.testing.assert_array_equal(travel("int4", values), values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 4095, 4096, 4097, 40_000])
def test_topk_sends_the_largest_of_each_chunk(count, dtype):
    values = some(count, dtype)
    got = travel("topk", values)
    for start in range(0, count, 4096):
        chunk, found = np.abs(values[start : start + 4096]), got[start : start + 4096]
        kept = -(-64 * chunk.size // 4096)
        sent = np.nonzero(found)[0]
        assert sorted(sent) == sorted(np.argsort(-chunk, kind="stable")[:kept])
        assert (np.sign(found[sent]) == np.sign(values[start + sent])).all()
        assert len(set(np.abs(found[sent]).tolist())) <= 2
        # Levels are means, so the magnitudes that are sent have their sum.
        assert np.abs(found).sum() == pytest.approx(chunk[sent].sum(), rel=1e-5)


def test_topk_of_equal_values_sends_the_first_and_of_two_sizes_sends_both_exactly():
    np.testing.assert_array_equal(
        np.nonzero(travel("topk", np.ones(5000, np.float32)))[0], [*range(64), *range(4096, 4111)]
    )
    values = np.zeros(4096, np.float32)
    values[5:65], values[4000:4004] = -0.5, 8
    np.testing.assert_array_equal(travel("topk", values), values)


def test_bytes_of_topk_are_positions_then_values_then_levels():
    values = np.zeros(130, np.float32)  # ceil(64 * 130 / 4096) = 3 of them are sent
    values[[2, 100, 129]] = 4, -1, 6
    positions = (2 | 100 << 12 | 129 << 24).to_bytes(5, "little")
    assert pack("topk", values).tobytes() == positions + bytes([0b01_10_01]) + np.float32([1, 5]).tobytes()
    assert topk.size_bytes(4096) == 64 * 14 // 8 + 8


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 9000))
def test_any_bytes_of_the_right_size_decode_to_something(name, seed, count):
    size = get_codec(name).size_bytes(count, 4)
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    room = np.full(count + 64, 77, np.float32)
    get_codec(name).unpack(data, room[32 : count + 32])
    assert (room[:32] == 77).all() and (room[count + 32 :] == 77).all()


def test_topk_ignores_positions_that_do_not_exist():
    values = np.ones(10, np.float32)
    data = pack("topk", values)
    data[:2] = 0xFF  # position 4095 of 10
    np.testing.assert_array_equal(unpack("topk", data, values), np.zeros(10))


@pytest.mark.parametrize("name", CHANGES)
@given(values=VALUES)
def test_changes_of_any_size_arrive_finite_and_with_their_sign(name, values):
    got = travel(name, values)
    assert np.isfinite(got).all()
    assert (np.sign(got) * np.sign(values) >= 0).all()
    assert np.abs(got).max(initial=0) <= np.abs(values).max(initial=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_not_sent_stay_in_the_difference_and_arrive_later(name, dtype):
    """As a replica sends them: what has arrived, and what is still to be sent, are all changes so far."""
    count = 9000
    feedback = ErrorFeedback(Layout([Entry("w", (count,), dtype)]), name)
    rng, arrived, unsent, total = np.random.default_rng(1), np.zeros(count), np.zeros(count), np.zeros(count)
    largest = 0.0
    for _ in range(300):
        step = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 1, count)
        total += step
        change = (unsent + step).astype(dtype)
        whole = change.astype(np.float64)
        data = feedback.compress_change(0, change)
        np.testing.assert_array_equal(change, unpack(name, data, change))
        arrived += change
        unsent = whole - change
        largest = max(largest, np.abs(unsent).max())
    np.testing.assert_allclose(arrived + unsent, total, atol=1e-3 if dtype == "float32" else 1e-9)
    assert largest < 100, "what is not sent does not pile up"
    feedback.compress(0, np.ones(count, dtype))  # a push of values takes the codec for values
    assert feedback.size_bytes(0) == 2 * count


# The compiled kernels

BITS = hnp.arrays(np.uint32, st.integers(0, 700)).map(lambda bits: bits.view(np.float32))


def with_kernels(module, name, values):
    """The bytes, scales and values of one message."""
    data = np.full(-(-values.size * int(name[3:]) // 8), 99, np.uint8)
    scales, got = np.full(-(-values.size // 256), 99, np.float32), np.full_like(values, 77)
    getattr(module, f"pack_{name}")(values, data, scales)
    getattr(module, f"unpack_{name}")(data, scales, got)
    return data.tobytes(), scales.tobytes(), got.tobytes()


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(values=st.one_of(BITS, VALUES, VALUES.map(lambda v: v * np.float32(1e-37)), VALUES.map(np.float64)))
def test_compiled_kernels_give_the_bits_of_numpy(name, values):
    engine("numba")
    from maniple.wire import quantized_compiled

    assert with_kernels(quantized_compiled, name, values) == with_kernels(quantized, name, values)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_large_arrays_have_the_same_bits_too_and_may_be_packed_in_place(name):
    engine("numba")
    from maniple.wire import quantized_compiled

    values = np.concatenate([some(100_001), some(300) * 1e-40, np.zeros(256)]).astype(np.float32)
    values[70_000] = np.nan
    expected = with_kernels(quantized, name, values)
    assert with_kernels(quantized_compiled, name, values) == expected
    there, scales = values.view(np.uint8)[: len(expected[0])], np.empty(-(-values.size // 256), np.float32)
    getattr(quantized_compiled, f"pack_{name}")(values, there, scales)
    assert (there.tobytes(), scales.tobytes()) == expected[:2]


def test_codecs_use_the_compiled_kernels_once_they_are_loaded():
    engine("numba")
    values = some(1000)
    before = {name: pack(name, values).tobytes() for name in ("int8", "int4")}
    codecs.load_kernels()
    assert codecs._active is not quantized
    assert {name: pack(name, values).tobytes() for name in ("int8", "int4")} == before
