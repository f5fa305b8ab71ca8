"""A stream of frames over a connected socket. Payloads go straight from and into arrays, without a copy.

One thread may send while another receives. Every wait has a deadline: `timeout_s` without a single byte either
way ends the connection.
"""

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
import weakref
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from maniple.contracts import Array
from maniple.errors import BadFrame
from maniple.wire.address import Address
from maniple.wire.frames import HEAD, MAX_HEADER_BYTES, decode_head, decode_header, encode
from maniple.wire.messages import Message

if TYPE_CHECKING:
    import ssl  # takes its time, and few need it

Buffer = Any  # bytes, or anything that lies in memory as they do: an array
TIMEOUT_S = 30.0
NEVER_S = 1e9  # between exchanges a worker is silent; the kernel notices when it is gone
_BUFFER_BYTES = 4 << 20
_PIECE_BYTES = 4 << 20
_BLOCK = 1 << 15  # elements, which stay in the cache between their arrival and their copy
_DEAD_AFTER_MS = 10_000  # data that nobody has acknowledged for so long: the network or the machine is gone


_opened: "weakref.WeakSet[Stream]" = weakref.WeakSet()


class Stalled(ConnectionError):
    """No byte came or went for longer than the limit."""


class Pipe(Protocol):
    """What a stream asks of a socket; `tls.Pipe` is another one."""

    def sendmsg(self, buffers: list[Any], /) -> int: ...
    def recv_into(self, buffer: memoryview, size: int, flags: int, /) -> int: ...
    def fileno(self) -> int: ...
    def setsockopt(self, level: int, name: int, value: Any, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Stream:
    """Frames over one connection."""

    def __init__(self, pipe: Pipe, *, max_payload_bytes: int = 1 << 62) -> None:
        self._pipe = pipe
        self._max_payload_bytes = max_payload_bytes
        self._head = memoryview(bytearray(HEAD.size))
        self._header = memoryview(bytearray(1024))
        self._block = np.empty(0, np.uint8)
        self.sent_bytes = self.received_bytes = 0
        _opened.add(self)
        self._timeout_s = 0.0

    def set_timeout(self, timeout_s: float) -> None:
        """Without a byte for so long, sending or receiving raises Stalled."""
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            # The kernel's own deadline on a blocking socket: one system call per piece, none to ask first.
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or (0 if timeout_s >= 1 else 1))
            self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Message, *payload: Buffer) -> None:
        """Send one frame."""
        views = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]  # else it cannot be cast
        size = sum(view.nbytes for view in views)
        waiting: list[Any] = [memoryview(encode(message, size)), *views]
        try:
            while waiting:
                sent = self._pipe.sendmsg(_first(waiting))
                self.sent_bytes += sent
                while waiting and sent >= waiting[0].nbytes:
                    sent -= waiting.pop(0).nbytes
                if sent:
                    waiting[0] = waiting[0][sent:]
        except BlockingIOError:
            raise Stalled(f"the other side has taken no byte for {self._timeout_s:g} s") from None

    def receive(
        self, *, max_header_bytes: int = MAX_HEADER_BYTES, deadline: float | None = None
    ) -> tuple[Message, int]:
        """The next message, and how many bytes of payload follow; they must be taken by `receive_into`."""
        self._fill(self._head, deadline)
        header_bytes, payload_bytes = decode_head(self._head, max_payload_bytes=self._max_payload_bytes)
        if header_bytes > max_header_bytes:
            raise BadFrame(f"a header of {header_bytes} bytes is announced, where at most {max_header_bytes} may come.")
        if header_bytes > self._header.nbytes:
            self._header = memoryview(bytearray(MAX_HEADER_BYTES))
        header = self._header[:header_bytes]
        self._fill(header, deadline)
        return decode_header(header), payload_bytes

    def receive_message(self, *, max_header_bytes: int = MAX_HEADER_BYTES, deadline: float | None = None) -> Message:
        """The next message, which must have no payload."""
        message, payload_bytes = self.receive(max_header_bytes=max_header_bytes, deadline=deadline)
        if payload_bytes:
            raise BadFrame(f"{type(message).__name__} came with a payload, which it never has.")
        return message

    def receive_into(self, target: Buffer) -> None:
        """Fill `target` with payload."""
        view = memoryview(target)
        if view.nbytes:
            self._fill(view.cast("B"), None)

    def receive_in_blocks(self, target: Array) -> None:
        """Fill an array with payload, block by block: if the connection breaks, each element is old or new."""
        for start in range(0, target.size, _BLOCK):
            part = target[start : start + _BLOCK]
            if self._block.size < part.nbytes:
                self._block = np.empty(part.nbytes, np.uint8)
            block = self._block[: part.nbytes]
            self._fill(block.data, None)
            part[:] = block.view(target.dtype)

    def receive_bytes(self, size: int, *, at_most: int, deadline: float | None = None) -> bytearray:
        """A small payload."""
        if size > at_most:
            raise BadFrame(f"a payload of {size} bytes is announced, where at most {at_most} may come.")
        data = bytearray(size)
        self._fill(memoryview(data), deadline)
        return data

    def linger(self) -> None:
        """Let the other side read what was sent last, though this one has not read all of its own: at most a second."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + 1
            waste = memoryview(bytearray(1 << 16))
            while time.monotonic() < deadline:
                self.set_timeout(max(0.001, deadline - time.monotonic()))
                if not self._pipe.recv_into(waste, waste.nbytes, 0):
                    return

    def abort(self) -> None:
        """End the connection for both sides at once; a thread that waits in it wakes up."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the connection go."""
        with contextlib.suppress(OSError):
            self._pipe.close()

    def _taken(self) -> int:
        """The bytes that the other side has taken of what was sent."""
        waiting = array("i", [0])
        try:
            fcntl.ioctl(self._pipe.fileno(), termios.TIOCOUTQ, waiting)
        except (OSError, ValueError):  # another thread has closed it
            return 0
        return self.sent_bytes - waiting[0]

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        taken, is_first = self.sent_bytes, True  # what was sent before is taken soon: that is no answer
        while view.nbytes:
            if deadline is not None:
                self.set_timeout(max(0.001, deadline - time.monotonic()))
            try:
                count = self._pipe.recv_into(view, min(view.nbytes, 1 << 30), 0 if deadline else socket.MSG_WAITALL)
            except BlockingIOError:
                before, taken = taken, self._taken()
                is_moving = taken > before or (is_first and taken < self.sent_bytes)  # or some is under way
                is_first = False
                if is_moving and deadline is None:
                    continue  # it is still taking what another thread sends, and answers when it has all of it
                raise Stalled(f"the other side has sent no byte for {self._timeout_s:g} s") from None
            if not count:
                raise ConnectionResetError("the other side has closed the connection")
            self.received_bytes += count
            view = view[count:]


def _first(waiting: list[Any]) -> list[Any]:
    """As much as one call should take, so that a slow line is seen to move between two of them."""
    if sum(view.nbytes for view in waiting) <= _PIECE_BYTES:
        return waiting
    return [waiting[0][:_PIECE_BYTES]] if waiting[0].nbytes > _PIECE_BYTES else waiting[:1]


def connect(address: Address, *, timeout_s: float, tls: "ssl.SSLContext | None" = None) -> Stream:
    """A stream to `address`, or OSError within `timeout_s`."""
    link = address.connect(timeout_s)
    try:
        return Stream(prepare(link, tls, timeout_s=timeout_s))
    except BaseException:
        link.close()
        raise


def prepare(
    link: socket.socket, tls: "ssl.SSLContext | None" = None, *, is_host: bool = False, timeout_s: float
) -> Pipe:
    """Set a fresh connection up: no delays, large buffers, a dead peer noticed, encryption if asked for."""
    link.settimeout(timeout_s)
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS),
        ):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    else:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if tls is not None:
        from maniple.wire.tls import TlsPipe

        return TlsPipe(link, tls, is_host=is_host, timeout_s=timeout_s)
    link.settimeout(None)
    return link


def _close_in_child() -> None:
    # A forked child (a data loader's, say) would keep its parent's connections open after the parent's death, and
    # the other side would not hear of it.
    for stream in list(_opened):
        stream.close()


os.register_at_fork(after_in_child=_close_in_child)
