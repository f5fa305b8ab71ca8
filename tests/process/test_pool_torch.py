"""Torch in a pool: training is that of one process, and tensors and modules go where arrays go."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from maniple import Pool
from maniple.errors import InvalidArgument

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402 - after it is known to be there

pytestmark = [pytest.mark.process]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as made:
        yield made


def build(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 3))


def sets(count: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=made), torch.randint(0, 3, (count,), generator=made)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def states(pool: Pool, train: Any) -> list[dict[str, Tensor]]:
    """The model of each worker."""
    return [pool.get(train.model, rank).state_dict() for rank in range(pool.n)]


def assert_identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# All rows; fewer than workers; an odd number, in any order and twice; every third.
BATCHES = (None, 1, [3, 1, 4, 1, 5], slice(None, None, 3))


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("momentum", {"lr": 0.1}),
        ("adam", {"lr": 0.01}),
        (functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), {}),
    ],
    ids=["momentum", "adam", "factory"],
)
def test_training_of_a_module_is_that_of_one_process(
    pool: Pool, optimizer: Any, settings: dict[str, float], slices: int
):
    model, (x, y) = build(), sets(23)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train = pool.train_function(model, loss, optimizer, **settings)
    data = pool.data(x), pool.data(y)
    for batch in BATCHES * 2:
        together = train(*data, batch=batch, num_slices=slices)
        assert together == pytest.approx(train.serial(x, y, batch=batch), rel=1e-5)
    one, other = states(pool, train)
    assert_identical(one, other)
    for name, value in train.model.local.state_dict().items():
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(value, first[name], rtol=1e-3), f"{name} was not trained"


def test_statistics_of_batches_are_the_same_on_all_workers(pool: Pool):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    train = pool.train_function(model, loss, "sgd", lr=0.1)
    x, y = pool.data(torch.randn(21, 1, 6, 6)), pool.data(torch.randint(0, 3, (21,)))
    for batch in (None, [0, 1, 2, 3, 4], 1, 12):  # of 1 row, one worker has none
        train(x, y, batch=batch, num_slices=2)
    one, other = ({name: v for name, v in state.items() if v.is_floating_point()} for state in states(pool, train))
    assert "1.running_var" in one
    assert_identical(one, other)
    assert one["1.running_mean"].abs().max() > 0.01  # they were learned


def test_a_model_of_handles_is_trained_and_tested_in_place(pool: Pool):
    handle = pool.replicate(build())
    x, y = sets(40)
    train = pool.train_function(handle, loss, "adam", lr=0.01)
    assert train.model is handle
    test = pool.function(loss, scatter=("x", "y"), reduce="mean")
    before = test(handle, x, y, num_slices=3)
    own = pool.scatter(x), pool.scatter(y)
    for epoch in range(20):
        train(*own, batch_s=np.random.default_rng(epoch).permutation(20)[:15])
    after = test(handle, x, y, num_slices=3)
    assert isinstance(after, Tensor)
    assert not after.requires_grad
    assert after < before - 0.1
    torch.testing.assert_close(after, loss(pool.get(handle, 1), x, y).detach())


def test_a_step_without_rows_is_refused_and_changes_nothing(pool: Pool):
    train = pool.train_function(build(), loss, "momentum", lr=0.1)
    x, y = sets(8)
    train(x, y)
    before = states(pool, train)[0]
    for step in (train, train.serial):
        with pytest.raises(InvalidArgument, match="a step needs rows"):
            step(x, y, batch=0)
    for state in states(pool, train):
        assert_identical(state, before)


@pytest.mark.parametrize("rows", [5, 20_001])  # small ones travel in the message, large ones in shared memory
@pytest.mark.parametrize("is_data", [False, True])
def test_tensors_are_scattered_and_gathered_as_tensors(pool: Pool, rows: int, is_data: bool):
    x = torch.arange(rows * 3.0).reshape(3, rows).T  # not in one piece

    def parts(x: Tensor, w: Tensor) -> dict[str, Any]:
        assert isinstance(x, Tensor)
        return {"rows": x @ w, "max": (x.amax(0), x.double().sum()), "count": len(x)}

    function = pool.function(
        parts, scatter="x", broadcast="w", reduce={"rows": "gather", "max": ("max", "sum"), "count": "sum"}
    )
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    given = pool.data(x) if is_data else x
    for batch, chosen in ((None, x), (order.numpy(), x[order]), (slice(None, None, -2), x.flip(0)[::2])):
        found = function(given, w, batch=batch, num_slices=2)
        torch.testing.assert_close(found["rows"], (chosen @ w).detach())
        torch.testing.assert_close(found["max"], (chosen.amax(0), chosen.double().sum()))
        assert found["count"] == len(chosen)
    if is_data:
        given.free()


def test_tensors_are_kept_by_the_workers(pool: Pool):
    own = pool.scatter(torch.arange(7))
    assert pool.lengths(own) == [3, 4]
    assert torch.equal(pool.gather(own), torch.arange(7))
    everywhere = pool.all_gather(own)
    assert torch.equal(pool.get(everywhere, 1), torch.arange(7))
    double = pool.function(lambda x: x * 2, scatter="x", reduce="gather")
    assert torch.equal(double(own, batch_s=slice(None, None, 2)), torch.tensor([0, 4, 6, 10]))


def test_modules_of_all_workers_become_their_mean(pool: Pool):
    def different() -> nn.Module:
        import os

        torch.manual_seed(os.getpid())
        model = build(norm=True)
        with torch.no_grad():
            for value in model.parameters():
                value += torch.randn(())
        model[1].num_batches_tracked += 7
        return model

    handle = pool.replicate(different)
    before = [pool.get(handle, rank) for rank in (0, 1)]
    pool.all_reduce(handle)
    after = [pool.get(handle, rank) for rank in (0, 1)]
    assert_identical(after[0].state_dict(), after[1].state_dict())
    assert after[0][1].num_batches_tracked == 7  # a count has no mean
    for one, other, mean in zip(before[0].parameters(), before[1].parameters(), after[0].parameters(), strict=True):
        torch.testing.assert_close(mean, (one + other) / 2)
        assert mean.requires_grad
    pool.set(handle, 1, {name: value + 1 for name, value in after[0].state_dict().items()})
    pool.broadcast(handle, root=1)
    torch.testing.assert_close(pool.get(handle, 0)[0].bias, after[0][0].bias + 1)
