"""The first-order updates of a pool (`pool.updates`) as torch optimizers."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, optim

_KINDS = {"adagrad": "Adagrad", "rmsprop": "RMSprop", "adadelta": "Adadelta", "adam": "Adam", "adamax": "Adamax"}


def optimizer(name: str, settings: Mapping[str, float], parameters: Iterable[Tensor]) -> optim.Optimizer:
    """The optimizer that makes this update."""
    known: dict[str, Any] = {key: value for key, value in settings.items() if not key.startswith("beta")}
    if "beta1" in settings:
        known["betas"] = settings["beta1"], settings["beta2"]
    if name == "nesterov":
        known["nesterov"] = True
    return getattr(optim, _KINDS.get(name, "SGD"))(parameters, **known)
