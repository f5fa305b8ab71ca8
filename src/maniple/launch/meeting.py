"""The meeting point: where the workers of the circle torch find each other."""

import random
import socket

from maniple.launch.job import Job


def meeting_point(job: Job) -> str | None:
    """HOST:PORT on the machine of worker 0; None where the circle is the shared memory."""
    if job.hosts:
        # Nobody can know from here which ports are free there: one above the usual services, below those of clients.
        return f"{job.hosts[0].rpartition('@')[2]}:{random.randint(20000, 29999)}"
    return f"127.0.0.1:{_free_port()}" if job.circle == "torch" else None


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
