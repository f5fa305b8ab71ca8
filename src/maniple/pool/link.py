"""A link: messages between the caller and one worker. There is never more than one of each on its way."""

import os
import select
import socket
import struct
import time

_SIZE = struct.Struct("<Q")
_MOST = 1 << 16  # bytes that are read at once


def ready(poll: select.poll, awake_s: float, timeout_ms: float) -> list[tuple[int, int]]:
    """What can be read, of the links of `poll`. Waits awake at first: a core that falls idle comes back slowly."""
    deadline = time.perf_counter() + awake_s
    while not (found := poll.poll(0)) and time.perf_counter() < deadline:
        os.sched_yield()
    return found or poll.poll(timeout_ms)


class Link:
    """One end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """The file descriptor."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._end.sendall(_SIZE.pack(len(message)) + message)

    def receive(self) -> memoryview:
        """Wait for a message. Raises EOFError if the other end is closed."""
        data = self._read(_MOST)
        while len(data) < _SIZE.size:
            data += self._read(_MOST)
        (size,) = _SIZE.unpack_from(data)
        missing = size + _SIZE.size - len(data)
        if missing > 0:
            data = data + self._rest(missing)
        return memoryview(data)[_SIZE.size :]

    def close(self) -> None:
        """Let the other end know that there are no more messages."""
        self._end.close()

    def _read(self, most: int) -> bytes:
        data = self._end.recv(most)
        if not data:
            raise EOFError
        return data

    def _rest(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(self._read(min(size, 1 << 20)))
            size -= len(parts[-1])
        return b"".join(parts)
