"""Gradient and update as two functions of a pool: what is done to the flat gradient in between counts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from maniple import Pool
from maniple.errors import InvalidArgument
from maniple.pool.training import NAMES

Model = dict[str, np.ndarray]
X = np.random.default_rng(0).normal(size=(11, 3))
Y = X @ np.array([1.0, -2.0, 0.5]) + 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3) as made:
        yield made


def start() -> Model:
    return {"w": np.zeros(3), "b": np.zeros(1)}


def loss(model: Model, x: np.ndarray, y: np.ndarray) -> Any:
    error = x @ model["w"] + model["b"] - y
    return (error**2).mean(), {"w": 2 * x.T @ error / len(x), "b": np.array([2 * error.mean()])}


def clip(gradient: np.ndarray, limit: float) -> float:
    norm = float(np.linalg.norm(gradient))
    gradient *= min(1.0, limit / norm)
    return norm


def values(pool: Pool, function: Any) -> list[Model]:
    """The model of each worker, and the caller's own."""
    return [*(pool.get(function.model, rank) for rank in range(pool.n)), function.model.local]


@pytest.mark.parametrize("optimizer", NAMES)
def test_a_gradient_and_an_update_make_a_training_step_of_each_optimizer(pool: Pool, optimizer: str):
    train = pool.train_function(start(), loss, optimizer, lr=0.1)
    gradient, update = pool.gradient_and_update(start(), loss, optimizer, lr=0.1)
    for count, batch in enumerate((None, 2, [3, 1, 4, 1, 5]), 1):  # 2 rows: one worker has none
        assert gradient(X, Y, batch=batch) == train(X, Y, batch=batch)
        assert update() == count
        assert gradient.serial(X, Y, batch=batch) == pytest.approx(train.serial(X, Y, batch=batch))
        assert update.serial() == count
    one, other = values(pool, gradient), values(pool, train)
    for name in ("w", "b"):
        assert all((each[name] == other[0][name]).all() for each in one[:-1])
        np.testing.assert_allclose(one[-1][name], other[-1][name])


def test_all_gradients_are_one_vector_that_is_the_same_on_all_workers(pool: Pool):
    gradient, _ = pool.gradient_and_update(start(), loss, "sgd")
    gradient(pool.data(X), pool.data(Y))
    expected = loss(start(), X, Y)[1]
    for rank in range(pool.n):
        np.testing.assert_allclose(pool.get(gradient.flat, rank), [*expected["w"], *expected["b"]])
    assert pool.shapes(gradient.flat) == [(4,)] * 3


def test_a_gradient_is_clipped_before_the_update(pool: Pool):
    gradient, update = pool.gradient_and_update(start(), loss, "sgd", lr=1.0)
    clipped = pool.function(clip)
    gradient(X, Y)
    gradient.serial(X, Y)
    g = np.concatenate([*loss(start(), X, Y)[1].values()])
    assert clipped(gradient.flat, 0.5) == pytest.approx([np.linalg.norm(g)] * 3)
    clipped.serial(gradient.flat, 0.5)
    update()
    update.serial()
    for model in values(pool, gradient):
        np.testing.assert_allclose(np.concatenate([model["w"], model["b"]]), -0.5 * g / np.linalg.norm(g))


def test_rows_that_workers_keep_are_selected_by_one_list_for_each(pool: Pool):
    gradient, update = pool.gradient_and_update(start(), loss, "momentum", lr=0.1)
    x, y = pool.scatter(X), pool.scatter(Y)
    for rows in ([[0, 1], [2, 0], [3]], [[2], [], [1, 0]]):
        assert gradient(x, y, batch_s=rows) == pytest.approx(gradient.serial(x, y, batch_s=rows))
        assert update() == update.serial()
    first, *others, own = values(pool, gradient)
    assert all((other["w"] == first["w"]).all() for other in others)
    np.testing.assert_allclose(own["w"], first["w"])


def test_an_update_needs_a_gradient_of_all_workers(pool: Pool):
    def failing(model: Model, x: np.ndarray, y: np.ndarray) -> Any:
        if (y == Y[-1]).any():
            raise ArithmeticError("the last row")
        return loss(model, x, y)

    gradient, update = pool.gradient_and_update(start(), failing, "sgd")
    for act in (update, update.serial):
        with pytest.raises(InvalidArgument, match="no gradient to update with"):
            act()
    gradient(X, Y, batch=slice(0, 9))
    with pytest.raises(ArithmeticError, match="the last row"):
        gradient(X, Y)
    with pytest.raises(InvalidArgument, match="Call the gradient function first"):
        update()
    assert all((model["w"] == 0).all() for model in values(pool, gradient))
    gradient(X, Y, batch=9)
    assert update() == 1
    with pytest.raises(InvalidArgument, match="no gradient to update with"):
        update()


def test_parameters_of_two_dtypes_have_no_flat_gradient(pool: Pool):
    model = {"w": np.zeros(3), "b": np.zeros(1, np.float32)}
    gradient, _ = pool.gradient_and_update(model, loss, "sgd")
    with pytest.raises(InvalidArgument, match="float64 and float32, but a flat gradient has one dtype"):
        gradient(X, Y)


def test_a_module_is_updated_with_what_is_in_the_vector(pool: Pool):
    torch = pytest.importorskip("torch")

    def cost(model: Any, x: Any, y: Any) -> Any:
        return ((model(x).squeeze(1) - y) ** 2).mean()

    torch.manual_seed(0)
    # The statistics of batches travel with the gradient, but are no part of it.
    layers = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
    module = torch.nn.Sequential(*layers).eval()
    x, y = torch.Tensor(X), torch.Tensor(Y)
    gradient, update = pool.gradient_and_update(module, cost, "sgd", lr=1.0)
    before = [p.detach().clone() for p in module.parameters()]
    assert gradient(x, y) == pytest.approx(gradient.serial(x, y), rel=1e-5)
    clipped = pool.function(clip)
    norms = clipped(gradient.flat, 0.25), clipped.serial(gradient.flat, 0.25)
    assert norms[0] == pytest.approx(norms[1] * 3, rel=1e-5)
    update(), update.serial()
    for after in (pool.get(gradient.model), module):
        moved = torch.cat([(p - old).flatten() for p, old in zip(after.parameters(), before, strict=True)])
        assert moved.norm().item() == pytest.approx(0.25, rel=1e-4)
        assert len(moved) == pool.shapes(gradient.flat)[0][0]
