"""Workers on other machines: started by ssh on named ones, or by Ray where there are resources.

Python, maniple, the script and the working folder must have the same paths on all machines. `ssh_remote` starts the
worker there.
"""

import importlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from maniple.environment import THREAD_VARIABLES, variables_for, variables_not_inherited
from maniple.errors import InvalidArgument
from maniple.job import RayResources, thread_variables
from maniple.launch import ssh_remote
from maniple.launch.output import Output
from maniple.launch.process import OUTPUT_VARIABLES, LaunchedWorker

_REMOTE = [sys.executable, "-I", "-S", ssh_remote.__file__]
# Never prompt for a password; notice within half a minute that a machine is gone.
_SSH_OPTIONS = ["BatchMode=yes", "ServerAliveInterval=10", "ServerAliveCountMax=3"]
_CONNECT_TIMEOUT_S = 10.0  # Ray itself retries for minutes


class SshWorker(LaunchedWorker):
    """A worker at the other end of an ssh connection, which ends with the connection. Its output comes back."""

    def launch(self) -> dict[str, Any]:
        node = self._job.node(self.rank)
        command = ssh_command(str(node), _REMOTE)
        pid = self.spawn(command, env={}, log=self._host.folder.log(self.rank), stdin=subprocess.PIPE)
        self.write(json.dumps(self._request()).encode() + b"\n")
        return {"pid": pid, "node": node}

    def signal(self, number: int) -> None:
        """SIGKILL closes the connection, which ends the worker; any other signal is passed on as SIGTERM."""
        if number == signal.SIGKILL:
            super().signal(number)
        else:
            self.write(b"SIGTERM\n")

    def loss_reason(self, exit_code: int) -> str:
        """As for a local worker; also a failure of ssh itself, after the worker had joined."""
        if self._has_joined and exit_code == ssh_remote.SSH_FAILED:
            return f"{self._job.node(self.rank) or 'its machine'} cannot be reached"
        return super().loss_reason(exit_code)

    def _request(self) -> dict[str, Any]:
        """What `ssh_remote` needs to start the worker."""
        environment = self.environment
        return {
            "folder": str(Path.cwd()),
            "command": self.command,
            "env": OUTPUT_VARIABLES | variables_for(environment.replace(certificate=None)),
            "certificate": environment.certificate.read_text() if environment.certificate else None,
            "local_rank": environment.local_rank,
            "devices": [self._job.device(rank) for rank in range(environment.local_world)],
            "threads": THREAD_VARIABLES,
            "dropped": variables_not_inherited(),
            "bind": self._job.bind,
        }


def ssh_command(node: str, command: list[str], *, connect_s: float = 20.0) -> list[str]:
    """The command line that runs `command` on another machine."""
    if (ssh := shutil.which("ssh")) is None:
        raise InvalidArgument("--hosts needs the command ssh, which is not in PATH. Install an OpenSSH client.")
    options = [word for one in (f"ConnectTimeout={math.ceil(connect_s)}", *_SSH_OPTIONS) for word in ("-o", one)]
    return [ssh, "-T", *options, "--", node, f"exec {shlex.join(command)}"]


class WorkerActor:
    """The actor that starts a worker on its machine by `ssh_remote`. The worker dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: str, log: str) -> int:
        """Run the worker and return its exit code. Its output goes to `log` if that folder is visible here."""
        output = Output(Path(log)) if Path(log).parent.is_dir() else None
        try:
            self._process = subprocess.Popen(
                _REMOTE,
                stdin=subprocess.PIPE,
                stdout=output.pipe if output else None,
                stderr=subprocess.STDOUT if output else None,
            )
        finally:
            if output:
                os.close(output.pipe)
        self._send(request)
        exit_code = self._process.wait()
        if output:
            output.finish()
        return exit_code

    def end(self) -> None:
        self._send("SIGTERM")

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()


class RayWorker(SshWorker):
    """A worker started by an actor, which ends with the actor."""

    def launch(self) -> dict[str, Any]:
        """Request resources for the worker; it starts as soon as the cluster grants them."""
        ray = connected(self._resources)
        options = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus, "max_concurrency": 3}
        self._actor = ray.remote(WorkerActor).options(**options).remote()
        result = self._actor.run.remote(json.dumps(self._request()), str(self._host.folder.log(self.rank).resolve()))
        self._exit_code, self.descriptor = ssh_remote.SSH_FAILED, os.eventfd(0)
        threading.Thread(target=self._await, args=(ray, result), daemon=True).start()
        return {}

    def signal(self, number: int) -> None:
        """SIGKILL kills the actor, and the worker with it; any other signal is passed on as SIGTERM."""
        if self.is_running:
            if number == signal.SIGKILL:
                connected(self._resources).kill(self._actor)
            else:
                self._actor.end.remote()

    def reap(self) -> int:
        """Release the actor and return the worker's exit code."""
        self.signal(signal.SIGKILL)
        os.close(self.descriptor)
        self.descriptor = -1
        return self._exit_code

    @property
    def _resources(self) -> RayResources:
        assert self._job.ray is not None
        return self._job.ray

    def _await(self, ray: Any, result: Any) -> None:
        """Wait until the worker, its actor or their machine is gone."""
        try:
            self._exit_code = ray.get(result)
        except ray.exceptions.RayError:
            pass
        finally:
            os.eventfd_write(self.descriptor, 1)

    def _request(self) -> dict[str, Any]:
        request = super()._request()
        threads = thread_variables(max(1, round(self._resources.cpus)), {})
        # Ray shows a worker only its own GPUs, and assigns cores itself.
        alone = variables_for(self.environment.replace(local_rank=0, local_world=1, certificate=None))
        return request | {"env": threads | request["env"] | alone, "local_rank": 0, "bind": False}


def shortage(resources: RayResources, workers: int) -> str | None:
    """A warning for a cluster that cannot run all workers at once; None if it can."""
    nodes: list[dict[str, Any]] = connected(resources).nodes()
    places = resources.places([node["Resources"] for node in nodes if node["Alive"]])
    if places >= workers:
        return None
    return (
        f"the Ray cluster has room for {places} of {workers} workers with {resources.cpus:g} CPUs and "
        f"{resources.gpus:g} GPUs each. The others start when some have ended or machines are added. Or request less "
        "(--cpus-per-worker, --gpus-per-worker)."
    )


def connected(resources: RayResources) -> Any:
    """The module `ray`, connected to the cluster."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise InvalidArgument(
            "--ray needs the package ray, which is not installed. pip install 'maniple[ray]'."
        ) from None
    if not ray.is_initialized():
        try:
            if resources.address != "auto":
                host, _, port = resources.address.rpartition(":")
                socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
            ray.init(address=resources.address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidArgument(
                f"there is no Ray cluster at {resources.address!r}: {error}. Start one (`ray start --head`), or say "
                "where it is with --ray-address HOST:PORT."
            ) from None
    return ray
