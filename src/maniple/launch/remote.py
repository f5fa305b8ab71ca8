"""What runs on another machine, at the far end of ssh: it starts a worker there, and ends it with the connection.

Run by path, without site packages:  python -I -S remote.py
Its standard input has one line of JSON, by which no token stands on a command line; then a line for each signal.
When the input ends, so has the launcher, or the way to it: the worker is ended, and all that it has started.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

FAILURE_OF_SSH = 255  # ssh ends with this, or as what it has started
_GRACE_S = 3.0  # from SIGTERM to SIGKILL


def main() -> None:
    """Start what the first line asks for, and look after it until it or the connection has ended."""
    orders = open(0, "rb", buffering=0)
    process = _start(json.loads(orders.readline()))
    exit_code = _watch(process, orders)
    sys.exit(min(exit_code if exit_code >= 0 else 128 - exit_code, FAILURE_OF_SSH - 1))


def _start(asked: dict[str, Any]) -> "subprocess.Popen[bytes]":
    try:
        os.chdir(asked["folder"])
    except OSError as error:
        sys.exit(f"maniple: {error.filename} is no folder of {os.uname().nodename}: {error.strerror}. Make it there.")
    cores = sorted(os.sched_getaffinity(0))
    devices: list[str | None] = asked["devices"]
    share = str(_beside("cores").threads_each(len(cores), len(devices)))
    threads = {name: share for name in asked["threads"] if name not in os.environ}
    inherited = {name: value for name, value in os.environ.items() if name not in asked["dropped"]}
    env = inherited | threads | asked["env"]
    descriptors: list[int] = []
    if asked["certificate"]:  # a file without a name, so that none is left
        descriptors = [os.memfd_create("certificate")]
        os.write(descriptors[0], asked["certificate"].encode())
        env["MANIPLE_CERTIFICATE"] = f"/proc/self/fd/{descriptors[0]}"
    parts = _beside("cores").divide_cores(cores, devices, visible=env.get("CUDA_VISIBLE_DEVICES"))
    bound = ",".join(map(str, parts[asked["local_rank"]])) if asked["bind"] else ""
    start = str(Path(__file__).with_name("start.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", start, str(os.getpid()), bound, *asked["command"]],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own: it and its children are ended together
        pass_fds=descriptors,
    )


def _beside(name: str) -> Any:
    """A module of this folder, without maniple, which may not be found here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _watch(process: "subprocess.Popen[bytes]", orders: IO[bytes]) -> int:
    """Until the process has ended; its exit code."""
    ended = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(orders, select.POLLIN)
    while not any(number == ended for number, _ in poll.poll()):
        order = orders.readline()
        os.kill(process.pid, signal.SIGTERM)
        if not order:
            poll.unregister(orders)
            if not poll.poll(_GRACE_S * 1000):
                break
    os.killpg(process.pid, signal.SIGKILL)  # before the reaping, while the number still is its own
    return process.wait()


if __name__ == "__main__":
    main()
