"""Torch tensors in collective calls: on any device, with autograd. bfloat16 is computed in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maniple.contracts import Array


def read(x: Tensor) -> tuple[Array, str, Callable[[Array], Tensor]]:
    """The tensor as an array, its kind, and a function that converts a result to such a tensor."""
    is_bfloat16 = x.dtype == torch.bfloat16
    values = x.detach().to("cpu", torch.float32 if is_bfloat16 else x.dtype)

    def close(array: Array) -> Tensor:
        return made(array, "bfloat16" if is_bfloat16 else "tensor").to(x.device)

    return values.numpy(), "bfloat16" if is_bfloat16 else "tensor", close


def made(array: Array, kind: str) -> Tensor:
    """A tensor with these values; it shares their memory unless it is bfloat16."""
    values = torch.from_numpy(array)
    return values.to(torch.bfloat16) if kind == "bfloat16" else values


class DifferentiableReduction(torch.autograd.Function):
    """y = sum(s_i x_i) over all workers, so dx_i = s_i sum(dy_j); s is 1 for a sum, w_i / sum(w) for a mean.

    `reduce` gives y, and this worker's s.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Callable[[Tensor, str], tuple[Tensor, float]], op: str) -> Tensor:
        """Reduce `x`."""
        ctx.reduce = reduce
        y, ctx.share = reduce(x, op)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Reduce the gradients: all workers must run this, in the same order."""
        total, _ = ctx.reduce(grads[0], "sum")
        return total * ctx.share, None, None
