"""Rows, outputs and updates of a pool, without processes."""

import itertools
from typing import Any

import numpy as np
import pytest

from maniple.errors import InvalidArgument
from maniple.pool.function import _STREAMING_BYTES, part_of, select_rows, selection_for, take_rows
from maniple.pool.outputs import OutputReducer, check_ops
from maniple.pool.training import NAMES, ArrayUpdate, settings
from tests.unit.engines import engine


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_cover_all_rows_once_and_differ_by_one_at_most(count: int, parts: int):
    for rows in (range(count), np.random.default_rng(0).permutation(count)):
        pieces = [part_of(rows, parts, k) for k in range(parts)]
        assert np.concatenate([np.asarray(piece, int) for piece in pieces]).tolist() == list(rows)
        sizes = [len(piece) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_many_rows_are_taken_line_by_line_and_are_the_same(dtype: str, kind: str):
    engine("numba")
    random = np.random.default_rng(0)
    values = random.integers(0, 100, (2100, 8192), np.uint8).view(dtype).reshape(2100, 8, -1)
    indices = random.integers(0, 2100, 2100)  # some twice
    assert values.nbytes >= _STREAMING_BYTES
    given: Any = engine("torch").from_numpy(values) if kind == "tensor" else values
    got = take_rows(given, indices)
    assert type(got) is type(given)
    assert np.array_equal(np.asarray(got), values[indices])
    odd = values.reshape(2100, -1)[:, :-1]  # rows that are no whole lines, and not in one piece
    assert np.array_equal(take_rows(odd, indices), odd[indices])


@pytest.mark.parametrize(
    "batch",
    [
        None,
        0,
        4,
        10,
        slice(2, 7),
        slice(None, None, -1),
        slice(8, 1, -3),
        slice(3, 3),
        [3, 3, -1, 0],
        np.arange(10) % 2 == 0,
    ],
)
def test_selected_rows_are_those_that_numpy_selects(batch: Any):
    values = np.arange(30).reshape(10, 3)
    expected = values if batch is None else values[:batch] if isinstance(batch, int) else values[batch]
    rows = select_rows(batch, 10)
    np.testing.assert_array_equal(take_rows(values, rows), expected)
    for parts in (1, 2, 3):
        pieces = [take_rows(values, part_of(rows, parts, k)) for k in range(parts)]
        np.testing.assert_array_equal(np.concatenate(pieces), expected)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (11, "batch=11 is not a number of rows of 10"),
        (-1, "batch=-1 is not a number of rows"),
        (2.5, "selects no rows"),
        ([10], "batch has the row 10, but there are 10"),
        ([-11], "batch has the row -11"),
        ([[1]], "which selects no rows"),
        ([True, False], "which selects no rows"),
        ([0.5], "which selects no rows"),
    ],
)
def test_what_selects_no_rows_is_refused(batch: Any, text: str):
    with pytest.raises(InvalidArgument, match=text.replace("[", r"\[")):
        select_rows(batch, 10)


def test_each_worker_may_have_a_selection_of_its_own():
    assert selection_for([slice(2), [1, 2]], 1, 2) == [1, 2]
    assert selection_for([1, 2], 1, 2) == [1, 2]
    assert selection_for(slice(3), 1, 2) == slice(3)
    with pytest.raises(InvalidArgument, match="selections for 1 workers, but there are 2"):
        selection_for([slice(2)], 0, 2)


@pytest.mark.parametrize("op", ["mean", "sum", "prod", "min", "max", "gather"])
@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 5), (0, 2, 3, 5)])
def test_outputs_of_parts_make_the_output_of_all(op: str, cuts: tuple[int, ...]):
    values = np.random.default_rng(1).normal(size=(5, 3))
    act = {
        "gather": lambda x: x * 2,
        "mean": lambda x: x.mean(0),
        "sum": lambda x: x.sum(0),
        "prod": lambda x: x.prod(0),
    }
    act |= {"min": lambda x: x.min(0), "max": lambda x: x.max(0)}
    total, outer = OutputReducer({"a": op, "b": (op, "none")}), OutputReducer({"a": op, "b": (op, "none")})
    for low, high in itertools.pairwise(cuts):
        out = act[op](values[low:high])
        total.add({"a": out, "b": (out, low)}, high - low)
    outer.add(total.value(), total.weight, is_reduced=True)
    assert outer.weight == 5
    np.testing.assert_allclose(outer.value()["a"], act[op](values), rtol=1e-12)
    np.testing.assert_allclose(outer.value()["b"][0], act[op](values), rtol=1e-12)
    assert outer.value()["b"][1] == list(cuts[:-1])


def test_whole_numbers_are_summed_exactly_and_their_mean_is_a_float():
    total, mean = OutputReducer("sum"), OutputReducer("mean")
    for value in (2**62, -(2**62) + 3, 5):
        total.add(np.int64(value), 1)
    for value, weight in ((1, 3), (2, 1)):
        mean.add(value, weight)
    assert total.value() == 8
    assert mean.value() == 1.25


def test_tensors_are_put_together_as_tensors():
    torch = pytest.importorskip("torch")
    for op, expected in (
        ("mean", [1.5, 2.5]),
        ("max", [2.0, 3.0]),
        ("min", [1.0, 2.0]),
        ("gather", [1.0, 2.0, 2.0, 3.0]),
    ):
        total = OutputReducer(op)
        for one in ([1.0, 2.0], [2.0, 3.0]):
            total.add(torch.tensor(one), 1)
        assert torch.equal(total.value(), torch.tensor(expected)), op


@pytest.mark.parametrize(
    ("ops", "outputs", "text"),
    [
        ({"a": "mean"}, [{"b": 1.0}], "has the parts 'b', but reduce"),
        (("mean",), [(1.0, 2.0)], "has the parts 0, 1"),
        (("mean", "sum"), [1.0], "is a float, but reduce"),
        ("mean", ["text"], None),
        ("mean", ["text", "more"], "is a str, which has no mean"),
        ("mean", [np.ones(2), np.ones(3)], "has different shapes"),
    ],
)
def test_outputs_that_do_not_fit_their_ops_are_refused(ops: Any, outputs: list[Any], text: str | None):
    total = OutputReducer(ops)

    def put() -> None:
        for output in outputs:
            total.add(output, 1)
        total.value()

    with pytest.raises(InvalidArgument, match=text):
        put()
    with pytest.raises(InvalidArgument, match="average"):
        check_ops({"x": "average"})


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_those_of_torch(name: str):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    parameters = {"w": random.normal(size=(3, 2)), "b": random.normal(size=2)}
    tensors = {key: torch.tensor(value, requires_grad=True) for key, value in parameters.items()}
    from maniple.adapters.torch_optimizer import optimizer

    ours, theirs = ArrayUpdate(name, {"lr": 0.05}), optimizer(name, settings(name, {"lr": 0.05}), tensors.values())
    for _ in range(20):
        gradients = {key: random.normal(size=value.shape) for key, value in parameters.items()}
        ours.apply(parameters, gradients)
        for key, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[key])
        theirs.step()
    for key, value in parameters.items():
        np.testing.assert_allclose(value, tensors[key].detach().numpy(), rtol=1e-9, atol=1e-12)
