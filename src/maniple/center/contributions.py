"""Contributions to a center at a host: what a worker sends for each parameter, and what it does with the reply.

    SendValues     rules that send the replica's value (EASGD, ASGD)
    SendChanges    rules that send what the replica has changed (Downpour)
    Replace        the replica becomes the center (`replica.push()`)
    Swap           a user's own rule, computed at the worker

Values may be compressed, with error feedback: what rounding loses is added to the next message. Stich, Cordonnier,
Jaggi: Sparsified SGD with memory (arXiv:1809.07599); Seide et al. (2014) for quantization.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from maniple.center.shared import round_replica
from maniple.contracts import Array, ExchangeInfo, Exchanger, FlatModel, OnValue, Operation
from maniple.errors import BadFrame
from maniple.layout import Layout
from maniple.wire.codecs import Codec, get_codec
from maniple.wire.frames import Stream
from maniple.wire.messages import ExchangeReply, ExchangeRequest

if TYPE_CHECKING:
    from maniple.center.tcp_client import TcpCenter

_BLOCK = 1 << 16  # elements processed at once, so that temporaries stay small
_UNCOMPRESSED = get_codec("float32")


class ErrorFeedback:
    """Compresses the parameters of one layout and keeps their rounding errors.

    One thread may compress while another receives.
    """

    def __init__(self, layout: Layout, wire: str) -> None:
        codec = get_codec(wire)
        self._layout = layout
        self._codecs = [codec if dtype in {"float32", "float64"} else _UNCOMPRESSED for dtype, _, _ in layout.places]
        self._errors: list[Array] | None = None  # allocated on first use
        self._outgoing = self._incoming = np.empty(0, np.uint8)

    def codec(self, i: int, *, is_plain: bool = False) -> Codec:
        """The codec of parameter i. Integers are never compressed, and nothing is if `is_plain`."""
        return _UNCOMPRESSED if is_plain else self._codecs[i]

    def size_bytes(self, i: int, *, is_plain: bool = False) -> int:
        """The size of parameter i on the wire."""
        dtype, start, stop = self._layout.places[i]
        return self.codec(i, is_plain=is_plain).size_bytes(stop - start, np.dtype(dtype).itemsize)

    def compress(self, i: int, x: Array) -> Array:
        """Compress `x` and the error of the last message; keep the new error."""
        codec = self._codecs[i]
        if codec.is_plain:
            return x
        if self._errors is None:
            self._errors = self._layout.views(self._layout.allocate())
        error = self._errors[i]
        error += x
        data = self._pack(i, error)
        sent = np.empty_like(x)
        codec.unpack(data, sent)
        with np.errstate(invalid="ignore"):
            error -= sent
        np.copyto(error, 0, where=~np.isfinite(error))
        return data

    def compress_change(self, i: int, change: Array) -> Array:
        """Compress `change`, and set it to what the receiver will decode.

        The rest is not lost: it stays in the difference between the replica and the center.
        """
        codec = self._codecs[i]
        if codec.is_plain:
            return change
        data = self._pack(i, change)
        codec.unpack(data, change)
        return data

    def receive(self, i: int, stream: Stream, size: int, *, is_plain: bool = False) -> Array:
        """Receive and decompress a value of parameter i, announced with `size`. It is valid until the next call."""
        self.check_size(i, size, is_plain=is_plain)
        codec = self.codec(i, is_plain=is_plain)
        dtype, start, stop = self._layout.places[i]
        value_bytes = (stop - start) * np.dtype(dtype).itemsize
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

    def check_size(self, i: int, size: int, *, is_plain: bool = False) -> None:
        """Raise BadFrame unless an announced value of parameter i has the right size."""
        expected = self.size_bytes(i, is_plain=is_plain)
        if size != expected:
            raise BadFrame(f"{size} bytes came for parameter {i}, which has {expected}.")

    def _pack(self, i: int, values: Array) -> Array:
        size = self.size_bytes(i)
        if self._outgoing.size < size:
            self._outgoing = np.empty(size, np.uint8)
        data = self._outgoing[:size]
        self._codecs[i].pack(values, data)
        return data


class Contribution(ABC):
    """Values and the operation that the host applies to them and to the center.

    `payload` may run in another thread than `on_reply`.
    """

    answer = answer_compressed = "none"  # what the reply holds: the replica's new "value", its "move", or "none"
    is_plain = False  # without compression

    def __init__(
        self,
        center: "TcpCenter",
        model: FlatModel,
        operation: Operation,
        rule: Exchanger | None = None,
        memory: Sequence[Array] | None = None,
    ) -> None:
        self._center, self._model, self._operation = center, model, operation
        self._rule, self._memory = rule, memory
        self._in_flight: dict[int, Array] = {}
        self.refused: list[int] = []  # with compression a move does not show what a refused element becomes

    def request(self, i: int, sequence: int, item: int) -> ExchangeRequest:
        """The request for parameter i, as item `item` of exchange `sequence`."""
        center, operation = self._center, self._operation
        codec = center.feedback.codec(i, is_plain=self.is_plain)
        answer, seen = self.answer if codec.is_plain else self.answer_compressed, center.seen[i]
        return ExchangeRequest(
            center.name, i, sequence, item, operation.name, operation.a, operation.b, codec.name, seen, answer
        )

    @abstractmethod
    def payload(self, i: int) -> Array:
        """The value that is sent with the request."""

    @abstractmethod
    def on_reply(self, i: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        """Receive the reply's payload of `size` bytes, and update the replica."""

    @abstractmethod
    def on_lost_reply(self, i: int) -> None:
        """Update the replica: the host has applied parameter i, but the reply was lost."""

    def begin(self) -> None:
        """Start a pass over the model."""
        self._model.begin()

    def _commit(self, i: int, x: Array, version: int) -> None:
        """Write the replica's new value back, which includes the center's `version`."""
        if self._rule is not None:
            round_replica(self._center.layout, i, x, self._rule, None if self._memory is None else self._memory[i])
        self._model.commit(i)
        self._center.seen[i] = version


class SendValues(Contribution):
    """Sends the replica's value, and receives what the replica becomes."""

    answer, answer_compressed = "value", "move"

    def payload(self, i: int) -> Array:
        self._in_flight[i] = x = self._model.array(i)
        return self._center.feedback.compress(i, x)

    def on_reply(self, i: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        center, x = self._center, self._in_flight.pop(i)
        if center.feedback.codec(i).is_plain:
            center.feedback.check_size(i, size)
            stream.receive_in_blocks(x)  # after a break each element has moved, or moves with the next exchange
        else:
            x += center.feedback.receive(i, stream, size)
            if not reply.is_clean:
                self.refused.append(i)
        self._commit(i, x, reply.version)

    def on_lost_reply(self, i: int) -> None:
        """Do nothing: the replica moves with the next exchange."""


class SendChanges(Contribution):
    """Sends what the replica has changed since it last received the center's value, which `memory` keeps.

    `sent` keeps the changes in flight until it is known whether they were applied. If so, only they are subtracted
    from the replica's difference: it may have trained in the meantime.
    """

    answer = answer_compressed = "value"

    def __init__(
        self,
        center: "TcpCenter",
        model: FlatModel,
        operation: Operation,
        rule: Exchanger,
        *,
        memory: Sequence[Array],
        sent: list[Array],
    ) -> None:
        super().__init__(center, model, operation, rule, memory)
        self._old, self._sent = memory, sent

    def payload(self, i: int) -> Array:
        with np.errstate(invalid="ignore"):
            np.subtract(self._model.array(i), self._old[i], out=self._sent[i])
        return self._center.feedback.compress_change(i, self._sent[i])

    def on_reply(self, i: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        self._update(i, self._center.feedback.receive(i, stream, size), reply.version)

    def on_lost_reply(self, i: int) -> None:
        self._center.fetch([i], self._update)

    def _update(self, i: int, c: Array, version: int) -> None:
        x, old, sent = self._model.array(i), self._old[i], self._sent[i]
        for start in range(0, x.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            with np.errstate(invalid="ignore"):
                own = x[part] - (old[part] + sent[part])  # not sent: trained since then, or lost by rounding
                own += c[part]
            np.copyto(own, c[part], where=~np.isfinite(own))
            x[part], old[part] = own, c[part]
        self._commit(i, x, version)


class Replace(Contribution):
    """Replaces the center by the replica."""

    def __init__(self, center: "TcpCenter", model: FlatModel, on_value: OnValue | None) -> None:
        super().__init__(center, model, Operation("replace"))
        self._on_value = on_value

    def payload(self, i: int) -> Array:
        return self._center.feedback.compress(i, self._model.array(i))

    def on_reply(self, i: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        stream.receive_bytes(size, at_most=0)
        self._center.seen[i] = reply.version
        if reply.is_clean:
            self.on_lost_reply(i)

    def on_lost_reply(self, i: int) -> None:
        if self._on_value is not None:
            self._on_value(i, self._model.array(i))


class Swap(Contribution):
    """Applies a user's own rule to one parameter: computed here on copies, which count once the host accepts them.

    The host swaps the center's value only if it has not been written since it was fetched (compare and swap).
    """

    is_plain = True

    def __init__(
        self,
        center: "TcpCenter",
        model: FlatModel,
        rule: Exchanger,
        memory: Sequence[Array] | None,
        info: ExchangeInfo,
    ) -> None:
        super().__init__(center, model, Operation("swap"))
        self._rule, self._memory, self._info = rule, memory, info
        self.is_done = self.is_clean = False
        self.staleness = 0

    def compute(self, i: int) -> list[str]:
        """Fetch the center's value and apply the rule to it; return the parameter's name if it is torn."""
        self.is_done = False
        return self._center.fetch([i], self._compute, is_plain=True)

    def _compute(self, i: int, c: Array, version: int) -> None:
        self._before = self._model.array(i).copy()
        self._x, self._c, self._version = self._before.copy(), c.copy(), version
        self._past = None if self._memory is None else self._memory[i].copy()
        self._info.staleness = self.staleness = max(0, version - self._center.seen[i]) // 2
        self.is_clean = self._rule.exchange(self._x, self._c, self._past, self._info)
        round_replica(self._center.layout, i, self._x, self._rule, self._past)

    def request(self, i: int, sequence: int, item: int) -> ExchangeRequest:
        return msgspec.structs.replace(super().request(i, sequence, item), seen=self._version)

    def payload(self, i: int) -> Array:
        del i
        return self._c

    def on_reply(self, i: int, reply: ExchangeReply, stream: Stream, size: int) -> None:
        stream.receive_bytes(size, at_most=0)
        if reply.is_done:
            self._center.seen[i] = reply.version
            self.on_lost_reply(i)

    def on_lost_reply(self, i: int) -> None:
        x = self._model.array(i)
        if np.array_equal(x, self._before, equal_nan=True):
            x[:] = self._x
        else:  # it has trained while the host was away
            x += self._x - self._before
        if self._memory is not None and self._past is not None:
            self._memory[i][:] = self._past
        self._model.commit(i)
        self.is_done = True
