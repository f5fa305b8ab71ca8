"""What `maniple doctor --hosts` runs on another machine, at the far end of ssh. It needs nothing but Python itself.

Its source is sent there, and a line that calls `main` with:

    folder, script      where workers would run, and what; digest: the script's own
    meet                addresses of a port that the doctor has opened
    word                what is said there and here, to be sure of whom one has met
    wait_s              the longest wait

It prints one line of JSON, then waits for the doctor to come to a port of its own.
"""

import hashlib
import json
import os
import random
import socket
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "maniple doctor: "
PORTS = range(20000, 30000)  # those of launch/meeting


def versions() -> dict[str, str]:
    """What is installed here."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("maniple", "numpy", "torch", "numba", "mpi4py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def digest(path: Path) -> str:
    """The digest of a file; nothing if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def meet(address: str, port: int, word: str, wait_s: float) -> str:
    """Whether the doctor is met there; nothing is said if so, else what went wrong."""
    try:
        with socket.create_connection((address, port), wait_s) as link:
            link.settimeout(wait_s)
            said = link.recv(len(word), socket.MSG_WAITALL).decode(errors="replace")
            return "" if said == word else "somebody else answers there"
    except OSError as error:
        return str(error)


def free_mb(folder: str) -> float:
    """Room in a folder; none if it is not there."""
    with suppress(OSError):
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize / 1e6
    return 0.0


def opened() -> socket.socket:
    """A port of those at which workers meet: a firewall may let these in, and no others."""
    for port in random.sample(PORTS, 100):
        with suppress(OSError):
            return socket.create_server(("", port))
    return socket.create_server(("", 0))


def main(asked: dict[str, Any]) -> None:
    """Tell what is here."""
    with opened() as listener:
        told = {
            "node": os.uname().nodename,
            "versions": versions(),
            "has_folder": Path(asked["folder"]).is_dir(),
            "script": digest(Path(asked["folder"], asked["script"])) if asked["script"] else "",
            "memory_mb": free_mb("/dev/shm"),
            "cores": len(os.sched_getaffinity(0)),
            "met": {each: meet(each, asked["port"], asked["word"], asked["wait_s"]) for each in asked["meet"]},
            "port": listener.getsockname()[1],
        }
        print(MARK + json.dumps(told), flush=True)
        listener.settimeout(asked["wait_s"])
        with suppress(OSError):
            link, _ = listener.accept()
            with link:
                link.sendall(asked["word"].encode())
