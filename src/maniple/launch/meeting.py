"""The meeting point: where the workers of the circle torch find each other."""

import random
import socket
from contextlib import suppress

from maniple.launch.job import Job

_PORTS = range(20000, 30000)  # above the usual services, below those that the system gives to clients


def meeting_point(job: Job) -> str | None:
    """HOST:PORT on the machine of worker 0; None where the circle is the shared memory."""
    if job.hosts:  # nobody can know from here which ports are free there
        return f"{job.hosts[0].rpartition('@')[2]}:{random.choice(_PORTS)}"
    return f"127.0.0.1:{free_port()}" if job.circle == "torch" else None


def free_port() -> int:
    """A port of this machine on which nobody listens. One of the system's own choice might soon be a client's."""
    for port in [*random.sample(_PORTS, 100), 0]:  # 0: all of them are taken, so the system chooses
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return listening.getsockname()[1]
    raise OSError("no port of 127.0.0.1 is free")
