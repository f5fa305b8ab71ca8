"""Torch tensors in the calls of a circle: of any device; bfloat16 is computed in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maniple.contracts import Array


def read(x: Tensor) -> tuple[Array, str, Callable[[Array], Tensor]]:
    """The tensor as an array, its kind, and what makes a tensor like it of a result."""
    is_bfloat16 = x.dtype == torch.bfloat16
    values = x.detach().to("cpu", torch.float32 if is_bfloat16 else x.dtype)

    def close(array: Array) -> Tensor:
        return made(array, "bfloat16" if is_bfloat16 else "tensor").to(x.device)

    return values.numpy(), "bfloat16" if is_bfloat16 else "tensor", close


def made(array: Array, kind: str) -> Tensor:
    """A tensor with these values, in their memory if it is not of bfloat16."""
    values = torch.from_numpy(array)
    return values.to(torch.bfloat16) if kind == "bfloat16" else values


def write(out: Tensor, array: Array) -> None:
    """Copy a result into a tensor."""
    with torch.no_grad():
        out.copy_(torch.from_numpy(array))


def is_in_graph(x: Any) -> bool:
    """The gradient of what becomes of `x` will be asked for."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


class _Reduced(torch.autograd.Function):
    """y = sum(s_i x_i) over all workers, so dx_i = s_i sum(dy_j); s is 1 for a sum, w_i / sum(w) for a mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Callable[[Tensor, str], tuple[Tensor, float]], op: str) -> Tensor:
        """The round."""
        ctx.reduce = reduce
        y, ctx.share = reduce(x, op)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """A round of the gradients: all workers must come here, in the same order."""
        total, _ = ctx.reduce(grads[0], "sum")
        return total * ctx.share, None, None


def reduced(x: Tensor, reduce: Callable[[Tensor, str], tuple[Tensor, float]], op: str) -> Tensor:
    """An all-reduce as an operation of the graph. `reduce` gives the result, and this worker's share in it."""
    return _Reduced.apply(x, reduce, op)  # pyright: ignore[reportReturnType]
