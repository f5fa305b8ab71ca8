"""The remote end of an ssh connection: starts a worker there, and ends it when the connection closes.

Run by path, without site packages:  python -I -S ssh_remote.py
Standard input carries one line of JSON, so that no token is visible on a command line, then one line per signal. The
end of the input means that the launcher, or the connection to it, is gone: the worker and its children are killed.
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

SSH_FAILED = 255  # exit code of ssh for its own failures; else it exits as the remote command did
_GRACE_S = 3.0  # from SIGTERM to SIGKILL


def main() -> None:
    """Start the worker that the first line describes, and supervise it until it or the connection has ended."""
    commands = open(0, "rb", buffering=0)
    process = _start(json.loads(commands.readline()))
    exit_code = _supervise(process, commands)
    sys.exit(min(exit_code if exit_code >= 0 else 128 - exit_code, SSH_FAILED - 1))


def _start(request: dict[str, Any]) -> "subprocess.Popen[bytes]":
    try:
        os.chdir(request["folder"])
    except OSError as error:
        sys.exit(
            f"maniple: {error.filename} is not a folder on {os.uname().nodename}: {error.strerror}. Create it there."
        )
    cores = sorted(os.sched_getaffinity(0))
    devices: list[str | None] = request["devices"]
    share = str(_beside("cores").threads_each(len(cores), len(devices)))
    threads = {name: share for name in request["threads"] if name not in os.environ}
    inherited = {name: value for name, value in os.environ.items() if name not in request["dropped"]}
    env = inherited | threads | request["env"]
    descriptors: list[int] = []
    if request["certificate"]:  # an anonymous file, so that none is left behind
        descriptors = [os.memfd_create("certificate")]
        os.write(descriptors[0], request["certificate"].encode())
        env["MANIPLE_CERTIFICATE"] = f"/proc/self/fd/{descriptors[0]}"
    parts = _beside("cores").divide_cores(cores, devices, visible=env.get("CUDA_VISIBLE_DEVICES"))
    bound = ",".join(map(str, parts[request["local_rank"]])) if request["bind"] else ""
    start = str(Path(__file__).with_name("start.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", start, str(os.getpid()), bound, *request["command"]],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # its own process group, so that its children are killed with it
        pass_fds=descriptors,
    )


def _beside(name: str) -> Any:
    """Load a module of this folder by path: maniple itself may not be importable here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _supervise(process: "subprocess.Popen[bytes]", commands: IO[bytes]) -> int:
    """Pass on signals until the process has ended, and return its exit code."""
    ended = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(commands, select.POLLIN)
    while not any(number == ended for number, _ in poll.poll()):
        command = commands.readline()
        os.kill(process.pid, signal.SIGTERM)
        if not command:  # the connection is closed
            poll.unregister(commands)
            if not poll.poll(_GRACE_S * 1000):
                break
    os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, while the process id cannot be reused
    return process.wait()


if __name__ == "__main__":
    main()
