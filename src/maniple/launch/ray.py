"""A worker's process on a Ray cluster: an actor starts it where there is room, as ssh does on a machine with a name."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.launch import remote
from maniple.launch.job import thread_variables
from maniple.launch.output import Output
from maniple.launch.room import Room
from maniple.launch.ssh import Remote
from maniple.place import environment

_CONNECT_S = 10.0


class Carrier:
    """An actor: starts a worker on its machine and ends it, as the other end of ssh does. If it dies, so the worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, asked: str, log: str) -> int:
        """Until the worker has ended; its exit code. Its output goes to `log`, if that folder is seen here."""
        output = Output(Path(log)) if Path(log).parent.is_dir() else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", remote.__file__],
                stdin=subprocess.PIPE,
                stdout=output.pipe if output else None,
                stderr=subprocess.STDOUT if output else None,
            )
        finally:
            if output:
                os.close(output.pipe)
        self._order(asked)
        exit_code = self._process.wait()
        if output:
            output.finish()
        return exit_code

    def end(self) -> None:
        """Tell the worker to end."""
        self._order("SIGTERM")

    def _order(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()


class Placed(Remote):
    """A worker that an actor carries, and gone when that is.

    Python, maniple, the script and the working folder must have the same paths on all machines of the cluster.
    """

    def start(self) -> None:
        """Ask for room for the worker; it starts as soon as there is."""
        ray = connected(self._room)
        options = {"num_cpus": self._room.cpus, "num_gpus": self._room.gpus, "max_concurrency": 3}
        self._host.expect(self.rank)
        self._actor = ray.remote(Carrier).options(**options).remote()
        told = self._actor.run.remote(json.dumps(self._asked()), str(self._host.folder.log(self.rank).resolve()))
        self._exit_code, self.descriptor = remote.FAILURE_OF_SSH, os.eventfd(0)
        threading.Thread(target=self._await, args=(ray, told), daemon=True).start()
        self._host.events.write("started", worker=self.rank)

    @property
    def is_running(self) -> bool:
        """It has been started and not collected yet."""
        return self.descriptor >= 0

    def signal(self, number: int) -> None:
        """SIGKILL ends the actor, and the worker with it; anything else is passed on as SIGTERM."""
        if self.is_running:
            if number == signal.SIGKILL:
                connected(self._room).kill(self._actor)
            else:
                self._actor.end.remote()

    def reap(self) -> int:
        """Let the actor go; gives the worker's exit code."""
        self.signal(signal.SIGKILL)
        os.close(self.descriptor)
        self.descriptor = -1
        return self._exit_code

    @property
    def _room(self) -> Room:
        assert self._job.ray is not None
        return self._job.ray

    def _await(self, ray: Any, told: Any) -> None:
        """Until the worker has ended, or its actor, or the machine that had both."""
        try:
            self._exit_code = ray.get(told)
        except ray.exceptions.RayError:
            pass
        finally:
            os.eventfd_write(self.descriptor, 1)

    def _asked(self) -> dict[str, Any]:
        asked = super()._asked()
        threads = thread_variables(max(1, round(self._room.cpus)), {})
        # Ray shows a worker its own GPUs alone, and minds the cores itself
        alone = environment(self.place.told(local_rank=0, local_world=1, certificate=None))
        return asked | {"env": threads | asked["env"] | alone, "local_rank": 0, "local_world": 1, "bind": False}


def shortage(room: Room, workers: int) -> str | None:
    """What a person should know of a cluster that has not room for all workers at once; None if it has."""
    nodes: list[dict[str, Any]] = connected(room).nodes()
    places = room.places([node["Resources"] for node in nodes if node["Alive"]])
    if places >= workers:
        return None
    return (
        f"the Ray cluster has room for {places} of {workers} workers with {room.cpus:g} CPUs and {room.gpus:g} GPUs "
        "each. The others start when some have ended, or machines are added; or ask for less (--cpus-per-worker, "
        "--gpus-per-worker)."
    )


def connected(room: Room | None) -> Any:
    """The module ray, connected to the cluster."""
    assert room is not None
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise InvalidArgument(
            "--ray needs the package ray, which is not installed. pip install 'maniple[ray]'."
        ) from None
    if not ray.is_initialized():
        try:
            if room.address != "auto":  # Ray itself would try for minutes
                socket.create_connection(_split(room.address), _CONNECT_S).close()
            ray.init(address=room.address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidArgument(
                f"there is no Ray cluster at {room.address!r}: {error}. Start one (`ray start --head`), or say where "
                "it is with --ray-address HOST:PORT."
            ) from None
    return ray


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
