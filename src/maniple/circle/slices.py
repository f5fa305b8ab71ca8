"""Slices: an all-reduce in which each worker puts together its slice of all vectors, and sends it to all.

    first    slice k of every vector goes to worker k, who combines them in the order of the ranks
    then     each worker's result goes to everybody

Each value travels twice, however many workers there are; and the order of additions is fixed, so that all workers get
the same bits, in every run. In half precision the halves travel, and float32 values are added up.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from maniple.circle.link import Link, Message
from maniple.circle.sums import combine
from maniple.contracts import Array
from maniple.wire.codecs import codec


class Slices:
    """One vector of this worker, changed in place. It is used again and again, or once."""

    def __init__(self, link: Link, flat: Array, wire: str, *, tag: int) -> None:
        self._link, self._flat, self._tag = link, flat, tag
        bounds = [flat.size * k // link.size for k in range(link.size + 1)]
        self._slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self._mine = self._slices[link.rank]
        self._codec = codec(wire if is_packed(flat, wire) else "float32")
        self._is_packed = not self._codec.is_plain
        # What travels: halves of the values, or the vector itself.
        self._travel = np.empty(flat.size, np.uint16) if self._is_packed else flat
        count = self._mine.stop - self._mine.start
        self._room = {peer: np.empty(count, self._travel.dtype) for peer in link.others}

    def begin(self) -> list[Message]:
        """Send the others their slices of this vector."""
        if self._is_packed:
            self._codec.pack(self._flat, self._travel.view(np.uint8))
        messages = [m for peer in self._link.others for m in self._link.receive(peer, self._room[peer], self._tag)]
        for peer in self._link.others:
            messages += self._link.send(peer, self._travel[self._slices[peer]], self._tag)
        return messages

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Put this worker's slices together, once those of all have come."""
        pieces = [self._opened(self._room.get(rank, self._travel[self._mine])) for rank in range(self._link.size)]
        if self._is_packed or pieces[self._link.rank].dtype != self._flat.dtype:
            total = np.empty_like(pieces[0])
            combine(op, pieces, weights, total)
            self._store(total)
        else:
            combine(op, pieces, weights, self._flat[self._mine])

    def spread(self, *, root: int | None = None) -> list[Message]:
        """Send the result to all, or to `root` alone."""
        return self._send(None if root is None else [root]) + self._receive(root)

    def scatter(self, root: int) -> list[Message]:
        """Send each worker its slice of `root`'s vector, and later, by `share`, to each other."""
        if self._link.rank != root:
            return self._link.receive(root, self._travel[self._mine], self._tag)
        if self._is_packed:
            self._codec.pack(self._flat, self._travel.view(np.uint8))
        return [m for p in self._link.others for m in self._link.send(p, self._travel[self._slices[p]], self._tag)]

    def share(self, root: int) -> list[Message]:
        """Send this worker's slice of `root`'s vector to all others, who lack it."""
        messages = self._send([peer for peer in self._link.others if peer != root])
        return messages + (self._receive(None) if self._link.rank != root else [])

    def end(self) -> None:
        """Open what has come."""
        if self._is_packed:
            self._codec.unpack(self._travel.view(np.uint8), self._flat)

    def _send(self, to: Sequence[int] | None) -> list[Message]:
        peers = self._link.others if to is None else [peer for peer in to if peer != self._link.rank]
        return [m for peer in peers for m in self._link.send(peer, self._travel[self._mine], self._tag)]

    def _receive(self, root: int | None) -> list[Message]:
        peers = self._link.others if root in {None, self._link.rank} else []
        return [m for p in peers for m in self._link.receive(p, self._travel[self._slices[p]], self._tag)]

    def _opened(self, piece: Array) -> Array:
        """A piece in the precision in which it is added up."""
        if self._is_packed:
            values = np.empty(piece.size, np.float32)
            self._codec.unpack(piece.view(np.uint8), values)
            return values
        return piece.astype(np.float32) if piece.dtype == np.float16 else piece

    def _store(self, total: Array) -> None:
        if self._is_packed:
            self._codec.pack(total, self._travel[self._mine].view(np.uint8))
        else:
            self._flat[self._mine] = total


def is_packed(values: Array, wire: str) -> bool:
    """Values travel as halves: floating-point ones that are larger, if it was asked for."""
    return wire != "float32" and values.dtype in {np.dtype(np.float32), np.dtype(np.float64)}
