"""Frames: length-prefixed messages over a socket. Lengths are checked against their limits before anything is read.

    0   4   magic "mnpl"
    4   1   version of the protocol
    5   1   0
    6   2   bytes of the header       (little-endian, as all numbers)
    8   8   bytes of the payload
    16  ... header: one message of `messages`, as MessagePack
        ... payload: raw bytes, values as they lie in memory

A header that is not one of the known messages is refused. Nothing that arrives is unpickled or executed.
"""

import contextlib
import functools
import os
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any, Protocol, Union

import msgspec
import numpy as np

from maniple.clock import Deadline
from maniple.contracts import Array
from maniple.errors import BadFrame
from maniple.wire.address import Address
from maniple.wire.messages import MESSAGE_TYPES, Message
from maniple.wire.progress import progress_of

if TYPE_CHECKING:
    import ssl

MAGIC = b"mnpl"
# 3 had operations with two parameters; 2 exchanged parameters instead of chunks; 1 had each setting of the join reply
# as its own field.
VERSION = 4
HEAD = struct.Struct("<4sBBHQ")
MAX_HEADER_BYTES = 0xFFFF
TIMEOUT_S = 30.0  # without a byte from a host that owes a reply: longer than any lock is held in normal operation
NO_TIMEOUT_S = 1e9  # workers are silent between exchanges; the kernel's keepalive detects dead ones
_BUFFER_BYTES = 4 << 20
_SEND_BYTES = 4 << 20  # limit of one sendmsg call, so that `sent_bytes` grows visibly on a slow line
_BLOCK_BYTES = 1 << 19  # copied at once: half of a usual L2 cache, and few calls
_UNACKNOWLEDGED_MS = 10_000  # of sent data, after which the kernel considers the peer's machine or network dead
LOOKS = 5  # at the progress of a connection within its timeout: a stall is found at most 1/5 of the timeout late

Buffer = Any  # bytes, an array, or anything else with the buffer protocol
_encoder = msgspec.msgpack.Encoder()
_opened: "weakref.WeakSet[Stream]" = weakref.WeakSet()  # closed in forked children


class Stalled(ConnectionError):
    """Nothing was received, and nothing that was sent was acknowledged, within the timeout."""


class SocketLike(Protocol):
    """The methods of a socket that a stream needs. `tls.TlsSocket` is the other implementation."""

    def sendmsg(self, buffers: list[Any], /) -> int: ...
    def recv_into(self, buffer: memoryview, size: int, flags: int, /) -> int: ...
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, name: int, value: Any, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Stream:
    """Sends and receives frames over one connection. One thread may send while another receives.

    Attributes:
        sent_bytes, received_bytes: the traffic so far.
        has_stalled: a call has raised Stalled.
    """

    def __init__(self, pipe: SocketLike, *, max_payload_bytes: int = 1 << 62) -> None:
        self._pipe = pipe
        self._max_payload_bytes = max_payload_bytes
        self._head = memoryview(bytearray(HEAD.size))
        self._header = memoryview(bytearray(1024))
        self._block = np.empty(0, np.uint8)
        self.sent_bytes = self.received_bytes = 0
        self.has_stalled = False
        _opened.add(self)
        self._timeout_s = self._blocked_s = 0.0

    def set_timeout(self, timeout_s: float) -> None:
        """Raise Stalled from now on when the connection makes no progress for `timeout_s`.

        A packet that arrives is progress, and so is a sent packet that the other side acknowledges: on a slow line, a
        large message is on its way for longer than the timeout. A crowded line is given the time to lose a packet, and
        the packet that repeats it.
        """
        self._timeout_s = timeout_s
        self._block_for(timeout_s / LOOKS)

    def _block_for(self, blocked_s: float) -> None:
        """Limit how long one call of the kernel blocks."""
        if blocked_s != self._blocked_s:
            self._blocked_s = blocked_s
            # Timeouts of the kernel on a blocking socket save the poll() call of Python's own timeouts.
            limit = struct.pack("ll", int(blocked_s), int(blocked_s % 1 * 1e6) or (0 if blocked_s >= 1 else 1))
            self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Message, *payload: Buffer) -> None:
        """Send one frame."""
        views = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]  # empty: cast fails
        size = sum(view.nbytes for view in views)
        waiting: list[Any] = [memoryview(encode(message, size)), *views]
        self._block_for(self._timeout_s / LOOKS)
        stall = _Stall()
        while waiting:
            try:
                sent = self._pipe.sendmsg(_next_buffers(waiting))
            except BlockingIOError:
                self._look(stall, "accepted")
                continue
            self.sent_bytes += sent
            while waiting and sent >= waiting[0].nbytes:
                sent -= waiting.pop(0).nbytes
            if sent:
                waiting[0] = waiting[0][sent:]

    def receive(
        self, *, max_header_bytes: int = MAX_HEADER_BYTES, deadline: Deadline | None = None
    ) -> tuple[Message, int]:
        """Receive a message; return it and the size of its payload, which the caller must receive next."""
        self._fill(self._head, deadline)
        header_bytes, payload_bytes = decode_head(self._head, max_payload_bytes=self._max_payload_bytes)
        if header_bytes > max_header_bytes:
            raise BadFrame(f"a header of {header_bytes} bytes is announced, where at most {max_header_bytes} may come.")
        if header_bytes > self._header.nbytes:
            self._header = memoryview(bytearray(MAX_HEADER_BYTES))
        header = self._header[:header_bytes]
        self._fill(header, deadline)
        return decode_header(header), payload_bytes

    def receive_message(self, *, max_header_bytes: int = MAX_HEADER_BYTES, deadline: Deadline | None = None) -> Message:
        """Receive a message without a payload."""
        message, payload_bytes = self.receive(max_header_bytes=max_header_bytes, deadline=deadline)
        if payload_bytes:
            raise BadFrame(f"{type(message).__name__} came with a payload of {payload_bytes} bytes, and has none.")
        return message

    def receive_into(self, target: Buffer) -> None:
        """Receive payload into `target`, until it is full."""
        view = memoryview(target)
        if view.nbytes:
            self._fill(view.cast("B"), None)

    def receive_in_blocks(self, target: Array) -> None:
        """Receive payload into an array, block by block: if the connection breaks, each element is old or new."""
        size = min(target.size, _BLOCK_BYTES // target.itemsize)
        if self._block.nbytes < size * target.itemsize:
            self._block = np.empty(size * target.itemsize, np.uint8)
        block = self._block[: size * target.itemsize]
        values, view = block.view(target.dtype), block.data
        for start in range(0, target.size, max(1, size)):
            part = target[start : start + size]
            self._fill(view[: part.nbytes], None)
            part[:] = values[: part.size]

    def receive_bytes(self, size: int, *, at_most: int, deadline: Deadline | None = None) -> bytearray:
        """Receive a payload of `size` bytes; BadFrame if that is more than `at_most`."""
        if size > at_most:
            raise BadFrame(f"a payload of {size} bytes is announced, where at most {at_most} may come.")
        data = bytearray(size)
        self._fill(memoryview(data), deadline)
        return data

    def linger(self) -> None:
        """Wait up to 1 s for the other side to close the connection.

        Closing a socket with unread input would reset it, and the other side would lose the last message.
        """
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_WR)
            deadline = Deadline(1.0)
            waste = memoryview(bytearray(1 << 16))
            while not deadline.is_over():
                self._block_for(deadline.left_s())
                if not self._pipe.recv_into(waste, waste.nbytes, 0):
                    return

    def abort(self) -> None:
        """Shut the connection down. A thread that is blocked in it wakes up."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Close a connection that is broken, and discard what was sent and not acknowledged.

        The kernel would try to deliver it for some more seconds, and delay what follows on a slow line that is back.
        """
        self.abort()
        with contextlib.suppress(OSError):
            self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._pipe.close()

    def _look(self, stall: "_Stall", verb: str) -> None:
        """Call it when a call of the kernel has timed out; Stalled after the last look without progress."""
        progress = progress_of(self._pipe)
        count = *progress.packets, self.received_bytes, self.sent_bytes
        # The first look has none before it to compare with. It counts: a call has just waited in vain.
        stall.looks = stall.looks + 1 if stall.count in {None, count} else 0
        stall.count = count
        if stall.looks >= LOOKS and stall.looks * self._blocked_s >= progress.patience_s:
            self.has_stalled = True
            raise Stalled(f"the other side has {verb} no byte for {self._timeout_s:g} s")

    def _fill(self, view: memoryview, deadline: Deadline | None) -> None:
        stall = _Stall()
        while view.nbytes:
            self._block_for(self._timeout_s / LOOKS if deadline is None else deadline.left_s())
            try:
                count = self._pipe.recv_into(view, min(view.nbytes, 1 << 30), 0 if deadline else socket.MSG_WAITALL)
            except BlockingIOError:
                if deadline is None:
                    self._look(stall, "sent")
                    continue
                self.has_stalled = True
                raise Stalled("the other side has not answered in time") from None
            if not count:
                raise ConnectionResetError("the other side has closed the connection")
            self.received_bytes += count
            view = view[count:]


class _Stall:
    """What one call knows of a connection that may have stalled."""

    def __init__(self) -> None:
        self.looks = 0  # in a row, without progress
        self.count: tuple[int, ...] | None = None  # at the last look


def connect(address: Address, *, timeout_s: float, handshake_s: float, tls: "ssl.SSLContext | None" = None) -> Stream:
    """Connect to `address`, or raise OSError within `timeout_s`, and within `handshake_s` for TLS."""
    link = address.connect(timeout_s)
    try:
        return Stream(configure_socket(link, tls, timeout_s=handshake_s))
    except BaseException:
        link.close()
        raise


def configure_socket(
    link: socket.socket, tls: "ssl.SSLContext | None" = None, *, is_host: bool = False, timeout_s: float
) -> SocketLike:
    """Configure a new connection: no delay, large buffers, detection of dead peers, and TLS if `tls` is given."""
    link.settimeout(timeout_s)
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS),
        ):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    else:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if tls is not None:
        from maniple.wire.tls import TlsSocket

        return TlsSocket(link, tls, is_host=is_host, timeout_s=timeout_s)
    link.settimeout(None)
    return link


def encode(message: Message, payload_bytes: int) -> bytes:
    """Return the first 16 bytes and the header of a frame."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes does not fit into a frame")
    return HEAD.pack(MAGIC, VERSION, 0, len(header), payload_bytes) + header


def decode_head(head: bytes | memoryview, *, max_payload_bytes: int) -> tuple[int, int]:
    """Return the sizes of header and payload."""
    magic, version, zero, header_bytes, payload_bytes = HEAD.unpack(head)
    if magic != MAGIC or zero != 0:
        raise BadFrame(f"{bytes(head[:4])!r} does not begin a frame of maniple. Is another service on this port?")
    if version != VERSION:
        raise BadFrame(
            f"the other side speaks version {version} of the protocol, this one {VERSION}. "
            "Install the same maniple on both."
        )
    if payload_bytes > max_payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes is announced, where at most {max_payload_bytes} may come.")
    return header_bytes, payload_bytes


def decode_header(header: bytes | memoryview) -> Message:
    """Decode a header, or raise BadFrame."""
    try:
        return _decoder().decode(header)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"the header is no message of this protocol: {error}") from None


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(Union[MESSAGE_TYPES])  # noqa: UP007 - on first use, since it takes milliseconds


def _next_buffers(waiting: list[Any]) -> list[Any]:
    """The buffers that the next sendmsg call should send, about _SEND_BYTES in all."""
    if sum(view.nbytes for view in waiting) <= _SEND_BYTES:
        return waiting
    return [waiting[0][:_SEND_BYTES]] if waiting[0].nbytes > _SEND_BYTES else waiting[:1]


def _close_in_child() -> None:
    # A forked child (of a data loader, for instance) would keep its parent's connections open after the parent's
    # death, and the other side would not notice.
    for stream in list(_opened):
        stream.close()


os.register_at_fork(after_in_child=_close_in_child)
