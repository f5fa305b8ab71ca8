"""The gradients of a torch module as one flat vector per dtype, and batch norm over the batches of all workers.

    float32   [g_0 g_1 ... g_k | buffers | used_0 ... used_k | changed_0 ... changed_b]

The collectives own the vectors. On the CPU a parameter's `.grad` becomes a view of its range there, so the average is
where the optimizer reads it. `used_i` is 1 where this worker has a gradient: a parameter that no worker has used keeps
none, as in training alone. `changed_j` is 1 where this worker's buffer differs from the result of the last round: a
buffer that no worker has changed is a constant, which must not be rounded by a mean.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - of all dimensions

from maniple.adapters.base import FlatGradients, GradientBuckets, Unhook
from maniple.contracts import Array, Bucket, Entry
from maniple.errors import InvalidArgument
from maniple.layout import dtype_name

Total = Callable[[Array], None]  # sums an array over all workers, in place

# On the CPU small buckets leave as early as possible; 25 MB is what DistributedDataParallel uses for NCCL.
_SIZE_BYTES = {"cpu": 1 << 20, "cuda": 25 << 20}
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine")  # noqa: B009 - torch's own wrappers use it too
_FLAGS = "maniple.used"  # a parameter may be called `used`
_copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009 - one call for all, as in torch's optimizers


class TorchGradients(FlatGradients):
    """The gradients of trained parameters, and the buffers that are averaged with them."""

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: Mapping[str, Callable[[], Tensor]],
        trained: Callable[[], Iterable[Tensor]],
        local: Set[str] = frozenset(),
    ) -> None:
        """`buffers` are functions, since a module may replace its buffers while it trains. The gradients of parameters
        with `local` names stay each worker's own."""
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
        super().__init__(entries)
        self._views: list[Tensor] = []
        self._flags: Any = None  # the last view; on the CPU as a NumPy array, whose calls cost a tenth of torch's

    @property
    def gradient_count(self) -> int:
        return len(self._parameters)

    def _check(self) -> None:
        """Raise InvalidArgument if a trained parameter has a gradient but no range here."""
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

    def place(self, flat: dict[str, Any]) -> None:
        tensors = {dtype: v if isinstance(v, Tensor) else torch.from_numpy(v) for dtype, v in flat.items()}
        self._views = [
            tensors[dtype][start:stop].view(entry.shape)
            for entry, (dtype, start, stop) in zip(self.layout.entries, self.layout.places, strict=True)
        ]
        self._flags = self._views[-1].numpy() if self._views[-1].device.type == "cpu" else self._views[-1]

    @property
    def is_delivered(self) -> bool:
        """No backward pass has replaced the gradients since the last average, as far as can be known."""
        for p, view in zip(self._parameters, self._views, strict=False):
            if p.grad is None or p.dtype != view.dtype or p.device != view.device:
                continue  # delivered as a copy
            if p.grad.data_ptr() != view.data_ptr():
                return False
        return True

    @torch.no_grad()
    def collect(self, given: Any = None) -> None:
        _refuse_passed(given)
        self._check()
        self._copy_gradients(range(len(self._parameters)))
        self._copy_rest()

    def _copy_gradients(self, which: Iterable[int]) -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for i in which:
            grad, view = self._parameters[i].grad, self._views[i]
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                raise InvalidArgument(
                    f"{self.layout.entries[i].name!r} has a sparse gradient, which has no place in a flat vector. "
                    "Build its layer with sparse=False, or share parameters instead of gradients: --rule easgd."
                )
            elif grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(grad)
        _copy(targets, sources)

    def _copy_rest(self) -> None:
        buffers, views = [lookup() for lookup in self._buffers], self._buffer_views
        flags = [parameter.grad is not None for parameter in self._parameters]
        flags += [not _equal(b, v) for b, v in zip(buffers, views, strict=True)]
        self._flags[:] = flags if isinstance(self._flags, np.ndarray) else torch.tensor(flags)
        _copy(views, buffers)

    @property
    def _buffer_views(self) -> list[Tensor]:
        return self._views[len(self._parameters) : -1]

    @torch.no_grad()
    def begin(self) -> None:
        _copy(self._buffer_views, [lookup() for lookup in self._buffers])

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        return any(id(parameter) in self._known for parameter in parameters)

    def on_gradient(self, act: Callable[[], None]) -> Unhook:
        return self._hook_gradients(lambda _: act())

    def _hook_gradients(self, act: Callable[[int], None]) -> Unhook:
        """Call `act` with the number of each gradient that a backward pass adds."""

        def hook(i: int) -> Callable[[Tensor], None]:
            return lambda _: act(i)

        handles = [p.register_post_accumulate_grad_hook(hook(i)) for i, p in enumerate(self._parameters)]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    @torch.no_grad()
    def spoil(self, entry: int) -> bool:
        """Make gradient `entry` NaN in all workers; False if it is a buffer, which no loss scaler looks at."""
        if entry >= len(self._parameters):
            return False
        self._views[entry].fill_(math.nan)
        self._flags[entry] = 1
        return True

    @torch.no_grad()
    def drop(self) -> None:
        """Leave all parameters without a gradient and the buffers as they are."""
        self._flags[:] = 0

    @torch.no_grad()
    def deliver(self, given: Any = None) -> None:
        del given
        flags: list[float] = self._flags.tolist()  # their mean: above 0 if any worker has set it
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


class TorchBuckets(TorchGradients, GradientBuckets):
    """Gradients that report when a part of them is complete."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        size_bytes = _SIZE_BYTES.get(self._parameters[0].device.type, _SIZE_BYTES["cpu"])
        self._buckets = self._cut(size_bytes)
        self._bucket_of = {i: k for k, bucket in enumerate(self._buckets) for i in bucket}
        self._is_paused = False
        self._begin_pass()

    @property
    def parts(self) -> list[Bucket]:
        places = self.layout.places
        buckets = [(places[bucket[0]][0], places[bucket[-1]][1], places[bucket[0]][2]) for bucket in self._buckets]
        ends = {dtype: stop for dtype, _, stop in places[: len(self._parameters)]}
        rest = [(dtype, ends.get(dtype, 0), size) for dtype, size in self.layout.sizes.items()]
        return buckets + [(dtype, start, stop) for dtype, start, stop in rest if start < stop]

    def watch(self, on_part: Callable[[], None], on_end: Callable[[], None]) -> Unhook:
        return self._hook_gradients(lambda i: self._arrive(i, on_part, on_end))

    @contextmanager
    def paused(self) -> Generator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @torch.no_grad()
    def collect(self, given: Any = None) -> None:
        """Copy what was not sent yet to the vectors."""
        _refuse_passed(given)
        self._check()
        for bucket in self._buckets[self._complete :]:
            self._copy_gradients(bucket)
        self._copy_rest()

    def deliver(self, given: Any = None) -> None:
        super().deliver(given)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._arrived: set[int] = set()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._complete = 0  # buckets that were sent

    def _arrive(self, i: int, on_part: Callable[[], None], on_end: Callable[[], None]) -> None:
        if self._is_paused:
            return
        if i in self._arrived:
            raise InvalidArgument(
                f"{self.layout.entries[i].name!r} has a second gradient in one round: the backward pass before has "
                "not ended, but other workers may have its gradients already. End the worker, or use "
                "BSP(overlap=False)."
            )
        if not self._arrived:
            _engine.queue_callback(on_end)
        self._arrived.add(i)
        self._missing[self._bucket_of[i]] -= 1
        while self._complete < len(self._buckets) and not self._missing[self._complete]:
            with torch.no_grad():
                self._copy_gradients(self._buckets[self._complete])
            self._complete += 1
            on_part()

    def _cut(self, size_bytes: int) -> list[list[int]]:
        """Adjacent parameters, from the last to the first, in buckets of about `size_bytes`.

        A backward pass computes gradients roughly in reverse order.
        """
        buckets: list[list[int]] = []
        dtype, filled_bytes = "", 0
        for i in reversed(range(len(self._parameters))):
            its_dtype, start, stop = self.layout.places[i]
            if its_dtype != dtype or filled_bytes >= size_bytes:
                buckets.append([])
                dtype, filled_bytes = its_dtype, 0
            buckets[-1].append(i)
            filled_bytes += (stop - start) * getattr(torch, dtype).itemsize
        return buckets


def synchronise(module: nn.Module, total: Total) -> Unhook:
    """Let the batch-norm layers of `module` use the batches of all workers; gives back what undoes it."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    shared = _SharedSum(total)
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, shared)  # pyright: ignore[reportAttributeAccessIssue]

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def normed_buffers(module: nn.Module) -> set[str]:
    """The names of the statistics that synchronised batch-norm layers compute over all workers."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    return {f"{name}.{own}".lstrip(".") for name, layer in layers for own, _ in layer.named_buffers(recurse=False)}


def _equal(buffer: Tensor, view: Tensor) -> bool:
    return torch.equal(buffer.to(view.device, view.dtype), view)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        _copy_all(targets, sources)


def _refuse_passed(given: Any) -> None:
    """Raise InvalidArgument if the loop passes gradients, which a torch module has itself."""
    if given is not None:
        raise InvalidArgument("reduce() takes no gradients for a torch module: it has them. Leave them out.")


class _SharedSum:
    """The sum over all workers. Deep copies of a model share it, since it is bound to the collectives."""

    def __init__(self, total: Total) -> None:
        self._total = total

    def __call__(self, x: Array) -> None:
        self._total(x)

    def __deepcopy__(self, memo: Any) -> "_SharedSum":
        return self


@torch.compiler.disable
def _forward(layer: Any, total: Total, x: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, x)
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device) if layer.weight is None else layer.weight
    bias = torch.zeros_like(weight) if layer.bias is None else layer.bias
    y, mean, var, count = _Normed.apply(x, weight, bias, layer.eps, total)  # pyright: ignore[reportGeneralTypeIssues]
    if layer.track_running_stats and layer.running_mean is not None:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            share = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
            unbiased = var * (count / max(1.0, count - 1.0))
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)
    return y


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, total: Total) -> Any:  # noqa: PLR0917
        dims = [d for d in range(x.dim()) if d != 1]
        own = x.numel() // x.shape[1]
        wide = x.double()
        sums = torch.cat([wide.sum(dims), (wide * wide).sum(dims), torch.tensor([float(own)], device=x.device)])
        sums = _summed(sums, total)
        channels, count = x.shape[1], float(sums[-1])
        mean = sums[:channels] / count
        var = (sums[channels:-1] / count - mean * mean).clamp_(min=0)
        scale = (var + eps).rsqrt()
        hat = ((wide - _wide(mean, x)) * _wide(scale, x)).to(x.dtype)
        ctx.save_for_backward(hat, weight, scale)
        ctx.total, ctx.count, ctx.own = total, count, own
        ctx.mark_non_differentiable(mean, var)
        return hat * _wide(weight, x) + _wide(bias, x), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy: Tensor = grads[0]
        hat, weight, scale = ctx.saved_tensors
        dims = [d for d in range(dy.dim()) if d != 1]
        wide = dy.double()
        own = torch.cat([wide.sum(dims), (wide * hat).sum(dims)])
        sums = _summed(own * ctx.own, ctx.total) / (ctx.count * ctx.own)
        channels = dy.shape[1]
        inner = wide - _wide(sums[:channels], dy) - hat * _wide(sums[channels:], dy)
        dx = (_wide(scale * weight, dy) * inner).to(dy.dtype)
        return dx, own[channels:].to(weight.dtype), own[:channels].to(weight.dtype), None, None


def _summed(values: Tensor, total: Total) -> Tensor:
    array = values.detach().cpu().numpy().copy()
    total(array)
    return torch.from_numpy(array).to(values.device)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, in a shape that goes with `like`."""
    return values.view([1, -1] + [1] * (like.dim() - 2))
