"""What compression leaves out of one message is kept for the next, unless the message does not count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.collectives.error_feedback import InPlaceFeedback, KeptError
from maniple.wire.codecs import get_codec

WIRES = ["int8", "int4", "topk"]
MESSAGES = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(0, 300)), elements=st.floats(-1000, 1000, width=32)
)


@pytest.mark.parametrize("wire", WIRES)
@given(messages=MESSAGES)
def test_messages_and_the_kept_error_add_up_to_all_values(wire, messages):
    error = KeptError(get_codec(wire), np.zeros(messages.shape[1]))
    arrived, decoded = np.zeros(messages.shape[1]), np.empty(messages.shape[1])
    for values in messages:
        error.compress(values, decoded)
        error.commit()
        arrived += decoded
    np.testing.assert_allclose(arrived + error._error, messages.sum(axis=0), atol=1e-8)


@pytest.mark.parametrize("wire", WIRES)
def test_a_message_that_does_not_count_keeps_the_error(wire):
    rng, codec = np.random.default_rng(1), get_codec(wire)
    error = KeptError(codec, np.zeros(500, np.float32))
    error.compress(rng.standard_normal(500).astype(np.float32))
    error.commit()
    before = error._error.copy()
    assert before.any()
    error.compress(rng.standard_normal(500).astype(np.float32))
    np.testing.assert_array_equal(error._error, before)
    error.reset()
    assert not error._error.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wire", WIRES)
def test_values_that_are_not_finite_change_no_error(wire, bad):
    rng, codec = np.random.default_rng(2), get_codec(wire)
    error, decoded = KeptError(codec, np.zeros(500)), np.empty(500)
    error.compress(rng.standard_normal(500))
    error.commit()
    before, values = error._error.copy(), rng.standard_normal(500)
    values[3] = bad
    error.compress(values, decoded)
    error.commit()
    assert not np.isfinite(decoded[3])
    is_lost = ~np.isfinite(decoded)  # its group of 256 values, or chunk
    np.testing.assert_array_equal(error._error[is_lost], before[is_lost])
    assert np.isfinite(error._error).all()


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_error_of_the_mean_begins_again_with_other_members(wire):
    rng, vector = np.random.default_rng(3), np.zeros(500)
    feedback = InPlaceFeedback(get_codec(wire), [vector])

    def make_round(members: tuple[int, ...], mean: np.ndarray) -> np.ndarray:
        feedback.compress(contributes=False)
        vector[:] = mean
        feedback.finish(members, has_result=True)
        return vector.copy()

    mean = rng.standard_normal(500)
    first = make_round((0, 1), mean)
    second = make_round((0, 1), mean)
    assert not np.array_equal(first, second), "it has what the first lost"
    np.testing.assert_array_equal(make_round((0, 1, 2), mean), first)
