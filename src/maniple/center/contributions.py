"""Contributions to a center at a host: what a worker sends for each chunk, and what it does with the reply.

    SendValues     rules that send the replica's value (EASGD, ASGD)
    SendChanges    rules that send what the replica has changed (Downpour)
    Replace        the replica becomes the center (`replica.push()`)
    SwapValues     a user's own rule, computed at the worker

Values may be compressed, with error feedback: what rounding loses is added to the next message. Stich, Cordonnier,
Jaggi: Sparsified SGD with memory (arXiv:1809.07599); Seide et al. (2014) for quantization. Where the codec is for
changes only, values travel by another one (`Codec.for_values`): those that are pushed, and those in replies.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from maniple.center.chunked_model import ChunkedModel
from maniple.center.shared import round_replica
from maniple.contracts import Array, ExchangeInfo, Exchanger, OnValue, Operation, State
from maniple.errors import BadFrame
from maniple.layout import Layout
from maniple.wire.codecs import Codec, get_codec, load_kernels_in_background
from maniple.wire.frames import Stream
from maniple.wire.messages import ExchangeReply, ExchangeRequest

if TYPE_CHECKING:
    from maniple.center.tcp_client import TcpCenter

_BLOCK = 1 << 16  # elements processed at once, so that temporaries stay small
_UNCOMPRESSED = get_codec("float32")


class ErrorFeedback:
    """Compresses the chunks of one layout and keeps their rounding errors.

    One thread may compress while another receives.
    """

    def __init__(self, layout: Layout, wire: str, *, parameter_count: int | None = None) -> None:
        """The entries from `parameter_count` on are buffers and the like, which no codec for changes carries: an error
        could make a variance negative."""
        self._layout = layout
        self._codecs: dict[bool, list[Codec]] = {}  # of each chunk; True: for changes
        self._sizes: dict[bool, list[int]] = {}
        for is_change, codec in (True, get_codec(wire)), (False, get_codec(get_codec(wire).for_values)):
            codecs = [codec if c.dtype in {"float32", "float64"} else _UNCOMPRESSED for c in layout.chunks]
            if codec.is_for_changes and parameter_count is not None:
                for k, chunk in enumerate(layout.chunks):
                    if codecs[k] is codec and any(part.entry >= parameter_count for part in chunk.parts):
                        codecs[k] = get_codec(codec.for_values)
            self._codecs[is_change] = codecs
            self._sizes[is_change] = [
                one.size_bytes(c.size, np.dtype(c.dtype).itemsize) for one, c in zip(codecs, layout.chunks, strict=True)
            ]
        load_kernels_in_background(wire, size_bytes=layout.size_bytes)
        self._errors: list[Array] | None = None  # allocated on first use
        self._outgoing = self._incoming = np.empty(0, np.uint8)

    def codec(self, k: int, *, is_change: bool = False, is_plain: bool = False) -> Codec:
        """The codec of chunk k, for values or changes. Integers are never compressed, and nothing is if `is_plain`."""
        return _UNCOMPRESSED if is_plain else self._codecs[is_change][k]

    def size_bytes(self, k: int, *, is_change: bool = False, is_plain: bool = False) -> int:
        """The size of chunk k on the wire."""
        return self._layout.chunks[k].size_bytes if is_plain else self._sizes[is_change][k]

    @property
    def is_for_changes(self) -> bool:
        """Whether changes have a coarser codec than values, and so much of them is sent late."""
        return self._codecs[True] != self._codecs[False]

    def total_bytes(self, *, is_change: bool = False, is_plain: bool = False) -> int:
        """The size of all chunks on the wire, without headers."""
        return self._layout.size_bytes if is_plain else sum(self._sizes[is_change])

    def compress(self, k: int, x: Array) -> Array:
        """Compress `x` and the error of the last message; keep the new error."""
        codec = self.codec(k)
        if codec.is_plain:
            return x
        if self._errors is None:
            self._errors = self._layout.chunk_views(self._layout.allocate())
        error = self._errors[k]
        error += x
        data = self._pack(codec, error)
        sent = np.empty_like(x)
        codec.unpack(data, sent)
        with np.errstate(invalid="ignore"):
            error -= sent
        np.copyto(error, 0, where=~np.isfinite(error))
        return data

    def compress_change(self, k: int, change: Array, *, is_last: bool = False) -> Array:
        """Compress `change`, and set it to what the receiver will decode; the last one by the codec for values.

        The rest is not lost: it stays in the difference between the replica and the center.
        """
        codec = self.codec(k, is_change=not is_last)
        if codec.is_plain:
            return change
        data = self._pack(codec, change)
        codec.unpack(data, change)
        return data

    def receive(self, k: int, stream: Stream, size: int, *, is_plain: bool = False) -> Array:
        """Receive and decompress a value of chunk k, announced with `size`. It is valid until the next call."""
        self.check_size(k, size, is_plain=is_plain)
        codec = self.codec(k, is_plain=is_plain)
        dtype, value_bytes = self._layout.chunks[k].dtype, self._layout.chunks[k].size_bytes
        needed = value_bytes + (0 if codec.is_plain else size)
        if self._incoming.size < needed:
            self._incoming = np.empty(needed, np.uint8)
        value = self._incoming[:value_bytes].view(dtype)
        if codec.is_plain:
            stream.receive_into(value)
        else:
            data = self._incoming[value_bytes:needed]
            stream.receive_into(data)
            codec.unpack(data, value)
        return value

    def receive_record(self, k: int, stream: Stream, size: int) -> Array:
        """Receive the bytes of a record of chunk k. They are valid until the next call."""
        if size != self._layout.record_bytes(k):
            raise BadFrame(f"{size} bytes came for the record of chunk {k}, which has {self._layout.record_bytes(k)}.")
        if self._incoming.size < size:
            self._incoming = np.empty(size, np.uint8)
        stream.receive_into(self._incoming[:size])
        return self._incoming[:size]

    def check_size(self, k: int, size: int, *, is_plain: bool = False) -> None:
        """Raise BadFrame unless an announced value of chunk k has the right size."""
        expected = self.size_bytes(k, is_plain=is_plain)
        if size != expected:
            raise BadFrame(f"{size} bytes came for chunk {k}, which has {expected}.")

    def _pack(self, codec: Codec, values: Array) -> Array:
        size = codec.size_bytes(values.size, values.itemsize)
        if self._outgoing.size < size:
            self._outgoing = np.empty(size, np.uint8)
        data = self._outgoing[:size]
        codec.pack(values, data)
        return data


class Contribution(ABC):
    """Values and the operation that the host applies to them and to the center.

    `payload` may run in another thread than `on_reply`.
    """

    answer = answer_compressed = "none"  # what the reply holds: the replica's new "value", its "move", or "none"
    is_plain = False  # without compression
    is_change = False  # the payload is a change, and not a value
    with_state = False  # the payload is a record: the chunk and the rule's state of it

    def __init__(
        self,
        center: "TcpCenter",
        model: ChunkedModel,
        operation: Operation,
        rule: Exchanger | None = None,
        state: Sequence[State] | None = None,
    ) -> None:
        """`state` is what the rule keeps of each chunk at this worker."""
        self._center, self._model, self._operation = center, model, operation
        self._rule, self._state = rule, state
        self._in_flight: dict[int, Array] = {}
        self.refused: dict[int, Array] = {}  # the positions of refused elements, by chunk
        self.unknown: list[int] = []  # with compression a move does not show what a refused element becomes

    def request(self, k: int, sequence: int, item: int) -> ExchangeRequest:
        """The request for chunk k, as item `item` of exchange `sequence`."""
        center, operation = self._center, self._operation
        codec = center.feedback.codec(k, is_change=self.is_change, is_plain=self.is_plain)
        answer, seen = self.answer if codec.is_plain else self.answer_compressed, center.seen[k]
        weights = operation.a, operation.b
        return ExchangeRequest(
            center.name,
            k,
            sequence,
            item,
            operation.name,
            *weights,
            codec.name,
            seen,
            answer,
            self.with_state,
            operation.n,
        )

    @abstractmethod
    def payload(self, k: int) -> Array:
        """The value that is sent with the request."""

    @abstractmethod
    def on_reply(self, k: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        """Receive the reply's payload of `size` bytes, and update the replica."""

    def on_undone(self, k: int) -> None:
        """The host has not applied chunk k: the replica stays as it is."""
        self._in_flight.pop(k, None)

    @abstractmethod
    def on_lost_reply(self, k: int) -> None:
        """Update the replica: the host has applied chunk k, but the reply was lost."""

    def begin(self) -> None:
        """Start a pass over the model."""
        self._model.begin()

    def end(self) -> None:
        """End the pass."""
        self._model.end()

    def _commit(self, k: int, x: Array, version: int) -> None:
        """Write the replica's new value back, which includes the center's `version`."""
        if self._rule is not None:
            round_replica(self._center.layout, k, x, self._rule, None if self._state is None else self._state[k])
        self._model.commit(k)
        self._center.seen[k] = version


class SendValues(Contribution):
    """Sends the replica's value, and receives what the replica becomes."""

    answer, answer_compressed = "value", "move"

    def payload(self, k: int) -> Array:
        self._in_flight[k] = x = self._model.array(k)
        return self._center.feedback.compress(k, x)

    def on_reply(self, k: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        center, x = self._center, self._in_flight.pop(k)
        if not reply.is_clean:
            self.refused[k] = _suspects(x)
        if center.feedback.codec(k).is_plain:
            center.feedback.check_size(k, size)
            stream.receive_in_blocks(x)  # after a break each element has moved, or moves with the next exchange
        else:
            x += center.feedback.receive(k, stream, size)
            if not reply.is_clean:
                self.unknown.append(k)
        self._commit(k, x, reply.version)

    def on_lost_reply(self, k: int) -> None:
        """Do nothing: the replica moves with the next exchange."""


class SendChanges(Contribution):
    """Sends what the replica has changed since it last received the center's value, which is in the rule's state.

    `sent` keeps the changes in flight until it is known whether they were applied. If so, only they are subtracted
    from the replica's difference: it may have trained in the meantime. A worker's last exchange sends all that is left,
    by the codec for values: nothing comes after it.
    """

    answer = answer_compressed = "value"

    def __init__(
        self,
        center: "TcpCenter",
        model: ChunkedModel,
        operation: Operation,
        rule: Exchanger,
        *,
        state: Sequence[State],
        sent: list[Array],
        is_last: bool,
    ) -> None:
        super().__init__(center, model, operation, rule, state)
        self._old, self._sent = [its["center"] for its in state], sent
        self.is_change = not is_last

    def payload(self, k: int) -> Array:
        with np.errstate(invalid="ignore"):
            np.subtract(self._model.array(k), self._old[k], out=self._sent[k])
        return self._center.feedback.compress_change(k, self._sent[k], is_last=not self.is_change)

    def on_reply(self, k: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        if not reply.is_clean:
            self.refused[k] = _suspects(self._sent[k])
        self._update(k, self._center.feedback.receive(k, stream, size), reply.version)

    def on_lost_reply(self, k: int) -> None:
        self._center.fetch([k], self._update)

    def _update(self, k: int, c: Array, version: int) -> None:
        x, old, sent = self._model.array(k), self._old[k], self._sent[k]
        for start in range(0, x.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            with np.errstate(invalid="ignore"):
                own = x[part] - (old[part] + sent[part])  # not sent: trained since then, or lost by rounding
                own += c[part]
            np.copyto(own, c[part], where=~np.isfinite(own))
            x[part], old[part] = own, c[part]
        unsent = x - old if k in self._center.layout.half_chunks else None
        self._commit(k, x, version)
        if unsent is not None:  # the replica was rounded: it still differs from `old` by what is to be sent
            np.subtract(x, unsent, out=old)


class Replace(Contribution):
    """Replaces the center by the replica, and the rule's state at the center by `state`, if that is given."""

    def __init__(
        self,
        center: "TcpCenter",
        model: ChunkedModel,
        on_value: OnValue | None,
        state: Sequence[State] | None = None,
    ) -> None:
        super().__init__(center, model, Operation("replace"), state=state)
        self._on_value = on_value
        self.is_plain = self.with_state = state is not None

    def payload(self, k: int) -> Array:
        if self._state is not None:
            return self._center.layout.join_record(self._model.array(k), self._state[k])
        return self._center.feedback.compress(k, self._model.array(k))

    def on_reply(self, k: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        stream.receive_bytes(size, at_most=0)
        self._center.seen[k] = reply.version
        if not reply.is_clean:
            self.refused[k] = _suspects(self._model.array(k))
        self.on_lost_reply(k)

    def on_lost_reply(self, k: int) -> None:
        if self._on_value is not None:
            self._on_value(k, self._model.array(k))


class SwapValues(Contribution):
    """Applies a user's own rule to one chunk: computed here on copies, which count once the host accepts them.

    The host swaps the center's value only if it has not been written since it was fetched (compare and swap).
    """

    is_plain = True

    def __init__(
        self,
        center: "TcpCenter",
        model: ChunkedModel,
        rule: Exchanger,
        state: Sequence[State] | None,
        info: ExchangeInfo,
    ) -> None:
        super().__init__(center, model, Operation("swap"), rule, state)
        self._info = info
        self.with_state = any(center.layout.state)
        self._at_center: State = {}  # of the chunk that was fetched last
        self.is_done = False
        self.staleness = 0

    def compute(self, k: int) -> list[str]:
        """Fetch the center's value and apply the rule to it; return the names of its parameters if it is torn."""
        self.is_done = False
        return self._center.fetch([k], self._compute, is_plain=True, on_state=self._keep if self.with_state else None)

    def _keep(self, _: int, state: State) -> None:
        self._at_center = {name: value.copy() for name, value in state.items()}

    def _compute(self, k: int, c: Array, version: int) -> None:
        assert self._rule is not None
        self._before = self._model.array(k).copy()
        self._x, self._c, self._version = self._before.copy(), c.copy(), version
        self._own = {} if self._state is None else {name: value.copy() for name, value in self._state[k].items()}
        kept = self._at_center | self._own
        self._info.staleness = self.staleness = max(0, version - self._center.seen[k]) // 2
        refused = self._rule.exchange(self._x, self._c, kept, self._info)
        self.refused = {} if refused is None else {k: refused}
        round_replica(self._center.layout, k, self._x, self._rule, None if self._state is None else kept)

    def request(self, k: int, sequence: int, item: int) -> ExchangeRequest:
        return msgspec.structs.replace(super().request(k, sequence, item), seen=self._version)

    def payload(self, k: int) -> Array:
        del k
        return self._center.layout.join_record(self._c, self._at_center) if self.with_state else self._c

    def on_reply(self, k: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        stream.receive_bytes(size, at_most=0)
        self._center.seen[k] = reply.version
        self.on_lost_reply(k)

    def on_lost_reply(self, k: int) -> None:
        x = self._model.array(k)
        if np.array_equal(x, self._before, equal_nan=True):
            x[:] = self._x
        else:  # it has trained while the host was away
            x += self._x - self._before
        for name, value in self._own.items():
            assert self._state is not None
            self._state[k][name][:] = value
        self._model.commit(k)
        self.is_done = True


def _suspects(values: Array) -> Array:
    """The elements that the host must have refused: those that are not finite, else the largest, which overflowed."""
    (found,) = np.nonzero(~np.isfinite(values))
    return found if found.size else np.array([np.abs(values).argmax()])
