"""Parcels: how one worker packs each parameter for the wire, and what it owes to the center by having rounded."""

import numpy as np

from maniple.contracts import Array
from maniple.layout import Layout
from maniple.wire.codecs import Codec, codec
from maniple.wire.stream import Stream

_PLAIN = codec("float32")


class Parcels:
    """The packing of all parameters of a layout. One thread may pack while another unpacks."""

    def __init__(self, layout: Layout, wire: str) -> None:
        chosen = codec(wire)
        self._layout = layout
        self._codecs = [chosen if dtype in {"float32", "float64"} else _PLAIN for dtype, _, _ in layout.places]
        self._owed: list[Array] | None = None  # error feedback: what earlier pushes have lost by rounding
        self._outgoing = self._incoming = np.empty(0, np.uint8)

    def codec(self, i: int) -> Codec:
        """How parameter i travels."""
        return self._codecs[i]

    def size_bytes(self, i: int, *, is_plain: bool = False) -> int:
        """What parameter i takes on the wire, one way."""
        dtype, start, stop = self._layout.places[i]
        return (_PLAIN if is_plain else self._codecs[i]).size_bytes(stop - start, np.dtype(dtype).itemsize)

    def pack(self, i: int, x: Array) -> Array:
        """The bytes of `x` and of what is owed; what they lose is owed from now on."""
        how = self._codecs[i]
        if how.is_plain:
            return x
        if self._owed is None:
            self._owed = self._layout.views(self._layout.allocate())
        owed = self._owed[i]
        owed += x
        data = self._pack(i, owed)
        sent = np.empty_like(x)
        how.unpack(data, sent)
        with np.errstate(invalid="ignore"):
            owed -= sent
        np.copyto(owed, 0, where=~np.isfinite(owed))
        return data

    def pack_change(self, i: int, change: Array) -> Array:
        """The bytes of `change`, which becomes what they really say; the rest stays in the replica's own difference."""
        how = self._codecs[i]
        if how.is_plain:
            return change
        data = self._pack(i, change)
        how.unpack(data, change)
        return data

    def receive(self, i: int, stream: Stream, *, is_plain: bool = False) -> Array:
        """The value of parameter i that comes next; valid until the next call."""
        how = _PLAIN if is_plain else self._codecs[i]
        dtype, start, stop = self._layout.places[i]
        count = stop - start
        whole, size = count * np.dtype(dtype).itemsize, self.size_bytes(i, is_plain=is_plain)
        need = whole + (0 if how.is_plain else size)
        if self._incoming.size < need:
            self._incoming = np.empty(need, np.uint8)
        value = self._incoming[:whole].view(dtype)
        if how.is_plain:
            stream.receive_into(value)
        else:
            data = self._incoming[whole : whole + size]
            stream.receive_into(data)
            how.unpack(data, value)
        return value

    def _pack(self, i: int, values: Array) -> Array:
        size = self.size_bytes(i)
        if self._outgoing.size < size:
            self._outgoing = np.empty(size, np.uint8)
        data = self._outgoing[:size]
        self._codecs[i].pack(values, data)
        return data
