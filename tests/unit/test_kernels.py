"""The kernels `blocks` (NumPy) and `fused` (numba): right, finite, equal to the last bit, without big temporaries."""

import functools
import itertools
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.collectives import reductions as sums
from maniple.rules.kernels import compiled, kernels, warm_up
from maniple.rules.kernels import numpy_kernels as blocks
from tests.unit.engines import engine
from tests.waiting import PATIENCE_S

BLOCK = blocks.BLOCK
SIZES = [0, 1, 2, 7, 1001, BLOCK - 1, BLOCK, 2 * BLOCK + 17]
DTYPES = ["float32", "float64"]


@pytest.fixture(params=["blocks", "fused"], scope="module")
def kernel(request) -> Any:
    if request.param == "blocks":
        return blocks
    engine("numba")
    from maniple.rules.kernels import numba_kernels as fused

    return fused


@pytest.fixture(scope="module")
def fused() -> Any:
    engine("numba")
    from maniple.rules.kernels import numba_kernels as fused

    return fused


# Each update as (a call of the kernel, the equation for new x and new c before the guard).
Call = Callable[[Any, np.ndarray, np.ndarray, np.ndarray], bool]
UPDATES: dict[str, tuple[Call, Callable[..., Any]]] = {
    "elastic": (lambda k, x, c, old: k.elastic(x, c, 0.3, 0.3), lambda r, x, c, old: elastic(r, x, c, 0.3, 0.3)),
    "elastic, two shares": (
        lambda k, x, c, old: k.elastic(x, c, 0.9, 0.1),
        lambda r, x, c, old: elastic(r, x, c, 0.9, 0.1),
    ),
    "blend": (lambda k, x, c, old: k.blend(x, c, 0.7, 0.6), lambda r, x, c, old: (None, r(0.7) * c + r(0.6) * x)),
    "blend, whole": (lambda k, x, c, old: k.blend(x, c, 1.0, 1.0), lambda r, x, c, old: (None, c + x)),
    "difference": (
        lambda k, x, c, old: k.difference(x, c, old, 1.0),
        lambda r, x, c, old: (None, x + (c - old)),  # exact if nobody else has written
    ),
    "difference, scaled": (
        lambda k, x, c, old: k.difference(x, c, old, 1 / 3),
        lambda r, x, c, old: (None, c + r(1 / 3) * (x - old)),
    ),
}
every_update = pytest.mark.parametrize("update", UPDATES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def elastic(real, x, c, center, worker):
    d = x - c
    return x - real(worker) * d, c + real(center) * d


def expected(update: str, x: np.ndarray, c: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """What the equation and the guard say: a proposal that is not finite is left out, and the replica takes c."""
    with np.errstate(all="ignore"):
        new_x, new_c = UPDATES[update][1](x.dtype.type, x, c, old)
        fine = np.isfinite(x - c) if update.startswith("elastic") else np.isfinite(new_c)
    new_c = np.where(fine, new_c, c)
    new_x = new_c if new_x is None else np.where(fine, new_x, c)
    return new_x, new_c, np.flatnonzero(~fine).tolist()


@functools.cache
def _values(seed: int, size: int, dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(scale=10.0 ** rng.integers(-6, 6), size=size).astype(dtype) for _ in range(3))


def values(seed: int, size: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A replica, a center and an old value of any scale."""
    x, c, old = (value.copy() for value in _values(seed, size, dtype))
    return x, c, old


def sprinkle(x: np.ndarray, seed: int) -> None:
    """Put some values into `x` that are not finite, or whose differences and sums overflow."""
    rng = np.random.default_rng(seed)
    largest = np.finfo(x.dtype).max
    if x.size:
        where = rng.integers(0, x.size, max(1, min(9, x.size // 2)))
        x[where] = rng.choice([np.nan, np.inf, -np.inf, largest, -largest], where.size)


@every_update
def test_kernel_follows_the_equation_to_the_last_bit(kernel, update):
    for dtype, size in itertools.product(DTYPES, SIZES):
        x, c, old = values(size, size, dtype)
        new_x, new_c, _ = expected(update, x, c, old)
        assert UPDATES[update][0](kernel, x, c, old) is None, (dtype, size)
        assert x.tobytes() == new_x.tobytes(), (dtype, size)
        assert c.tobytes() == new_c.tobytes(), (dtype, size)


@every_update
def test_values_that_are_not_finite_are_refused_one_by_one(kernel, update):
    for dtype, size in itertools.product(DTYPES, SIZES[1:]):
        x, c, old = values(size, size, dtype)
        sprinkle(x, size)
        new_x, new_c, refused = expected(update, x, c, old)
        found = UPDATES[update][0](kernel, x, c, old)
        assert (found is None and not refused) or found.tolist() == refused, (dtype, size)
        assert np.isfinite(c).all(), (dtype, size)
        np.testing.assert_array_equal(c, new_c)
        np.testing.assert_array_equal(x, new_x)


@every_update
def test_one_bad_value_anywhere_is_noticed_and_its_element_restored(kernel, update):
    size = BLOCK + 5
    for bad, environment in itertools.product([np.nan, np.inf, -np.inf], [0, BLOCK - 1, BLOCK, size - 1]):
        x, c, old = values(1, size, "float32")
        x[environment] = bad
        kept = c[environment]
        assert UPDATES[update][0](kernel, x, c, old).tolist() == [environment], (bad, environment)
        assert x[environment] == c[environment] == kept, (bad, environment)
        assert not update.startswith("difference") or old[environment] == kept, (bad, environment)


@every_update
def test_large_values_whose_sum_overflows_are_not_refused(kernel, update):
    x = np.full(100, 3e38, "float32")
    c, old = np.zeros_like(x), np.zeros_like(x)
    new_x, new_c, refused = expected(update, x, c, old)
    assert not refused
    assert UPDATES[update][0](kernel, x, c, old) is None
    assert x.tobytes() == new_x.tobytes()
    assert c.tobytes() == new_c.tobytes()


@every_dtype
def test_proposal_that_overflows_is_refused(kernel, dtype):
    largest = np.finfo(dtype).max
    for call in (
        lambda x, c: kernel.elastic(x, c, 0.5, 0.5),
        lambda x, c: kernel.blend(x, -c, 1.0, 1.0),
        lambda x, c: kernel.difference(x, -c, np.zeros_like(c), 1.0),
    ):
        x, c = np.array([largest, 1], dtype), np.array([-largest, -1], dtype)
        assert call(x, c).tolist() == [0]
        assert np.isfinite(c).all()
        assert np.isfinite(x).all()


@every_dtype
def test_difference_remembers_the_center(kernel, dtype):
    x, c, old = values(3, 100, dtype)
    x[3] = np.nan
    kernel.difference(x, c, old, 1.0)
    assert old.tobytes() == c.tobytes() == x.tobytes()


@every_update
@given(data=st.data())
def test_both_kernels_give_the_same_bits(fused, update, data):
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    shape = st.shared(st.integers(1, 12), key="size")
    anything = st.floats(width=int(dtype[5:]))
    finite = st.floats(width=int(dtype[5:]), allow_nan=False, allow_infinity=False)
    x = data.draw(hnp.arrays(dtype, shape, elements=anything), "x")
    c, old = (data.draw(hnp.arrays(dtype, shape, elements=finite), name) for name in ("c", "old"))
    twin = x.copy(), c.copy(), old.copy()
    refused = UPDATES[update][0](blocks, x, c, old)
    assert (UPDATES[update][0](fused, *twin) is None) is (refused is None)
    assert [a.tobytes() for a in (x, c)] == [a.tobytes() for a in twin[:2]]
    if update.startswith("difference"):
        assert old.tobytes() == twin[2].tobytes()
    assert np.isfinite(c).all()
    assert np.isfinite(x).all()


@every_update
@given(st.integers(0, 5), st.sampled_from(DTYPES), st.sampled_from([5, 1001, BLOCK + 1]), st.booleans())
@example(0, "float32", 2 * BLOCK + 17, True)
def test_both_kernels_give_the_same_bits_at_length(fused, update, seed, dtype, size, poison):
    x, c, old = values(seed, size, dtype)
    if poison:
        sprinkle(x, seed)
    twin = x.copy(), c.copy(), old.copy()
    refused = UPDATES[update][0](blocks, x, c, old)
    assert (UPDATES[update][0](fused, *twin) is None) is (refused is None)
    assert [a.tobytes() for a in (x, c)] == [a.tobytes() for a in twin[:2]]


def test_refused_element_of_the_center_keeps_its_sign_of_zero(kernel):
    x, c = np.array([np.nan]), np.array([-0.0])
    assert kernel.elastic(x, c, 0.5, 0.5).tolist() == [0]
    assert np.signbit(c[0])


def test_kernels_work_in_place_without_warnings(kernel, recwarn):
    x, c, old = values(0, BLOCK + 1, "float32")
    sprinkle(x, 0)
    for call, _ in UPDATES.values():
        call(kernel, x.copy(), c.copy(), old.copy())
    assert not recwarn.list


@every_update
def test_kernel_makes_no_temporaries_of_the_model_s_size(kernel, update):
    x, c, old = (np.ones(10_000_000, "float32") for _ in range(3))
    warm_up(["float32"])
    tracemalloc.start()
    try:
        UPDATES[update][0](kernel, x, c, old)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6


def test_rule_of_one_s_own_makes_no_temporaries_of_the_model_s_size():
    x, c, memory = (np.ones(10_000_000, "float32") for _ in range(3))
    tracemalloc.start()
    try:
        blocks.mixed(x, c, {"m": memory}, lambda x, c, state: ((x + c) / 2, (x + state["m"]) / 2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6


def test_compiled_kernels_are_used_where_numba_is_installed(fused):
    assert kernels() is fused


@pytest.fixture
def uncached(monkeypatch) -> None:
    monkeypatch.setattr("maniple.rules.kernels.compiled", compiled.__wrapped__)
    monkeypatch.setattr("maniple.rules.kernels.active", None)


def test_numpy_kernels_are_used_without_numba(uncached, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kernels() is blocks


def test_numpy_kernels_are_used_where_numba_is_broken(fused, uncached, monkeypatch):
    """By the rules, and by collectives and pools, which load theirs the same way."""

    def refuse(name: str) -> None:
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.warns(UserWarning, match="cannot be used .Numba needs another NumPy"):
        assert kernels() is blocks
    monkeypatch.setattr(sums, "compiled", compiled.__wrapped__)
    with pytest.warns(UserWarning, match="cannot be used"):
        sums.warm_up(["float32"])


def test_other_threads_compute_with_the_numpy_kernels_while_the_compiled_ones_are_loading(fused, monkeypatch):
    seen = []
    monkeypatch.setattr("maniple.rules.kernels.active", None)
    monkeypatch.setattr("maniple.rules.kernels.compiled", lambda _: seen.append(kernels()) or fused)
    warm_up(["float32"])
    assert seen[0] is blocks
    assert kernels() is fused


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("act", [blocks.ELASTIC, blocks.BLEND])
@pytest.mark.parametrize("answer", [blocks.NOTHING, blocks.VALUE, blocks.MOVE])
def test_act_in_steps_is_the_act_to_the_bit_for_both_kinds_of_kernels(fused, dtype, act, answer):
    rng = np.random.default_rng(0)
    x, c = (rng.normal(size=1000).astype(dtype) for _ in range(2))
    x[17], x[400] = np.nan, np.inf
    expected_x, expected_c = x.copy(), c.copy()
    whole = blocks.blend if act == blocks.BLEND else blocks.elastic
    clean = whole(expected_x, expected_c, 0.3, 0.4) is None
    for kind in (blocks, fused):
        own_x, own_c, progress = x.copy(), c.copy(), np.zeros(1, np.int64)
        block = np.zeros(64, dtype)
        was_clean = kind.staged(own_x, own_c, block, progress, operation=act, a=0.3, b=0.4, answer=answer)
        np.testing.assert_array_equal(own_c, expected_c)
        assert (was_clean, progress[0]) == (clean, 2 * 16)
        with np.errstate(invalid="ignore"):
            became = {blocks.NOTHING: x, blocks.VALUE: expected_x, blocks.MOVE: expected_x - x}[answer]
        np.testing.assert_array_equal(own_x, became)


def test_act_in_steps_goes_on_where_it_was_cut_off(fused):
    for kind in (blocks, fused):
        for at in range(2 * 16):
            x, c, block = np.full(1000, 3.0), np.ones(1000), np.zeros(64)
            done = at // 2 * 64
            c[:done] = 4.0
            if at % 2:  # its block was computed, and half of it copied
                block[:] = 4.0
                c[done : done + 30] = 4.0
                x[done : done + 10] = -99.0
            progress = np.array([at])
            kind.staged(x, c, block, progress, operation=blocks.BLEND, a=1, b=1, answer=blocks.NOTHING)
            np.testing.assert_array_equal(c, 4.0, err_msg=f"{kind.__name__} cut at {at}")


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "complex64"])
def test_other_numbers_are_weighed_as_they_are(dtype):
    c, x = np.array([1, 2, 100], dtype), np.array([3, 4, 27], dtype)
    assert blocks.weigh(x, c, 1, 1)
    np.testing.assert_array_equal(c, np.array([4, 6, 127], dtype))
    np.testing.assert_array_equal(x, c)


def test_replacement_in_steps_is_exact_to_the_sign_of_zero(fused):
    for kind in (blocks, fused):
        x, c = np.array([-0.0, 1.5, -3.0]), np.array([7.0, -0.0, 1.0])
        assert kind.staged(
            x, c, np.zeros(2), np.zeros(1, np.int64), operation=blocks.REPLACE, a=1, b=1, answer=blocks.NOTHING
        )
        assert c.tobytes() == x.tobytes()


# Loading in the background


def run_script(text: str) -> str:
    """What a fresh interpreter prints that executes `text`, after which it ends in order."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_kernels_load_in_the_background_and_numpys_serve_until_then(fused):
    text = """
        import threading
        from maniple.rules import kernels, warm_up_in_background
        from maniple.rules.kernels import numpy_kernels
        with kernels._loading:
            warm_up_in_background(["float32", "float64"])
            assert kernels.kernels() is numpy_kernels
        for thread in threading.enumerate():
            if thread.name == "maniple-kernels":
                thread.join()
        print(kernels.kernels().__name__)
        warm_up_in_background(["float32"])
        print(kernels.kernels().__name__, threading.active_count())
    """
    name = fused.__name__
    assert run_script(text) == f"{name}\n{name} 1\n"


def test_kernels_of_a_small_model_load_only_in_runs_that_last(fused):
    begin = """
        import threading, time
        from maniple.rules import kernels, warm_up_in_background
        from maniple.rules.kernels import numpy_kernels
        kernels.SMALL_DELAY_S = {delay}
        warm_up_in_background(["float32"], size_bytes=1000)
    """
    short = """
        time.sleep(0.2)
        assert "maniple-kernels" not in [thread.name for thread in threading.enumerate()]
        print(kernels.kernels().__name__)
    """
    long = f"""
        deadline = time.monotonic() + {PATIENCE_S / 2}
        while kernels.kernels() is numpy_kernels and time.monotonic() < deadline:
            time.sleep(0.01)
        print(kernels.kernels().__name__)
    """
    assert run_script(begin.format(delay=600) + short) == "maniple.rules.kernels.numpy_kernels\n"
    assert run_script(begin.format(delay=0.1) + long) == f"{fused.__name__}\n"


def test_process_that_ends_while_kernels_load_ends_in_order(fused):
    text = """
        from maniple.rules import warm_up_in_background
        warm_up_in_background(["float32", "float64"])
        print("done")
    """
    for _ in range(3):
        assert run_script(text) == "done\n"


def test_child_that_is_forked_while_kernels_load_can_use_the_compiler(fused):
    text = """
        import os
        from maniple.rules import warm_up_in_background
        warm_up_in_background(["float32"])
        child = os.fork()
        if not child:
            import numba
            numba.njit(lambda x: x + 1)(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_script(text) == "0\n"
