"""What all engines have in common: the calls of a group, with the checks of their arguments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from maniple.collectives.call import CollectiveCall, check_parts, check_reduction, check_root, check_values
from maniple.collectives.values import opened, packed
from maniple.contracts import Array, BackgroundCollectives, ElasticMembership, Round


class CollectiveGroup(ABC):
    """A group of workers (`contracts.Collectives`). An engine carries its calls in five ways."""

    name = ""
    rank: int
    elastic: ElasticMembership | None = None
    background: BackgroundCollectives | None = None

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The current members, in order."""

    def all_reduce(self, x: Array, out: Array, op: str, *, weight: float = 1.0, wire: str = "float32") -> Round:
        """Reduce all workers' `x`, for all."""
        check_reduction(op, str(x.dtype), wire)
        return self._reduce(CollectiveCall("all_reduce", str(x.dtype), x.size, op, 0, wire, weight), x, out)

    def reduce(
        self, x: Array, out: Array | None, op: str, *, root: int, weight: float = 1.0, wire: str = "float32"
    ) -> Round:
        """Reduce all workers' `x`, for worker `root`."""
        check_reduction(op, str(x.dtype), wire)
        check_root(root, self.ranks)
        call = CollectiveCall("reduce", str(x.dtype), x.size, op, root, wire, weight)
        return self._reduce(call, x, out if self.rank == root else None)

    def broadcast(self, x: Array, *, root: int, wire: str = "float32") -> None:
        """Set `x` to that of worker `root`, in place."""
        check_root(root, self.ranks)
        check_values(str(x.dtype), wire)
        values = packed(x, wire)
        self._broadcast(CollectiveCall("broadcast", str(x.dtype), x.size, root=root, wire=wire), values)
        if values is not x:
            x[:] = opened(values, str(x.dtype), wire)

    def gather(self, x: Array, *, root: int, wire: str = "float32") -> list[Array] | None:
        """All workers' arrays, for worker `root`."""
        check_root(root, self.ranks)
        parts = self._gather(CollectiveCall("gather", str(x.dtype), x.size, root=root, wire=wire), x)
        return parts if self.rank == root else None

    def all_gather(self, x: Array, *, wire: str = "float32") -> list[Array]:
        """All workers' arrays, for all."""
        return self._gather(CollectiveCall("all_gather", str(x.dtype), x.size, wire=wire), x)

    def scatter(self, parts: Sequence[Array] | None, *, root: int, dtype: str, wire: str = "float32") -> Array:
        """This worker's part of worker `root`'s `parts`."""
        check_root(root, self.ranks)
        check_values(dtype, wire)
        if self.rank == root:
            check_parts(parts, len(self.ranks))
        sent = [packed(np.ascontiguousarray(part), wire) for part in parts or () if self.rank == root]
        return opened(self._scatter(CollectiveCall("scatter", dtype, root=root, wire=wire), sent), dtype, wire)

    def exchange_pairs(self, x: Array, partner: int, *, wire: str = "float32") -> Array | None:
        """The array of worker `partner`, who gets `x`; None without a partner, or if it was lost in the call."""
        check_values(str(x.dtype), wire)
        call = CollectiveCall("exchange_pairs", str(x.dtype), x.size, root=partner, wire=wire)
        received = self._exchange_pairs(call, packed(x, wire))
        return None if received is None else opened(received, call.dtype, wire)

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._collect(CollectiveCall("barrier"), np.empty(0, np.int64))

    def reserve(self, size: int) -> None:
        """Reserve memory for calls with arrays of up to `size` bytes, where that is needed."""
        del size

    def set_background(self, in_background: bool) -> None:
        """Say whether a thread beside the training thread makes the calls."""
        del in_background

    def one_call(self) -> AbstractContextManager[None]:
        """Admit no newcomers between the calls in this block; fixed members admit none at any time."""
        return nullcontext()

    def _gather(self, call: CollectiveCall, x: Array) -> list[Array]:
        check_values(call.dtype, call.wire)
        return [opened(one, call.dtype, call.wire) for one in self._collect(call, packed(x, call.wire)).values()]

    @abstractmethod
    def _reduce(self, call: CollectiveCall, x: Array, out: Array | None) -> Round:
        """Reduce all workers' `x` to `out`; None where the result is not needed."""

    @abstractmethod
    def _broadcast(self, call: CollectiveCall, values: Array) -> None:
        """Set `values`, as they travel, to those of the root."""

    @abstractmethod
    def _collect(self, call: CollectiveCall, values: Array) -> dict[int, Array]:
        """Send `values`, as they travel, to all workers, or to the root of a gather, who get those of all, by rank."""

    @abstractmethod
    def _scatter(self, call: CollectiveCall, parts: Sequence[Array]) -> Array:
        """Send the root's `parts`, as they travel, to the workers; gives this worker's part."""

    @abstractmethod
    def _exchange_pairs(self, call: CollectiveCall, values: Array) -> Array | None:
        """Exchange `values`, as they travel, with the partner; None without one."""
