"""JAX in a pool: functions and losses that JAX compiles give what one process gives."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from maniple import Pool
from maniple.errors import InvalidArgument
from tests.unit.engines import engine

pytestmark = [pytest.mark.process]


@pytest.fixture(scope="module")
def jax() -> Any:
    return engine("jax")


@pytest.fixture(scope="module")
def pool(jax: Any) -> Iterator[Pool]:
    del jax
    with Pool(2) as made:
        yield made


def sets() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(101, 5)).astype(np.float32)
    return x, (x @ np.arange(5) + 1).astype(np.float32)


def test_compiled_function_gives_what_one_process_gives(pool: Pool, jax: Any):
    def both(x: Any) -> Any:
        return {"mean": x.mean(0), "rows": 2 * x}

    function = pool.function(jax.jit(both), scatter="x", reduce={"mean": "mean", "rows": "gather"})
    x, _ = sets()
    for given in (x, jax.numpy.asarray(x), pool.data(jax.numpy.asarray(x))):
        together, alone = function(given, num_slices=3), function.serial(given)
        assert isinstance(together["rows"], np.ndarray)
        assert np.array_equal(together["rows"], alone["rows"])
        np.testing.assert_allclose(together["mean"], x.mean(0), rtol=1e-5, atol=1e-6)


def test_training_by_value_and_grad_is_that_of_one_process(pool: Pool, jax: Any):
    def loss(model: Any, x: Any, y: Any) -> Any:
        return ((x @ model["w"] + model["b"] - y) ** 2).mean()

    model = {"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}  # the bias has no axis
    train = pool.train_function(model, jax.jit(jax.value_and_grad(loss)), "adam", lr=0.5)
    (x, y), random = sets(), np.random.default_rng(1)
    first = train(x, y, batch=51)
    assert first == pytest.approx(train.serial(x, y, batch=51), rel=1e-5)
    for k in range(60):
        batch = random.permutation(101)[:51]
        value, alone = train(x, y, batch=batch, num_slices=1 + k % 2), train.serial(x, y, batch=batch)
        np.testing.assert_allclose(value, alone, rtol=1e-3, atol=1e-6)
    assert value < first / 100
    assert train.model is not None
    for rank in range(2):
        for name, array in pool.get(train.model, rank).items():
            np.testing.assert_allclose(array, train.model.local[name], rtol=1e-3, atol=1e-4)


def test_arrays_that_cannot_be_changed_are_no_model(pool: Pool, jax: Any):
    model = {"w": jax.numpy.zeros(5)}
    with pytest.raises(InvalidArgument, match=r"np\.array"):
        pool.train_function(model, jax.value_and_grad(lambda m, x: (x @ m["w"]).mean()), "sgd", lr=0.1)
