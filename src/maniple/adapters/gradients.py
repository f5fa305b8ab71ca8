"""The gradients of a torch module as one flat vector per dtype.

    float32   [g_0 g_1 ... g_k | buffers | used_0 ... used_k]

The vectors are given by whoever averages them; on the CPU, a parameter's `.grad` becomes a view of its place there, so
the average is where the optimizer looks for it. `used_i` is 1 where this worker has a gradient: a parameter that no
worker has used keeps none, as in training alone.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, dtype_name

_USED = "used"
_copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009 - one call for all, as in torch's optimizers


class Gradients:
    """The gradients of the parameters that are trained, and buffers that are averaged with them."""

    def __init__(self, module: nn.Module, *, buffers: bool, trained: Callable[[], Iterable[Tensor]]) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise InvalidArgument("no parameter of the model requires a gradient (0, at least 1 is needed).")
        self._module, self._trained = module, trained
        self._parameters = [p for _, p in named]
        self._known = {id(p) for p in self._parameters}
        # Only what is learned from batches: other buffers are constants.
        running = [b for name, b in module.named_buffers() if name.rpartition(".")[2].startswith("running_")]
        self._buffers = [b for b in running if b.is_floating_point()] if buffers else []
        entries = [Entry(name, tuple(p.shape), dtype_name(p)) for name, p in named]
        entries += [Entry(f"buffer.{i}", tuple(b.shape), dtype_name(b)) for i, b in enumerate(self._buffers)]
        entries.append(Entry(_USED, (len(named),), entries[0].dtype))
        self._layout = Layout(entries)
        self._views: list[Tensor] = []

    def _check(self) -> None:
        """Raise InvalidArgument if a parameter that is trained has a gradient and no place here."""
        for parameter in [p for p in self._trained() if id(p) not in self._known]:
            if parameter.grad is not None:
                names = {id(p): name for name, p in self._module.named_parameters()}
                raise InvalidArgument(
                    f"{names.get(id(parameter), 'a parameter of the optimizer')!r} has a gradient that is not "
                    "averaged: it did not require one, or was no part of the model, when that was shared. Share the "
                    "model after it is built and unfrozen."
                )

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the flat vectors."""
        return self._layout.sizes

    def place(self, flat: dict[str, Any]) -> None:
        """Use these vectors."""
        tensors = {dtype: v if isinstance(v, Tensor) else torch.from_numpy(v) for dtype, v in flat.items()}
        self._views = [
            tensors[dtype][start:stop].view(entry.shape)
            for entry, (dtype, start, stop) in zip(self._layout.entries, self._layout.places, strict=True)
        ]

    @property
    def are_delivered(self) -> bool:
        """No backward pass has made new ones since the last average, as far as one can tell."""
        pairs = zip(self._parameters, self._views, strict=False)
        return not any(
            p.grad is not None
            and p.dtype == view.dtype
            and p.device == view.device
            and p.grad.data_ptr() != view.data_ptr()
            for p, view in pairs
        )

    @torch.no_grad()
    def collect(self, given: Any = None) -> None:
        """Bring this worker's gradients into the vectors."""
        refuse_given(given)
        self._check()
        self._bring(range(len(self._parameters)))
        self._bring_rest()

    def _bring(self, which: Iterable[int]) -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for i in which:
            grad, view = self._parameters[i].grad, self._views[i]
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                raise InvalidArgument(
                    f"{self._layout.entries[i].name!r} has a sparse gradient, which has no place in a flat vector. "
                    "Build its layer with sparse=False."
                )
            elif grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(grad)
        _copy(targets, sources)

    def _bring_rest(self) -> None:
        _copy(self._views[len(self._parameters) : -1], self._buffers)
        used = [parameter.grad is not None for parameter in self._parameters]
        if all(used):  # as in most models: nothing to be made
            self._views[-1].fill_(1)
        else:
            self._views[-1].copy_(torch.tensor(used))

    @torch.no_grad()
    def deliver(self, given: Any = None) -> None:
        """Give the average to the parameters, for their optimizer."""
        del given
        count = len(self._parameters)
        is_used: Sequence[bool] = (self._views[-1] > 0).tolist()
        for i, parameter in enumerate(self._parameters):
            view = self._views[i]
            if not is_used[i]:
                parameter.grad = None
            elif view.dtype == parameter.dtype and view.device == parameter.device:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.device, parameter.dtype)
            else:
                parameter.grad.copy_(view)
        _copy(self._buffers, self._views[count:-1])


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        _copy_all(targets, sources)


def refuse_given(given: Any) -> None:
    """A torch module has its own gradients."""
    if given is not None:
        raise InvalidArgument("reduce() takes no gradients for a torch module: it has them. Leave them out.")
