"""The server's process: the host's network side and its controller, started again when it dies."""

import signal
import sys
import time

from maniple.controller.process import BROKEN, UNUSABLE
from maniple.errors import InvalidArgument, WorkerFailed
from maniple.host import Host
from maniple.host.gate import Gate
from maniple.host.server import tell_over
from maniple.launch.child import Child
from maniple.place import environment

_LONGEST_PAUSE_S = 2.0


class Server(Child):
    """The one process behind a host's gate."""

    def __init__(self, host: Host, gate: Gate) -> None:
        super().__init__()
        self._host, self._gate = host, gate
        self._starts = 0
        self._due = time.monotonic()
        self._started = 0.0

    @property
    def is_due(self) -> bool:
        """It should be started now."""
        return not self.is_running and time.monotonic() >= self._due

    def start(self) -> None:
        """Start it, for the first time or again."""
        numbers = [one.fileno() for one in self._gate.sockets]
        command = [sys.executable, "-m", "maniple.controller", *map(str, numbers)]
        env = environment(self._gate.place)
        pid = self.spawn(command, env=env, log=self._host.folder.log("server"), descriptors=numbers)
        self._starts += 1
        self._started = time.monotonic()
        self._host.events.write("server", pid=pid, start=self._starts)

    def restart(self) -> None:
        """Plan another start: at once, or after a pause if it does not live long."""
        lived_s = time.monotonic() - self._started
        self._due = time.monotonic() + (0.0 if lived_s > 1 else _LONGEST_PAUSE_S if lived_s < 0.2 else 0.2)

    def shut(self, timeout_s: float, *, is_over: bool = True) -> None:
        """Let it tell the workers that the run has ended, if it is over; then end it."""
        if self.is_running:
            if is_over:
                tell_over(self._host.segment.path)
            self.signal(signal.SIGTERM)
            if not self.has_ended(timeout_s):
                self.signal(signal.SIGKILL)
            self.collect()
        self._gate.close()


def hopeless(exit_code: int) -> type[InvalidArgument | WorkerFailed] | None:
    """The error to end with, if the server has said that its controller cannot be used, however often it is tried."""
    return {UNUSABLE: InvalidArgument, BROKEN: WorkerFailed}.get(exit_code)
