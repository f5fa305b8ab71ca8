"""Changes between a remote worker and its mailbox: what is packed, and what is refused."""

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.errors import BadFrame
from maniple.layout import Layout
from maniple.peers.changes import add, are_finite, pack, packed_bytes, unpack

LAYOUT = Layout(adapt({"w": np.zeros(1000, "f4"), "d": np.zeros(30)}).entries)


def change(seed: int = 0) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(seed), LAYOUT.allocate()
    for vector in made.values():
        vector[:] = rng.normal(size=vector.size)
    return made


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16", "int8", "int4", "topk"])
def test_a_worker_that_adds_what_a_codec_has_lost_to_its_next_change_loses_nothing(codec):
    mailbox, base, x = LAYOUT.allocate(), LAYOUT.allocate(), change()
    for _ in range(300):
        sent = pack({dtype: value - base[dtype] for dtype, value in x.items()}, codec)
        arrived = unpack(np.concatenate(sent), LAYOUT, codec)
        add(mailbox, arrived)
        add(base, arrived)
    for dtype, value in x.items():
        np.testing.assert_allclose(mailbox[dtype], value, atol=1e-2)
        np.testing.assert_array_equal(mailbox[dtype], base[dtype], "the worker knows the mailbox's values to the bit")


def test_without_a_codec_a_change_arrives_to_the_bit():
    sent = change()
    arrived = unpack(np.concatenate(pack(sent, "float32")), LAYOUT, "float32")
    for dtype, value in sent.items():
        np.testing.assert_array_equal(arrived[dtype], value)


def test_a_change_of_another_size_or_with_values_that_are_not_finite_is_refused():
    data = np.concatenate(pack(change(), "float32"))
    assert data.size == packed_bytes(LAYOUT, "float32")
    with pytest.raises(BadFrame, match="bytes came where"):
        unpack(data[:-1], LAYOUT, "float32")
    bad = change()
    bad["float64"][3] = np.nan
    with pytest.raises(BadFrame, match="not finite"):
        unpack(np.concatenate(pack(bad, "float32")), LAYOUT, "float32")


def test_large_finite_values_whose_sum_overflows_are_finite():
    assert are_finite(np.full(4, 3e38, "f4"))
    assert not are_finite(np.array([1.0, np.inf]))
