"""The collective calls of a script, with arrays, numbers or tensors of any shape."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from maniple.collectives.call import DTYPES, check_reduction, check_root
from maniple.collectives.values import CallValues, check_out, is_tensor, read, write, written
from maniple.contracts import Array, Collectives
from maniple.errors import CallMismatch, InvalidArgument

_KINDS = ("array", "number", "tensor", "bfloat16")


class CollectiveCalls:
    """Collective calls. All workers make the same ones, in the same order.

    `x` is a NumPy array, a number, or a torch tensor on any device, of any shape and strides. The result has the same
    type, shape and dtype; it is new, or written to `out`, which may be `x` itself. `op` is sum, mean, min, max or prod;
    a mean counts each worker's values `weight` times, and the mean of integers is a float64. `wire` is float32 (no
    compression), float16 or bfloat16: how floating-point values travel.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._made = collectives

    @property
    def _collectives(self) -> Collectives:
        """The group that carries the calls."""
        return self._made

    def all_reduce(
        self, x: Any, op: str = "mean", *, out: Any = None, weight: float | None = None, wire: str = "float32"
    ) -> Any:
        """Reduce all workers' `x` by `op`, for all.

        The sum or mean of a tensor that requires a gradient is differentiable: its backward pass is an all-reduce too,
        so all workers must run it. With `out`, and for other ops, the result is detached.
        """
        if out is None and op in {"sum", "mean"} and is_tensor(x) and x.requires_grad:
            from maniple.collectives.torch_tensors import DifferentiableReduction

            def reduce(t: Any, op: str) -> tuple[Any, float]:
                return self._all_reduce(t, op, None, weight, wire)

            return DifferentiableReduction.apply(x, reduce, op)
        return self._all_reduce(x, op, out, weight, wire)[0]

    def reduce(
        self,
        x: Any,
        op: str = "mean",
        *,
        root: int = 0,
        out: Any = None,
        weight: float | None = None,
        wire: str = "float32",
    ) -> Any:
        """Reduce all workers' `x` by `op`, for worker `root`; None on the others."""
        check_root(root, self._collectives.ranks)
        values, flat = _reducible(x, op, wire)
        is_root = self._collectives.rank == root
        if is_root:
            check_out(out, values, flat.dtype)
        given = flat if is_root else None
        done = self._collectives.reduce(flat, given, op, root=root, weight=_checked(weight), wire=wire)
        if not is_root:
            return None
        return _result(values, flat, out, is_untouched=op == "mean" and not done.weight)

    def broadcast(self, x: Any, *, root: int = 0, out: Any = None, wire: str = "float32") -> Any:
        """Worker `root`'s `x`, for all. The others pass one of the same shape and dtype."""
        check_root(root, self._collectives.ranks)
        values = read(x)
        flat = values.flat()
        check_out(out, values, flat.dtype)
        self._collectives.broadcast(flat, root=root, wire=wire)
        return _result(values, flat, out)

    def scatter(self, x: Any = None, *, root: int = 0, wire: str = "float32") -> Any:
        """This worker's part of worker `root`'s `x`, which is split along axis 0 into parts that differ by at most one
        row, or is a list with one part per worker. The others may leave `x` out.
        """
        check_root(root, self._collectives.ranks)
        parts: list[Array] = []
        description = np.zeros(0, np.int64)
        if self._collectives.rank == root:
            values = self._parts(x)
            parts = [part.array for part in values]
            description = _describe(values[0], [len(part) for part in parts])
        with self._collectives.one_call():
            return self._scatter(description, parts, root, wire)

    def _scatter(self, description: Array, parts: list[Array], root: int, wire: str) -> Any:
        (kind, dtype, *numbers) = self._collectives.all_gather(description)[
            self._collectives.ranks.index(root)
        ].tolist()
        world = len(self._collectives.ranks)
        rows, row = numbers[:world], numbers[world:]
        flat = [np.ascontiguousarray(part).reshape(-1) for part in parts] or None
        mine = self._collectives.scatter(flat, root=root, dtype=DTYPES[dtype], wire=wire)
        return written(_KINDS[kind], mine.reshape(rows[self._collectives.ranks.index(self._collectives.rank)], *row))

    def gather(self, x: Any, *, root: int = 0, wire: str = "float32") -> list[Any] | None:
        """All workers' `x` in the order of their ranks, for worker `root`; None on the others.

        Lengths along axis 0 may differ.
        """
        check_root(root, self._collectives.ranks)
        with self._collectives.one_call():
            return self._gather(x, root, wire)

    def all_gather(self, x: Any, *, wire: str = "float32") -> list[Any]:
        """All workers' `x` in the order of their ranks, for all; lengths along axis 0 may differ."""
        with self._collectives.one_call():
            gathered = self._gather(x, None, wire)
        assert gathered is not None
        return gathered

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._collectives.barrier()

    def _all_reduce(self, x: Any, op: str, out: Any, weight: float | None, wire: str) -> tuple[Any, float]:
        """The result, and the factor by which this worker's values entered it."""
        values, flat = _reducible(x, op, wire)
        check_out(out, values, flat.dtype)
        counted = _checked(weight)
        done = self._collectives.all_reduce(flat, flat, op, weight=counted, wire=wire)
        share = counted / done.weight if op == "mean" and done.weight else 1.0
        return _result(values, flat, out, is_untouched=op == "mean" and not done.weight), share

    def _gather(self, x: Any, root: int | None, wire: str) -> list[Any] | None:
        values = read(x)
        shapes = [tuple(one.tolist()) for one in self._collectives.all_gather(np.array(values.array.shape, np.int64))]
        for rank, shape in zip(self._collectives.ranks, shapes, strict=True):
            if shape[1:] != values.array.shape[1:] or len(shape) != values.array.ndim:
                raise CallMismatch(
                    f"worker {self._collectives.rank} gathers an array of shape {list(values.array.shape)}, worker "
                    f"{rank} one of {list(shape)}. Lengths may differ along axis 0 only."
                )
        flat = values.flat()
        if root is None:
            gathered = self._collectives.all_gather(flat, wire=wire)
        else:
            gathered = self._collectives.gather(flat, root=root, wire=wire)
        if gathered is None:
            return None
        return [values.close(one.reshape(shape)) for one, shape in zip(gathered, shapes, strict=True)]

    def _parts(self, x: Any) -> list[CallValues]:
        world = len(self._collectives.ranks)
        if isinstance(x, (list, tuple)):
            parts = [read(part) for part in cast(Sequence[Any], x)]
            rows = {(part.array.shape[1:], str(part.array.dtype), part.array.ndim) for part in parts}
            if len(parts) != world or len(rows) != 1 or not parts[0].array.ndim:
                raise InvalidArgument(
                    f"scatter got {len(parts)} parts of {len(rows)} kinds for {world} workers. Give an array for each; "
                    "they may differ in their lengths along axis 0."
                )
            return parts
        whole = read(x)
        if not whole.array.ndim:
            raise InvalidArgument("scatter got a single number, which cannot be split. Pass an array, or a list.")
        bounds = [len(whole.array) * k // world for k in range(world + 1)]
        return [CallValues(whole.array[a:b], whole.kind, whole.close) for a, b in itertools.pairwise(bounds)]


def _reducible(x: Any, op: str, wire: str) -> tuple[CallValues, Array]:
    values = read(x)
    flat = values.flat(is_mean=op == "mean")
    check_reduction(op, str(flat.dtype), wire)
    return values, flat


def _result(values: CallValues, flat: Array, out: Any, *, is_untouched: bool = False) -> Any:
    if out is None:
        return values.close(flat.reshape(values.array.shape))
    return out if is_untouched else write(out, flat.reshape(values.array.shape))


def _describe(values: CallValues, rows: Sequence[int]) -> Array:
    """Type, dtype and shape of `x`, for the workers that have none."""
    kind, dtype = _KINDS.index(values.kind), DTYPES.index(str(values.array.dtype))
    return np.array([kind, dtype, *rows, *values.array.shape[1:]], np.int64)


def _checked(weight: float | None) -> float:
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise InvalidArgument(f"weight={weight!r} is no weight. Give the number of samples, 0 or more.")
    return 1.0 if weight is None else float(weight)
