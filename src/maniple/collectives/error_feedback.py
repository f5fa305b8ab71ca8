"""Compressed collectives with error feedback: what compression leaves out of one round is added to the next.

Worker i contributes x_i to a mean, and keeps the error e_i of its messages. In two phases, for int8 and int4:

    worker i:             q_i = C(x_i + e_i);    e_i += x_i - q_i        each slice goes to its owner
    owner of the slice:   y = C(mean(q) + e);    e += mean(q) - y        y goes to all, who decode the same bytes

topk keeps so little that a second compression would lose most of a mean: each worker sends all of q_i to all others,
who add up the same messages in the order of the ranks. So the sum of all results is the sum of all means, but for the
errors kept last. Karimireddy et al.: Error feedback fixes SignSGD (arXiv:1901.09847); Tang et al.: DoubleSqueeze
(arXiv:1905.05957) for the second phase.

An error counts once its round is complete, and a contribution that is left out (no weight, not finite) leaves it alone.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maniple.collectives.reductions import combine, normalized
from maniple.contracts import Array
from maniple.wire.codecs import Codec

if TYPE_CHECKING:
    from maniple.collectives.peer_to_peer import PeerLink, PeerMessage


class KeptError:
    """The compression of one vector, round after round, and what it has left out so far.

    Attributes:
        data: the bytes of the newest message.
    """

    def __init__(self, codec: Codec, like: Array) -> None:
        self._codec = codec
        self._error, self._next = np.zeros_like(like), np.zeros_like(like)
        self.data = np.zeros(codec.size_bytes(like.size, like.itemsize), np.uint8)

    def compress(self, values: Array, out: Array | None = None) -> None:
        """Compress `values` and the kept error to `data`; `out`, which may be `values`, gets what others decode.

        Elements that are not finite change no error.
        """
        total = self._next
        with np.errstate(all="ignore"):
            np.add(values, self._error, out=total)
            self._codec.pack(total, self.data)
            decoded = np.empty_like(total) if out is None else out
            self._codec.unpack(self.data, decoded)
            total -= decoded
        is_finite = np.isfinite(total)
        if not is_finite.all():
            np.copyto(total, self._error, where=~is_finite)

    def commit(self) -> None:
        """The message counts: keep its error."""
        self._error, self._next = self._next, self._error

    def reset(self) -> None:
        """Forget the error."""
        self._error[:] = 0


class CompressedSlices:
    """One vector of this worker, reduced in two phases: each worker combines one slice of everybody's vectors."""

    def __init__(self, link: "PeerLink", flat: Array, codec: Codec, spans: Sequence[slice], *, tag: int) -> None:
        self._link, self._codec, self._tag = link, codec, tag
        self._slices = [flat[span] for span in spans]
        self._sent = [KeptError(codec, part) for part in self._slices]
        self._mean = KeptError(codec, self._slices[link.rank])
        self._received = {peer: np.zeros_like(self._mean.data) for peer in link.others}
        self._results = {peer: np.zeros_like(self._sent[peer].data) for peer in link.others}
        self._contributes = False

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker sends in a round."""
        return sum(self._sent[peer].data.size + self._mean.data.size for peer in self._link.others)

    def exchange(self, *, contributes: bool) -> "list[PeerMessage]":
        """Send the others their slices of this vector, and receive this worker's slice of theirs."""
        self._contributes = contributes
        if contributes:
            for part, sent in zip(self._slices, self._sent, strict=True):
                sent.compress(part)
        messages = [(peer, self._sent[peer].data) for peer in self._link.others]
        return self._link.post(self._tag, receive=self._received.items(), send=messages)

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Combine this worker's slices, once those of all have arrived."""
        if self._contributes:
            for sent in self._sent:
                sent.commit()
        rank, total = self._link.rank, np.empty_like(self._slices[self._link.rank])
        pieces = [total] * self._link.size
        for peer in range(self._link.size):
            if op == "sum" or weights[peer]:
                pieces[peer] = np.empty_like(total)
                self._codec.unpack(self._received.get(peer, self._sent[rank].data), pieces[peer])
        combine(op, pieces, weights, total)
        self._mean.compress(total)
        self._mean.commit()

    def spread(self) -> "list[PeerMessage]":
        """Send the result to all."""
        messages = [(peer, self._mean.data) for peer in self._link.others]
        return self._link.post(self._tag, receive=self._results.items(), send=messages)

    def unpack(self) -> None:
        """Unpack the result into the vector."""
        for peer, part in enumerate(self._slices):
            self._codec.unpack(self._results.get(peer, self._mean.data), part)


class GatheredVector:
    """One vector of this worker, which it sends to all others as a whole; all of them add up all vectors."""

    def __init__(self, link: "PeerLink", flat: Array, codec: Codec, *, tag: int) -> None:
        self._link, self._flat, self._codec, self._tag = link, flat, codec, tag
        self._sent = KeptError(codec, flat)
        self._received = {peer: np.zeros_like(self._sent.data) for peer in link.others}
        self._contributes = False

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker sends in a round."""
        return len(self._link.others) * self._sent.data.size

    def exchange(self, *, contributes: bool) -> "list[PeerMessage]":
        """Send this vector to the others, and receive theirs."""
        self._contributes = contributes
        if contributes:
            self._sent.compress(self._flat)
        messages = [(peer, self._sent.data) for peer in self._link.others]
        return self._link.post(self._tag, receive=self._received.items(), send=messages)

    def combine(self, op: str, weights: Sequence[float]) -> None:
        """Add up the vectors of all, once they have arrived, in the order of the ranks."""
        if self._contributes:
            self._sent.commit()
        weights, flat, piece = normalized(op, weights), self._flat, np.empty_like(self._flat)
        flat[:] = 0
        for peer, weight in enumerate(weights):
            if weight:
                self._codec.unpack(self._received.get(peer, self._sent.data), piece)
                if weight != 1:
                    piece *= piece.dtype.type(weight)
                flat += piece
        if op == "mean":
            flat /= flat.dtype.type(sum(weights))

    def spread(self) -> "list[PeerMessage]":
        """Send nothing: all have the result."""
        return []

    def unpack(self) -> None:
        """Do nothing: the vector has the result."""


class InPlaceFeedback:
    """The same for vectors in shared memory, where nothing travels: they become what others would decode.

    There each worker computes the second phase for all slices. So its error is the same in all workers, and starts
    again from zero whenever the members have changed: a newcomer has none. Their own errors stay with the workers.
    """

    def __init__(self, codec: Codec, vectors: Sequence[Array]) -> None:
        self._vectors = vectors
        self._sent = [KeptError(codec, vector) for vector in vectors]
        self._mean = [] if codec.is_sparse else [KeptError(codec, vector) for vector in vectors]
        self._members: Hashable = None  # of the last round
        self._contributes = False

    def compress(self, *, contributes: bool) -> None:
        """Before a round: let the vectors become what this worker would send."""
        self._contributes = contributes
        if contributes:
            for vector, sent in zip(self._vectors, self._sent, strict=True):
                sent.compress(vector, vector)

    def finish(self, members: Hashable, *, has_result: bool) -> None:
        """After a round of these members: keep the errors, and let the result become what its owners would send."""
        if self._contributes:
            for sent in self._sent:
                sent.commit()
        if members != self._members:
            self._members = members
            for mean in self._mean:
                mean.reset()
        if has_result:
            for vector, mean in zip(self._vectors if self._mean else (), self._mean, strict=True):
                mean.compress(vector, vector)
                mean.commit()
