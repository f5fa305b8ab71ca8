"""The progress of a connection, as the kernel knows it: also of packets that arrive out of order, on a lossy line."""

import contextlib
import fcntl
import socket
import struct
import termios
from array import array
from typing import NamedTuple, Protocol

# Of struct tcp_info (linux/tcp.h): backoff, rto, rtt, data_segs_in, delivered. The last came with Linux 4.18.
_TCP_INFO = struct.Struct("4xB3xI56xI80xI36xI")


class Socket(Protocol):
    """The methods of a socket that are needed here."""

    def fileno(self) -> int: ...
    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


class TransferProgress(NamedTuple):
    """Two looks at a connection without progress between them have the same `packets`.

    Attributes:
        packets: how many with data have come from the other side, and how many of those to it have arrived. Packets
            that probe a receiver without room, because it is stopped, do not count.
        patience_s: how long the kernel takes to send a lost packet twice more, and to receive the acknowledgement.
    """

    packets: tuple[int, int]
    patience_s: float = 0.0


def progress_of(connection: Socket) -> TransferProgress:
    """Look at a connection; of one that is not TCP, only what has left the send buffer is known."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        data = b""
    if len(data) == _TCP_INFO.size:
        backoff, timeout_us, round_trip_us, received, delivered = _TCP_INFO.unpack(data)
        # The timeout doubles with each retransmission: they come after one and after three of the first.
        return TransferProgress((received, delivered), (3 * (timeout_us >> backoff) + 2 * round_trip_us) / 1e6)
    waiting = array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # another thread has closed it
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
    return TransferProgress((0, waiting[0]))
