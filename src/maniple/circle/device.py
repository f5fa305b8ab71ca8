"""Vectors on a GPU, reduced there by the library of the device (NCCL).

Who is there, and with which weight, is told over the CPU first: so a worker that is dead or late is named, before the
device's own library, which cannot say who is missing, begins to wait.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from maniple.circle.call import check_reduction
from maniple.circle.sums import evened
from maniple.contracts import Part, Round

if TYPE_CHECKING:
    from maniple.circle.torch import Torch

c10d: Any = torch.distributed.distributed_c10d  # its types are not all there

_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_FOLDS = {"sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}


class Tensors:
    """Flat tensors on one device (`contracts.Parted`).

    In half precision, or if the order of additions is to be fixed, slices are exchanged and added up in the order of
    the ranks; else the library's own sum is taken, which gives all workers the same bits too.
    """

    def __init__(
        self,
        circle: "Torch",
        sizes: dict[str, int],
        wire: str,
        device: str,
        *,
        is_ordered: bool,
        parts: Sequence[Part] = (),
    ) -> None:
        self._vectors = circle.told(sizes, wire)
        self._size, self._rank = len(circle.ranks), circle.rank
        self._wire, self._is_ordered = wire, is_ordered
        self._group = circle.group(device) if self._size > 1 else None
        self.flat = {
            dtype: torch.zeros(size, dtype=getattr(torch, dtype), device=device) for dtype, size in sizes.items()
        }
        self._parts = [self.flat[d][start:stop] for d, start, stop in parts] or list(self.flat.values())
        self._begun, self._is_parted = 0, bool(parts)
        self._round, self._weights = Round((self._rank,)), [1.0]
        self._under_way: list[Any] = []

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """The next part is complete: the device may begin to reduce it. With the first, all workers meet."""
        if self._begun == 0:
            for dtype in self.flat:
                check_reduction(op, dtype, self._wire)
            self._round, self._weights = self._vectors.meet(op, weight)
        self._begun += 1
        if self._round.weight or op != "mean":
            self._reduce(self._parts[self._begun - 1], op, evened(self._weights))

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the tensors by what all workers' tensors make together."""
        while self._begun < len(self._parts):
            self.begin(op, weight=weight)
        if self._is_parted:  # the first part went out before it was known whether the later ones are finite
            self._round.nonfinite = self._vectors.meet(op, weight)[0].nonfinite
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        self._begun = 0
        return self._round

    def _reduce(self, flat: Any, op: str, weights: list[float]) -> None:
        if op == "mean":
            share = weights[self._rank] / sum(weights)
            flat.mul_(share) if share else flat.zero_()  # what does not count may be no number
        if self._group is None:
            return
        is_half = self._wire != "float32" and flat.dtype in {torch.float32, torch.float64}
        if is_half or self._is_ordered:
            self._in_order(flat, op, getattr(torch, self._wire) if is_half else flat.dtype)
        else:
            options = c10d.AllreduceOptions()
            options.reduceOp = getattr(c10d.ReduceOp, _OPS[op])
            self._under_way.append(self._group.allreduce([flat], options))

    def _in_order(self, flat: Any, op: str, travels: torch.dtype) -> None:
        """Slices to their workers, there added up by rank, and back; padded, so that all slices are alike."""
        assert self._group is not None
        count = -(-flat.numel() // self._size)
        sent = torch.zeros(count * self._size, dtype=travels, device=flat.device)
        sent[: flat.numel()].copy_(flat)
        got = torch.empty_like(sent)
        self._group.alltoall_base(got, sent, [], [], c10d.AllToAllOptions()).wait()
        total, *parts = got.view(self._size, count).to(flat.dtype if travels == flat.dtype else torch.float32)
        for part in parts:
            total = _FOLDS[op](total, part)
        self._group._allgather_base(sent, total.to(travels).contiguous(), c10d.AllgatherOptions()).wait()
        flat.copy_(sent[: flat.numel()])
