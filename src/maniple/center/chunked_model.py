"""A model as the chunks of its layout.

    entries of the model    [w w w w w w][b b b]        each array in its own memory
    chunks of the layout    [  0  ][  1        ]

A chunk is a view of the model's own memory where that is possible: within one entry, or if the adapter keeps its
entries in flat vectors. Elsewhere it has several pieces, one per entry; as one array they are gathered into a copy, and
scattered back when the chunk is committed.
"""

from collections.abc import Sequence

import numpy as np

from maniple.contracts import Array, FlatModel
from maniple.layout import Layout

_WHOLE = slice(0, None)
_NO_VECTORS: dict[str, Array] = {}


class ChunkedModel:
    """The chunks of a model, in passes from `begin()` to `end()`.

    `array(k)` returns chunk k, and `commit(k)` writes it back. One thread may call `array` while another commits.
    """

    def __init__(self, model: FlatModel, layout: Layout) -> None:
        self.model, self._layout = model, layout
        self._uses = [0] * len(layout.entries)  # how many chunks have a part of each entry
        for chunk in layout.chunks:
            for part in chunk.parts:
                self._uses[part.entry] += 1
        self._last = [max((part.entry for part in chunk.parts), default=-1) for chunk in layout.chunks]
        self._vectors: dict[str, Array] = {}  # in which the adapter keeps its first `_count` entries
        self._count = 0
        self._views: list[Array] = []  # of the chunks, in these vectors
        self._runs: dict[range, Array | None] = {}  # of several chunks, if all of them are flat
        self._is_flat = [False] * len(layout.chunks)
        self._are_all_flat = False
        self._values: dict[int, Array] = {}  # of the entries in use, in this pass
        self._left: dict[int, int] = {}  # of entries in use: the chunks that are not committed
        self._gathered: dict[int, Array] = {}

    def begin(self) -> None:
        """Start a pass over the chunks, and end one that is under way: replies that were lost are handled within it."""
        self.end()
        self._gathered.clear()
        vectors, count = self.model.flat_vectors() or (_NO_VECTORS, 0)
        if vectors is not self._vectors or count != self._count:
            self._vectors, self._count = vectors, count
            self._is_flat = [last < count for last in self._last]
            self._are_all_flat = all(self._is_flat)
            self._views = self._layout.chunk_views(vectors) if vectors else []
            self._runs = {}
        if not self._are_all_flat:
            self.model.begin()

    def array(self, k: int) -> Array:
        """Chunk k, flat and in the center's dtype. The same memory until it is committed."""
        if self._is_flat[k]:
            return self._views[k]
        chunk = self._layout.chunks[k]
        if len(chunk.parts) == 1:
            part = chunk.parts[0]
            return self._value(part.entry)[part.in_entry]
        if (gathered := self._gathered.get(k)) is None:
            self._gathered[k] = gathered = np.empty(chunk.size, chunk.dtype)
            for part in chunk.parts:
                gathered[part.in_chunk] = self._value(part.entry)[part.in_entry]
        return gathered

    def run(self, ks: range) -> Array | None:
        """Consecutive chunks of one dtype as one array, in the model's own memory; None if they are not flat."""
        if ks not in self._runs:
            is_flat = all(self._is_flat[k] for k in ks)
            self._runs[ks] = self._layout.run_view(self._vectors, ks) if is_flat else None
        return self._runs[ks]

    def pieces(self, k: int) -> Sequence[tuple[slice, Array]]:
        """The memory of chunk k without a copy: one array, or one for each part, and where each lies in the chunk."""
        parts = self._layout.chunks[k].parts
        if self._is_flat[k] or len(parts) == 1:
            return ((_WHOLE, self.array(k)),)
        return [(part.in_chunk, self._value(part.entry)[part.in_entry]) for part in parts]

    def commit(self, k: int) -> None:
        """Write chunk k back to the model."""
        if self._is_flat[k]:
            return
        gathered = self._gathered.pop(k, None)
        for part in self._layout.chunks[k].parts:
            if gathered is not None:
                self._value(part.entry)[part.in_entry] = gathered[part.in_chunk]
            if part.entry in self._values:
                self._left[part.entry] -= 1
                if not self._left[part.entry]:
                    self._close(part.entry)

    def end(self) -> None:
        """Write back entries of which some chunks were committed and others were not. To be called before training."""
        for i in list(self._values):
            self._close(i)

    def _value(self, i: int) -> Array:
        if (value := self._values.get(i)) is None:
            self._values[i] = value = self.model.array(i)
            self._left[i] = self._uses[i]
        return value

    def _close(self, i: int) -> None:
        self.model.commit(i)
        del self._values[i], self._left[i]


def chunks_of(model: FlatModel, layout: Layout, known: ChunkedModel | None) -> ChunkedModel:
    """The chunks of `model`: those that are `known`, if they are of the same model."""
    return known if known is not None and known.model is model else ChunkedModel(model, layout)
