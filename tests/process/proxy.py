"""A proxy between workers and their host that cuts connections at random bytes, or slows them down."""

import contextlib
import random
import socket
import threading
import time

_PIECE = 1 << 16


class Proxy:
    """Forwards connections to `target`. Each is cut after a random number of bytes, until `cuts` were made."""

    def __init__(
        self, target: str, *, cuts: int = 0, most_bytes: int = 1, bytes_per_s: float = 0, seed: int = 0
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._left, self._most_bytes, self.bytes_per_s = cuts, most_bytes, bytes_per_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._free_at = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 2)
            except OSError:
                near.close()
                continue
            budget = [self._random.randrange(self._most_bytes)] if self._left > 0 else None
            for a, b in ((near, far), (far, near)):
                a.settimeout(60)
                threading.Thread(target=self._forward, args=(a, b, budget), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, budget: list[int] | None) -> None:
        try:
            while data := source.recv(_PIECE):
                if budget is not None:
                    with self._lock:
                        data = data[: budget[0]]
                        budget[0] -= len(data)
                        is_cut = budget[0] <= 0
                else:
                    is_cut = False
                if self.bytes_per_s:
                    self._wait(len(data))
                target.sendall(data)
                if is_cut:
                    self._count()
                    break
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _count(self) -> None:
        with self._lock:
            self.cuts += 1
            self._left -= 1

    def _wait(self, size: int) -> None:
        """One line for all: what comes later waits for what came before."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size / self.bytes_per_s
            pause_s = self._free_at - now
        time.sleep(pause_s)
