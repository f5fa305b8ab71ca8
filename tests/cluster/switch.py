"""A network inside one machine: hosts that are network namespaces, and a switch that delays, limits, loses and cuts.

The kernel's own means for that, netem, is often not built in. So each host's network card is a tap device, the
other end of which is held by this process: it takes a frame from one and gives it to another when it is due.

    host 1 --- lane up --->            ---> lane down ---> host 2        a lane sends one frame after the other,
    host 1 <-- lane down --   switch   <---- lane up ----- host 2        and drops what would wait for too long

    python switch.py NAME COUNT

makes the namespaces NAME-1 to NAME-COUNT, which reach each other at `address(number)` and nothing else, says
"ready", and then answers each line of its input with "done":

    shape RATE DELAY LOSS    every lane's bytes per second (0: no limit), seconds one way, share of frames lost
    cut HOST, heal HOST      nothing passes to or from that host any more; all as before

When its input ends, because its user has closed it or is dead, it ends every process in the namespaces and removes
them.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

QUEUE_S = 0.2  # what would wait for longer at a lane is dropped, as by a router with so much memory
_FRAME_BYTES = 1 << 17  # a frame holds up to 64 KB
_FRAMES_AT_ONCE = 32  # taken from one host before it is another one's turn

# From linux/if_tun.h. With a virtio header before each frame, hosts may leave checksums and the cutting into
# segments to their card: frames of 64 KB come through whole, without which Python would be the bottleneck.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_TARGET, _SOURCE = slice(10, 16), slice(16, 22)  # hardware addresses, after the virtio header of 10 bytes


def address(number: int) -> str:
    """The address of a host, counted from 1."""
    return f"10.78.0.{number}"


def namespace(name: str, number: int) -> str:
    """The namespace of a host, counted from 1."""
    return f"{name}-{number}"


class Lane:
    """One direction of a host's cable."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def pass_at(self, now: float, size: int, rate: float) -> float | None:
        """When a frame that comes now has gone through; None if it is dropped."""
        if not rate:
            return now
        start = max(now, self._free_at)
        if start - now > QUEUE_S:
            return None
        self._free_at = start + size / rate
        return self._free_at


class Switch:
    """The switch between the taps of all hosts."""

    def __init__(self, taps: list[int]) -> None:
        self.rate, self.delay_s, self.loss = 0.0, 0.0, 0.0
        self.cut: set[int] = set()
        self._taps = taps
        self._up, self._down = [Lane() for _ in taps], [Lane() for _ in taps]
        self._ports: dict[bytes, int] = {}  # which host has which hardware address, as far as seen
        # Frames on the way: (time, order, target, frame, whether it has left the lane down, its last station).
        self._waiting: list[tuple[float, int, int, bytes, bool]] = []
        self._order = 0

    def run(self, orders: int) -> None:
        """Switch until the descriptor `orders` ends."""
        text = b""
        while True:
            readable, _, _ = select.select([*self._taps, orders], [], [], self._forward())
            for tap in readable:
                if tap != orders:
                    self._take(self._taps.index(tap))
                    continue
                new = os.read(orders, 4096)
                if not new:
                    return
                *lines, text = (text + new).split(b"\n")
                for line in lines:
                    self._obey(*line.decode().split())
                    print("done", flush=True)

    def _obey(self, order: str, *words: str) -> None:
        if order == "shape":
            self.rate, self.delay_s, self.loss = map(float, words)
        elif order == "cut":
            self.cut.add(int(words[0]) - 1)
        elif order == "heal":
            self.cut.discard(int(words[0]) - 1)
        else:
            raise ValueError(f"{order!r} is nothing that a switch does.")

    def _take(self, port: int) -> None:
        """Take what a host has sent."""
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(self._taps[port], _FRAME_BYTES)
            except BlockingIOError:
                return
            self._ports[frame[_SOURCE]] = port
            now = time.monotonic()
            left_at = self._up[port].pass_at(now, len(frame), self.rate)
            if left_at is None or port in self.cut:
                continue
            target = self._ports.get(frame[_TARGET])
            for other in range(len(self._taps)) if target is None else [target]:
                if other != port:
                    self._wait(left_at, other, frame, has_left=False)

    def _wait(self, until: float, target: int, frame: bytes, *, has_left: bool) -> None:
        self._order += 1
        heapq.heappush(self._waiting, (until, self._order, target, frame, has_left))

    def _forward(self) -> float | None:
        """Move all frames that are due; gives how long there is nothing to do, None for ever."""
        while self._waiting:
            remaining_s = self._waiting[0][0] - time.monotonic()
            if remaining_s > 0:
                return remaining_s
            due, _, target, frame, has_left = heapq.heappop(self._waiting)
            if target in self.cut:
                continue
            if has_left:
                with contextlib.suppress(OSError):  # the host is being removed
                    os.write(self._taps[target], frame)
                continue
            left_at = self._down[target].pass_at(due, len(frame), self.rate)
            if left_at is not None and not (self.loss and random.random() < self.loss):
                self._wait(left_at + self.delay_s, target, frame, has_left=True)
        return None


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _plug(name: str, number: int) -> int:
    """Make a host; gives the switch's end of its cable."""
    host = namespace(name, number)
    _ip("netns", "add", host)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    asked = struct.pack("16sH22x", b"maniple%d", _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)  # the kernel counts
    device = fcntl.ioctl(tap, _TUNSETIFF, asked)[:16].rstrip(b"\0").decode()
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    _ip("link", "set", device, "netns", host, "name", "eth0")
    _ip("-n", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
    for card in ("lo", "eth0"):
        _ip("-n", host, "link", "set", card, "up")
    return tap


def _remove(name: str, count: int) -> None:
    """Remove the hosts and whatever runs in them."""
    for host in (namespace(name, number) for number in range(1, count + 1)):
        with contextlib.suppress(OSError):  # it was not made
            for pid in _ip("netns", "pids", host).split():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            _ip("netns", "delete", host)


@contextlib.contextmanager
def _hosts(name: str, count: int) -> Iterator[list[int]]:
    try:
        yield [_plug(name, number) for number in range(1, count + 1)]
    finally:
        _remove(name, count)


def main(name: str, count: int) -> None:
    """Make the network, serve it, remove it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with _hosts(name, count) as taps:
            print("ready", flush=True)
            Switch(taps).run(sys.stdin.fileno())
    except OSError as error:
        sys.exit(f"no network can be made: {error}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
