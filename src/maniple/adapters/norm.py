"""Batch normalisation over the batches of all workers.

With N values per channel over all workers, of which n_i are this worker's,

    mean = sum_i sum(x_i) / N,    var = sum_i sum(x_i^2) / N - mean^2

and the gradient of a loss that is the mean over all samples, where each worker's loss is the mean over its own:

    dx_i = w / std (dy_i - (A + xhat_i B) / (n_i N)),    A = sum_j n_j sum(dy_j),    B = sum_j n_j sum(dy_j xhat_j)

so that the mean of the workers' gradients, each counted n_i times, is that of one worker with all samples. Ioffe,
Szegedy: Batch normalization (arXiv:1502.03167).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - of all dimensions

from maniple.contracts import Array

Total = Callable[[Array], None]  # sums an array over all workers, in place


def synchronise(module: nn.Module, total: Total) -> Callable[[], None]:
    """Let the batch-norm layers of `module` count the batches of all workers; gives back what undoes it."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    held = _Held(total)
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, held)  # pyright: ignore[reportAttributeAccessIssue]

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def normed_buffers(module: nn.Module) -> set[str]:
    """The names of the statistics that synchronised batch-norm layers compute over all workers."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    return {f"{name}.{own}".lstrip(".") for name, layer in layers for own, _ in layer.named_buffers(recurse=False)}


class _Held:
    """The sum over all workers, which copies of a model have in common."""

    def __init__(self, total: Total) -> None:
        self._total = total

    def __call__(self, x: Array) -> None:
        self._total(x)

    def __deepcopy__(self, memo: Any) -> "_Held":
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
