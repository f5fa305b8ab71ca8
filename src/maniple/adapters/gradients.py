"""The gradients of a torch module as one flat vector per dtype.

    float32   [g_0 g_1 ... g_k | buffers | used_0 ... used_k | changed_0 ... changed_b]

The vectors are given by whoever averages them; on the CPU, a parameter's `.grad` becomes a view of its place there, so
the average is where the optimizer looks for it. `used_i` is 1 where this worker has a gradient: a parameter that no
worker has used keeps none, as in training alone. `changed_j` is 1 where this worker's buffer is not what the last round
has left: a buffer that no worker has changed is a constant, which must not be rounded by a mean.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, dtype_name

_FLAGS = "maniple.used"  # a parameter may be called `used`
_copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009 - one call for all, as in torch's optimizers


class Gradients:
    """The gradients of the parameters that are trained, and buffers that are averaged with them."""

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: Mapping[str, Callable[[], Tensor]],
        trained: Callable[[], Iterable[Tensor]],
        local: Set[str] = frozenset(),
    ) -> None:
        """`buffers` look up those that are averaged: a module may replace them while it trains. The gradients of
        parameters with `local` names are each worker's own."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and name not in local]
        if not named:
            raise InvalidArgument(
                "no parameter that is shared requires a gradient (0, at least 1 is needed). Unfreeze one, or average "
                "parameters: LocalSGD(k)."
            )
        self._local = local
        self._module, self._trained = module, trained
        self._parameters = [p for _, p in named]
        self._known = {id(p) for p in self._parameters}
        self._buffers = list(buffers.values())
        entries = [Entry(name, tuple(p.shape), dtype_name(p)) for name, p in named]
        for name, lookup in buffers.items():
            entries.append(Entry(name, tuple(lookup().shape), dtype_name(lookup())))
        entries.append(Entry(_FLAGS, (len(named) + len(buffers),), entries[0].dtype))
        self.layout = Layout(entries)
        self._views: list[Tensor] = []

    def _check(self) -> None:
        """Raise InvalidArgument if a parameter that is trained has a gradient and no place here."""
        for parameter in [p for p in self._trained() if id(p) not in self._known]:
            if parameter.grad is not None:
                names = {id(p): name for name, p in self._module.named_parameters()}
                if names.get(id(parameter)) in self._local:
                    continue
                raise InvalidArgument(
                    f"{names.get(id(parameter), 'a parameter of the optimizer')!r} has a gradient that is not "
                    "averaged: it did not require one, or was no part of the model, when that was shared. Share the "
                    "model after it is built and unfrozen."
                )

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the flat vectors."""
        return self.layout.sizes

    def place(self, flat: dict[str, Any]) -> None:
        """Use these vectors."""
        tensors = {dtype: v if isinstance(v, Tensor) else torch.from_numpy(v) for dtype, v in flat.items()}
        self._views = [
            tensors[dtype][start:stop].view(entry.shape)
            for entry, (dtype, start, stop) in zip(self.layout.entries, self.layout.places, strict=True)
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
                    f"{self.layout.entries[i].name!r} has a sparse gradient, which has no place in a flat vector. "
                    "Build its layer with sparse=False."
                )
            elif grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(grad)
        _copy(targets, sources)

    def _bring_rest(self) -> None:
        buffers, views = [lookup() for lookup in self._buffers], self._buffer_views
        used = [parameter.grad is not None for parameter in self._parameters]
        flags = torch.tensor(used + [not _equal(b, v) for b, v in zip(buffers, views, strict=True)])
        self._views[-1].copy_(flags)
        _copy(views, buffers)

    @property
    def _buffer_views(self) -> list[Tensor]:
        return self._views[len(self._parameters) : -1]

    @torch.no_grad()
    def begin(self) -> None:
        """Note the buffers as they are, before the first round."""
        _copy(self._buffer_views, [lookup() for lookup in self._buffers])

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Some of these parameters have their gradients averaged here."""
        return any(id(parameter) in self._known for parameter in parameters)

    def on_gradient(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` for each gradient that a backward pass adds; gives back what undoes it."""

        def note(_: Tensor) -> None:
            act()

        handles = [p.register_post_accumulate_grad_hook(note) for p in self._parameters]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    @torch.no_grad()
    def spoil(self, entry: int) -> bool:
        """Let all workers see that a gradient was not finite; False if `entry` is none that a step is decided by."""
        if entry >= len(self._parameters):
            return False
        self._views[entry].fill_(math.nan)
        self._views[-1][entry] = 1
        return True

    @torch.no_grad()
    def drop(self) -> None:
        """Nobody had anything to give: no parameter has a gradient, and the buffers stay as they are."""
        self._views[-1].zero_()

    @torch.no_grad()
    def deliver(self, given: Any = None) -> None:
        """Give the average to the parameters, for their optimizer."""
        del given
        flags: list[bool] = (self._views[-1] > 0).tolist()
        for i, parameter in enumerate(self._parameters):
            view = self._views[i]
            if not flags[i]:
                parameter.grad = None
            elif view.dtype == parameter.dtype and view.device == parameter.device:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.device, parameter.dtype)
            else:
                parameter.grad.copy_(view)
        for lookup, view, is_changed in zip(
            self._buffers, self._buffer_views, flags[len(self._parameters) :], strict=True
        ):
            lookup().copy_(view) if is_changed else view.copy_(lookup())


def _equal(buffer: Tensor, view: Tensor) -> bool:
    return torch.equal(buffer.to(view.device, view.dtype), view)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        _copy_all(targets, sources)


def refuse_given(given: Any) -> None:
    """A torch module has its own gradients."""
    if given is not None:
        raise InvalidArgument("reduce() takes no gradients for a torch module: it has them. Leave them out.")
