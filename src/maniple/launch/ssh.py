"""A worker's process on another machine: ssh starts it, and what it prints comes back to the run folder."""

import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.launch import remote
from maniple.launch.child import PRINTING
from maniple.launch.process import Process
from maniple.place import THREAD_VARIABLES, environment, not_inherited

# Nobody is asked for a password; a machine that is gone is noticed within half a minute.
_OPTIONS = ["BatchMode=yes", "ServerAliveInterval=10", "ServerAliveCountMax=3"]


def find_ssh() -> str:
    """The path of ssh."""
    if (path := shutil.which("ssh")) is None:
        raise InvalidArgument("--hosts needs the command ssh, and there is none in PATH. Install an OpenSSH client.")
    return path


def ssh_command(node: str, command: list[str], *, connect_s: float = 20.0) -> list[str]:
    """The words that run a command on another machine."""
    options = [word for option in (f"ConnectTimeout={math.ceil(connect_s)}", *_OPTIONS) for word in ("-o", option)]
    return [find_ssh(), "-T", *options, "--", node, f"exec {shlex.join(command)}"]


class Remote(Process):
    """A worker at the other end of an ssh connection, and gone when that ends.

    Python, maniple, the script and the working folder must have the same paths there.
    """

    def start(self) -> None:
        """Start the script."""
        node = self._job.node(self.rank)
        there = ssh_command(str(node), [sys.executable, "-I", "-S", remote.__file__])
        self._host.expect(self.rank)
        log = self._host.folder.log(self.rank)
        pid = self.spawn(there, env={}, log=log, stdin=subprocess.PIPE)
        self.write(json.dumps(self._asked()).encode() + b"\n")
        self._host.events.write("started", worker=self.rank, pid=pid, node=node)

    def signal(self, number: int) -> None:
        """SIGKILL ends the connection, and the worker with it; anything else is passed on as SIGTERM."""
        if number == signal.SIGKILL:
            super().signal(number)
        else:
            self.write(b"SIGTERM\n")

    def loss(self, exit_code: int) -> str:
        """As on this machine; or its machine, or the way there, is gone: a failure of ssh, not of the script."""
        if self._has_joined and exit_code == remote.FAILURE_OF_SSH:
            return f"{self._job.node(self.rank) or 'its machine'} cannot be reached"
        return super().loss(exit_code)

    def _asked(self) -> dict[str, Any]:
        place = self.place
        certificate = place.certificate.read_text() if place.certificate else None
        return {
            "folder": str(Path.cwd()),
            "command": self.command,
            "env": PRINTING | environment(place.told(certificate=None)),
            "certificate": certificate,
            "local_rank": place.local_rank,
            "devices": [self._job.device(rank) for rank in range(place.local_world)],
            "threads": THREAD_VARIABLES,
            "dropped": not_inherited(),
            "bind": self._job.bind,
        }
