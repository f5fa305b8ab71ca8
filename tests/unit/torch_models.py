"""Torch modules, and how the tests of the adapters train and compare them."""

import numpy as np

from maniple.adapters import adapt
from tests.unit.engines import engine

torch = engine("torch")
nn = torch.nn


def names(model) -> list[str]:
    return [entry.name for entry in model.entries]


def train(module, optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * p).sum() + p.sum() for p in module.parameters()).backward()
        optimizer.step()


def assert_close(value: "torch.Tensor", expected: "torch.Tensor") -> None:
    """As torch.testing's, which takes most of a second to import."""
    assert value.dtype == expected.dtype
    a, b = (tensor.detach().double().numpy() for tensor in (value, expected))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def linear() -> "nn.Module":
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def names_of(model, **settings) -> list[str]:
    return [entry.name for entry in adapt(model, **settings).entries]


def model_of_two() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Linear(2, 1))


PARAMETERS_OF_TWO = ["0.weight", "0.bias", "1.weight", "1.bias"]
