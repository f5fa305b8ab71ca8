"""The gradients of a torch module in buckets, which are complete one after the other while a backward pass goes on.

    float32   [g_0 g_1 | g_2 g_3 g_4 | g_5 | buffers, used]
              bucket 2    bucket 1     0     rest

The last parameters have their gradients first. A bucket is given away when it and all before it are complete; what is
left when the pass ends, such as parameters that were not used, is brought by `collect`.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maniple.adapters.gradients import Gradients, refuse_given
from maniple.contracts import Part
from maniple.errors import InvalidArgument

_SIZE_BYTES = {"cpu": 1 << 20, "cuda": 25 << 20}
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine")  # noqa: B009 - torch's own wrappers use it too


class Buckets(Gradients):
    """Gradients that tell when a part of them is complete."""

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: Mapping[str, Callable[[], Tensor]],
        trained: Callable[[], Iterable[Tensor]],
        local: Set[str] = frozenset(),
    ) -> None:
        super().__init__(module, buffers=buffers, trained=trained, local=local)
        size_bytes = _SIZE_BYTES.get(self._parameters[0].device.type, _SIZE_BYTES["cpu"])
        self._buckets = self._cut(size_bytes)
        self._bucket_of = {i: k for k, bucket in enumerate(self._buckets) for i in bucket}
        self._is_paused = False
        self._begin_pass()

    @property
    def parts(self) -> list[Part]:
        """Where the buckets lie, in their order, and then the rest."""
        places = self.layout.places
        buckets = [(places[bucket[0]][0], places[bucket[-1]][1], places[bucket[0]][2]) for bucket in self._buckets]
        ends = {dtype: stop for dtype, _, stop in places[: len(self._parameters)]}
        rest = [(dtype, ends.get(dtype, 0), size) for dtype, size in self.sizes.items()]
        return buckets + [(dtype, start, stop) for dtype, start, stop in rest if start < stop]

    def watch(self, on_part: Callable[[], None], on_end: Callable[[], None]) -> Callable[[], None]:
        """Call `on_part` for each bucket that is complete, and `on_end` after a backward pass; gives the undoing."""

        def hook(i: int) -> Callable[[Tensor], None]:
            return lambda _: self._arrive(i, on_part, on_end)

        handles = [p.register_post_accumulate_grad_hook(hook(i)) for i, p in enumerate(self._parameters)]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    @contextmanager
    def paused(self) -> Generator[None]:
        """Backward passes in this block are not looked at."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @torch.no_grad()
    def collect(self, given: Any = None) -> None:
        """Bring what was not given away yet into the vectors."""
        refuse_given(given)
        self._check()
        for bucket in self._buckets[self._complete :]:
            self._bring(bucket)
        self._bring_rest()

    def deliver(self, given: Any = None) -> None:
        """Give the average to the parameters, for their optimizer."""
        super().deliver(given)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._arrived: set[int] = set()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._complete = 0  # buckets that were given away

    def _arrive(self, i: int, on_part: Callable[[], None], on_end: Callable[[], None]) -> None:
        if self._is_paused:
            return
        if i in self._arrived:
            raise InvalidArgument(
                f"{self.layout.entries[i].name!r} has a second gradient in one round: the backward pass before has "
                "not come to its end, but other workers may have its gradients already. End the worker, or use "
                "BSP(overlap=False)."
            )
        if not self._arrived:
            _engine.queue_callback(on_end)
        self._arrived.add(i)
        self._missing[self._bucket_of[i]] -= 1
        while self._complete < len(self._buckets) and not self._missing[self._complete]:
            with torch.no_grad():
                self._bring(self._buckets[self._complete])
            self._complete += 1
            on_part()

    def _cut(self, size_bytes: int) -> list[list[int]]:
        """Parameters that lie side by side, from the last to the first, in buckets of about that size."""
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
