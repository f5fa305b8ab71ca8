"""The processes of one contestant, which are idle until the parent sends a request: contestants can take turns."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0  # for every wait for the processes


class Cast:
    """Processes of some commands, which call `answer`. They exit when the cast is closed."""

    def __init__(self, address: Path, commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]], count: int):
        """Start the commands, each with its variables added to the environment, and wait for `count` processes."""
        self._name = address.name
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(address))
        self._server.listen()
        self._server.settimeout(1)
        self._links: list[socket.socket] = []
        self._started = [
            subprocess.Popen(command, env=os.environ | env) for command, env in zip(commands, envs, strict=True)
        ]
        try:
            for _ in range(count):
                self._links.append(self._accept())
        except BaseException:
            self.close()
            raise
        self._files = [link.makefile("r") for link in self._links]

    def _accept(self) -> socket.socket:
        for _ in range(int(DEADLINE_S)):
            with contextlib.suppress(TimeoutError):
                link = self._server.accept()[0]
                link.settimeout(DEADLINE_S)
                return link
            if any(process.poll() for process in self._started):
                break
        raise RuntimeError(
            f"{self._name}: some processes have failed, or not come within {DEADLINE_S} s. See what they said."
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    def ask(self, *question: Any) -> list[Any]:
        """Send the same request to all processes at once, and return their answers."""
        for link in self._links:
            link.sendall(f"{json.dumps(question)}\n".encode())
        lines = [file.readline() for file in self._files]
        if not all(lines):
            raise RuntimeError(f"{self._name}: a process has ended before its answer. See what it said.")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._server.close()
        for process in self._started:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answer(address: str, reply: Callable[..., Any]) -> None:
    """Answer the parent's requests with `reply` until the connection closes. Called in the processes of a cast."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        for line in link.makefile("r"):
            link.sendall(f"{json.dumps(reply(*json.loads(line)))}\n".encode())
