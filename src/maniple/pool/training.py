"""Training steps of a pool: the gradient of a loss, its mean over all workers, and the optimizer's update.

A step is one call, or two: after the first, each worker has the mean gradient in one flat vector, and the second makes
the update with what is in there.

Parameters `p` that are NumPy arrays are updated in place by gradients `g`; torch modules use torch.optim instead.

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

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from maniple.adapters import FlatGradients, adapt
from maniple.contracts import Array, Collectives, ResidentVectors
from maniple.errors import InvalidArgument
from maniple.pool.outputs import split_pair


class TrainingPhase(Enum):
    """The part of a training step that a function makes."""

    STEP = "gradient and update"
    GRADIENT = "gradient"
    UPDATE = "update"


class TrainingFunction:
    """A model, its loss and its optimizer in one process.

    Args:
        model: a torch module, or a dict of NumPy arrays.
        loss: `loss(model, *rows)` returns the mean over the rows: a tensor, or (loss, gradients) for a dict of arrays.
        optimizer: the name of an update, or a function that makes a torch optimizer from a module's parameters.
    """

    def __init__(self, model: Any, loss: Callable[..., Any], optimizer: Any, given: Mapping[str, float]) -> None:
        self.model, self._loss = model, loss
        self._update: ArrayUpdate | None = None
        self.optimizer: Any = None
        if isinstance(model, dict):
            self._update = ArrayUpdate(optimizer, given)
        elif isinstance(optimizer, str):
            from maniple.adapters import torch_optimizer

            self.optimizer = torch_optimizer.optimizer(optimizer, settings(optimizer, given), model.parameters())
        else:
            self.optimizer = optimizer(model.parameters())
        self._flat: FlatGradients = adapt(model, self.optimizer).gradients(norm="averaged")
        self._resident: tuple[Collectives, ResidentVectors] | None = None
        self._vectors: dict[str, Array] = {}  # the flat gradients by dtype, where they were placed
        self._sum: dict[str, Array] = {}
        self._rows = self._updates = 0
        self._is_ready = False  # the flat gradient is complete in all processes

    def begin(self, rows: int) -> None:
        """Begin a step in which this process has `rows` rows."""
        self._rows, self._sum, self._is_ready = rows, {}, False
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def learn(self, count: int, /, *rows: Any, **named: Any) -> float:
        """Add the gradient of `count` rows, and return their loss."""
        share = count / self._rows if self._rows else 1.0
        if self._update is None:
            loss = self._loss(self.model, *rows, **named)
            (loss * share).backward()
            return float(loss.detach())
        output = self._loss(self.model, *rows, **named)
        loss, gradients = split_pair(output, self.model, "a loss of a dict of arrays (jax.value_and_grad(loss), say)")
        for name in self.model:
            term = np.array(gradients[name], self.model[name].dtype)
            term *= share  # in place: an array without axes stays an array
            self._sum[name] = np.add(self._sum[name], term, out=term) if name in self._sum else term
        return float(loss)

    def average(self, collectives: Collectives | None, phase: TrainingPhase) -> None:
        """Average the gradient over all processes, weighted by rows."""
        if self._update is not None and not self._sum:  # this process has no rows
            self._sum = {name: np.zeros_like(value) for name, value in self.model.items()}
        if collectives is None and phase is TrainingPhase.STEP:
            return
        self._place(collectives)
        self._flat.collect(self._given)
        if self._resident is not None:
            self._resident[1].all_reduce("mean", weight=float(self._rows))
        if phase is TrainingPhase.STEP:
            self._flat.deliver(self._given)

    def commit(self, phase: TrainingPhase) -> None:
        """Update the model, or note that the flat gradient is complete. All processes have succeeded so far."""
        if phase is TrainingPhase.GRADIENT:
            self._is_ready = True
            return
        if phase is TrainingPhase.UPDATE:
            self._flat.deliver(self._given)
        self._is_ready = False
        self._updates += 1
        if self._update is not None:
            self._update.apply(self.model, self._sum)
        else:
            self.optimizer.step()

    def next_update(self) -> int:
        """The number of the update that `commit` is about to make; InvalidArgument without a gradient for it."""
        if not self._is_ready:
            raise InvalidArgument(
                "there is no gradient to update with: none was computed since the last update, or the call failed. "
                "Call the gradient function first."
            )
        return self._updates + 1

    @property
    def flat_gradient(self) -> Array:
        """The gradient of all parameters as one vector. What is written there is used by the update."""
        gradients = self._flat.layout.places[: self._flat.gradient_count]
        sizes = {dtype: stop for dtype, _, stop in gradients}
        if len(sizes) > 1:
            raise InvalidArgument(
                f"the parameters are of {' and '.join(sizes)}, but a flat gradient has one dtype. Convert the model, "
                "with model.float() for instance, or use train_function."
            )
        ((dtype, size),) = sizes.items()
        return self._vectors[dtype][:size]

    @property
    def _given(self) -> dict[str, Array] | None:
        """The gradients that the loss has returned; None for a module, whose parameters have them."""
        return None if self._update is None else self._sum

    def _place(self, collectives: Collectives | None) -> None:
        """Put the flat vectors where the collectives reduce them, or into memory of this process."""
        if collectives is None:
            if not self._vectors:
                sizes = self._flat.layout.sizes
                self._vectors = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
                self._flat.place(self._vectors)
        elif self._resident is None or self._resident[0] is not collectives:
            self._resident = collectives, collectives.reside(self._flat.layout.sizes)
            self._vectors = self._resident[1].flat
            self._flat.place(self._vectors)


def check_optimizer(model: Any, optimizer: Any, given: Mapping[str, float]) -> None:
    """Raise InvalidArgument for an optimizer that cannot train this model."""
    if isinstance(optimizer, str):
        settings(optimizer, given)
    elif isinstance(model, dict):
        raise InvalidArgument(
            f"a dict of arrays needs the name of an update, but optimizer is {optimizer!r}. Pass one of "
            f"{', '.join(NAMES)}."
        )
    elif given or not callable(optimizer):
        raise InvalidArgument(
            f"optimizer={optimizer!r} with the settings {dict(given)} cannot be used. Pass the name of an update with "
            "its settings, or a function of parameters alone: functools.partial(torch.optim.SGD, lr=0.1)."
        )


NAMES = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamax")


def settings(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """All settings of an update: the given ones, and defaults."""
    if name not in NAMES:
        raise InvalidArgument(f"optimizer={name!r} is unknown. Use one of {', '.join(NAMES)}.")
    defaults: dict[str, float] = getattr(ArrayUpdate, f"_{name}").__kwdefaults__
    if unknown := set(given) - set(defaults):
        raise InvalidArgument(f"{name} has no setting {unknown.pop()!r}. It has {', '.join(defaults)}.")
    return defaults | dict(given)


class ArrayUpdate:
    """One of the updates above for named arrays, with its state."""

    def __init__(self, name: str, given: Mapping[str, float]) -> None:
        self._update, self._settings = getattr(self, f"_{name}"), settings(name, given)
        self._steps = 0
        self._state: dict[tuple[str, str], Array] = {}

    def apply(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Make one step."""
        self._steps += 1
        for name, p in parameters.items():
            p -= self._update(name, gradients[name], **self._settings)

    # Each method of an update's name returns the change of a parameter; its keywords are the settings.

    def _sgd(self, _name: str, g: Array, *, lr: float = 0.01) -> Array:
        return lr * g

    def _momentum(self, name: str, g: Array, *, lr: float = 0.01, momentum: float = 0.9) -> Array:
        v = self._moment("v", name, g)
        v *= momentum
        v += g
        return lr * v

    def _nesterov(self, name: str, g: Array, *, lr: float = 0.01, momentum: float = 0.9) -> Array:
        v = self._momentum(name, g, lr=1.0, momentum=momentum)
        return lr * (g + momentum * v)

    def _adagrad(self, name: str, g: Array, *, lr: float = 0.01, eps: float = 1e-10) -> Array:
        s = self._moment("s", name, g)
        s += g * g
        return lr * g / (np.sqrt(s) + eps)

    def _rmsprop(self, name: str, g: Array, *, lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8) -> Array:
        s = self._decayed("s", name, alpha, g * g)
        return lr * g / (np.sqrt(s) + eps)

    def _adadelta(self, name: str, g: Array, *, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6) -> Array:
        s = self._decayed("s", name, rho, g * g)
        d = g * np.sqrt(self._moment("u", name, g) + eps) / np.sqrt(s + eps)
        self._decayed("u", name, rho, d * d)
        return lr * d

    def _adam(
        self, name: str, g: Array, *, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
    ) -> Array:
        v, s = self._decayed("v", name, beta1, g), self._decayed("s", name, beta2, g * g)
        scale = np.sqrt(s / (1 - beta2**self._steps)) + eps
        return lr / (1 - beta1**self._steps) * v / scale

    def _adamax(
        self, name: str, g: Array, *, lr: float = 2e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
    ) -> Array:
        v, s = self._decayed("v", name, beta1, g), self._moment("s", name, g)
        np.maximum(beta2 * s, np.abs(g) + eps, out=s)
        return lr / (1 - beta1**self._steps) * v / s

    def _moment(self, what: str, name: str, g: Array) -> Array:
        return self._state.setdefault((what, name), np.zeros_like(g))

    def _decayed(self, what: str, name: str, rate: float, new: Array) -> Array:
        past = self._moment(what, name, new)
        past *= rate
        past += (1 - rate) * new
        return past
