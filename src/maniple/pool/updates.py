"""Eight first-order updates of parameters `p` by gradients `g`, in place; in torch the same by torch.optim.

    sgd       p -= lr g
    momentum  v = m v + g;                 p -= lr v
    nesterov  v = m v + g;                 p -= lr (g + m v)
    adagrad   s += g^2;                    p -= lr g / (sqrt(s) + eps)
    rmsprop   s = a s + (1 - a) g^2;       p -= lr g / (sqrt(s) + eps)
    adadelta  s = r s + (1 - r) g^2;       d = g sqrt(u + eps) / sqrt(s + eps);  u = r u + (1 - r) d^2;  p -= lr d
    adam      v = b1 v + (1 - b1) g;       s = b2 s + (1 - b2) g^2;  p -= lr v^ / (sqrt(s^) + eps)
    adamax    v = b1 v + (1 - b1) g;       s = max(b2 s, |g| + eps);  p -= lr v^ / s

where v^ = v / (1 - b1^t), s^ = s / (1 - b2^t) and t counts the steps. Duchi et al. 2011 (adagrad), Tieleman and Hinton
2012 (rmsprop), Zeiler 2012 (adadelta), Kingma and Ba 2015 (adam, adamax).
"""

from collections.abc import Mapping

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument

_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.01},
    "momentum": {"lr": 0.01, "momentum": 0.9},
    "nesterov": {"lr": 0.01, "momentum": 0.9},
    "adagrad": {"lr": 0.01, "eps": 1e-10},
    "rmsprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6},
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adamax": {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
NAMES = tuple(_DEFAULTS)


def settings(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """All settings of an update, with those that are given."""
    if name not in _DEFAULTS:
        raise InvalidArgument(f"optimizer={name!r} is no update that is known (one of {', '.join(NAMES)}).")
    unknown = set(given) - set(_DEFAULTS[name])
    if unknown:
        known = ", ".join(_DEFAULTS[name])
        raise InvalidArgument(f"{name} has no setting {unknown.pop()!r} (it has {known}).")
    return _DEFAULTS[name] | dict(given)


class Update:
    """One of them, for named arrays, and what it remembers."""

    def __init__(self, name: str, given: Mapping[str, float]) -> None:
        self._act = getattr(self, f"_{name}")
        self._set = settings(name, given)
        self._steps = 0
        self._memory: dict[tuple[str, str], Array] = {}

    def apply(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Make one step."""
        self._steps += 1
        for name, p in parameters.items():
            p -= self._act(name, gradients[name], **self._set)

    def _past(self, what: str, name: str, g: Array) -> Array:
        return self._memory.setdefault((what, name), np.zeros_like(g))

    def _sgd(self, name: str, g: Array, *, lr: float) -> Array:
        del name
        return lr * g

    def _momentum(self, name: str, g: Array, *, lr: float, momentum: float) -> Array:
        v = self._past("v", name, g)
        v *= momentum
        v += g
        return lr * v

    def _nesterov(self, name: str, g: Array, *, lr: float, momentum: float) -> Array:
        v = self._momentum(name, g, lr=1.0, momentum=momentum)
        return lr * (g + momentum * v)

    def _adagrad(self, name: str, g: Array, *, lr: float, eps: float) -> Array:
        s = self._past("s", name, g)
        s += g * g
        return lr * g / (np.sqrt(s) + eps)

    def _rmsprop(self, name: str, g: Array, *, lr: float, alpha: float, eps: float) -> Array:
        s = self._past("s", name, g)
        _decay(s, alpha, g * g)
        return lr * g / (np.sqrt(s) + eps)

    def _adadelta(self, name: str, g: Array, *, lr: float, rho: float, eps: float) -> Array:
        s, u = self._past("s", name, g), self._past("u", name, g)
        _decay(s, rho, g * g)
        d = g * np.sqrt(u + eps) / np.sqrt(s + eps)
        _decay(u, rho, d * d)
        return lr * d

    def _adam(self, name: str, g: Array, *, lr: float, beta1: float, beta2: float, eps: float) -> Array:
        v, s = self._past("v", name, g), self._past("s", name, g)
        _decay(v, beta1, g)
        _decay(s, beta2, g * g)
        scale = np.sqrt(s / (1 - beta2**self._steps)) + eps
        return lr / (1 - beta1**self._steps) * v / scale

    def _adamax(self, name: str, g: Array, *, lr: float, beta1: float, beta2: float, eps: float) -> Array:
        v, s = self._past("v", name, g), self._past("s", name, g)
        _decay(v, beta1, g)
        np.maximum(beta2 * s, np.abs(g) + eps, out=s)
        return lr / (1 - beta1**self._steps) * v / s


def _decay(past: Array, rate: float, new: Array) -> None:
    past *= rate
    past += (1 - rate) * new
