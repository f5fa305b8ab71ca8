"""Training: gradients on each worker's rows, one mean of them over all workers, the same update everywhere.

g = sum_k n_k g_k / sum_k n_k      where worker k has n_k rows: exact for parts of different sizes
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maniple.adapters import Flat, adapt
from maniple.contracts import Array, Circle, Resident
from maniple.errors import InvalidArgument
from maniple.pool.outputs import named_pair
from maniple.pool.updates import Update, settings


class Training:
    """A model, its loss and its optimizer, in one process.

    Args:
        model: a torch module, or a dict of NumPy arrays.
        loss: `loss(model, *rows)` gives the mean over the rows: a tensor, or of a dict of arrays (loss, gradients).
        optimizer: the name of an update, or what makes a torch optimizer of a module's parameters.
    """

    def __init__(self, model: Any, loss: Callable[..., Any], optimizer: Any, given: Mapping[str, float]) -> None:
        self.model, self._loss = model, loss
        self._update: Update | None = None
        self.optimizer: Any = None
        if isinstance(model, dict):
            self._update = Update(optimizer, given)
        elif isinstance(optimizer, str):
            from maniple.adapters import optimizers

            self.optimizer = optimizers.optimizer(optimizer, settings(optimizer, given), model.parameters())
        else:
            self.optimizer = optimizer(model.parameters())
        self._adapter = adapt(model, self.optimizer)
        self._flat: Flat = self._adapter.gradients(norm="averaged")
        self._place: tuple[Circle, Resident] | None = None
        self._sum: dict[str, Array] = {}
        self._rows = 0

    def begin(self, rows: int) -> None:
        """There is a step with so many rows of this process."""
        self._rows, self._sum = rows, {}
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def learn(self, count: int, /, *rows: Any, **named: Any) -> float:
        """The loss on `count` of them; their gradient is added up."""
        share = count / self._rows if self._rows else 1.0
        if self._update is None:
            loss = self._loss(self.model, *rows, **named)
            (loss * share).backward()
            return float(loss.detach())
        output = self._loss(self.model, *rows, **named)
        loss, gradients = named_pair(output, self.model, "a loss of a dict of arrays (jax.value_and_grad(loss), say)")
        for name in self.model:
            term = np.array(gradients[name], self.model[name].dtype)
            term *= share  # in place: an array without axes stays one
            self._sum[name] = np.add(self._sum[name], term, out=term) if name in self._sum else term
        return float(loss)

    def average(self, circle: Circle | None) -> None:
        """Have the mean of the gradient over all processes."""
        if self._update is not None and not self._sum:  # no rows here
            self._sum = {name: np.zeros_like(value) for name, value in self.model.items()}
        given = None if self._update is None else self._sum
        if circle is not None:
            resident = self._resident(circle)
            self._flat.collect(given)
            resident.all_reduce("mean", weight=float(self._rows))
            self._flat.deliver(given)

    def step(self) -> None:
        """Change the model by the gradient."""
        if self._update is not None:
            self._update.apply(self.model, self._sum)
        else:
            self.optimizer.step()

    def _resident(self, circle: Circle) -> Resident:
        if self._place is None or self._place[0] is not circle:
            resident = circle.reside(self._flat.sizes)
            self._flat.place(resident.flat)
            self._place = circle, resident
        return self._place[1]


def check_optimizer(model: Any, optimizer: Any, given: Mapping[str, float]) -> None:
    """Raise InvalidArgument for what cannot train this model."""
    if isinstance(optimizer, str):
        settings(optimizer, given)
    elif isinstance(model, dict):
        raise InvalidArgument("a dict of arrays is trained by the name of an update, such as 'adam'. Pass its name.")
    elif given or not callable(optimizer):
        raise InvalidArgument(
            "optimizer is the name of an update with its settings, or a function that makes a torch optimizer of "
            "parameters: functools.partial(torch.optim.SGD, lr=0.1)."
        )
