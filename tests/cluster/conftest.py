"""Machines of the tests' own: network namespaces with addresses, on links that can be made slow and cut."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import switch
from tests.cluster.slurm import PATH, TOOLS, Cluster
from tests.conftest import require

HOSTS = 4
_GRACE_S = 10.0


class Network:
    """Hosts 1 to 4, all links without limits at first. What runs on a host knows no other network."""

    def __init__(self) -> None:
        self._name = f"maniple-{secrets.token_hex(4)}"
        self._processes: list[subprocess.Popen[str]] = []
        command = [sys.executable, "-I", switch.__file__, self._name, str(HOSTS)]
        self._switch = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then close it
        )
        assert self._switch.stdout is not None and self._switch.stderr is not None
        if self._switch.stdout.readline() != "ready\n":
            reason = self._switch.stderr.read().strip()
            self.close()
            raise OSError(reason)

    def address(self, host: int) -> str:
        """The address of a host."""
        return switch.address(host)

    def shape(self, *, rate_mbit: float = 0, round_trip_s: float = 0, loss: float = 0) -> None:
        """Give every host a cable of `rate_mbit` each way (0: no limit), the same way to all others, and loss on it."""
        self._order("shape", rate_mbit * 1e6 / 8, round_trip_s / 2, loss)

    def cut(self, host: int) -> None:
        """From now on nothing reaches a host, or comes from it."""
        self._order("cut", host)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._order("heal", host)

    def prefix(self, host: int) -> list[str]:
        """What to write before a command that is to run on a host. The process id is the command's."""
        return ["nsenter", f"--net=/run/netns/{switch.namespace(self._name, host)}"]

    def start(self, host: int, *command: str, folder: Path, output: Path) -> subprocess.Popen[str]:
        """Run a command on a host."""
        with output.open("w") as file:
            process = subprocess.Popen(
                [*self.prefix(host), *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what still runs, the newest first, and remove the hosts."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with suppress(subprocess.TimeoutExpired):
            self._switch.communicate(timeout=_GRACE_S)  # the end of its input is the end of the network
        if self._switch.poll() is None:
            self._switch.kill()
            self._switch.communicate()
        left = [host for host in range(1, HOSTS + 1) if Path("/run/netns", switch.namespace(self._name, host)).exists()]
        assert not left, f"namespaces left behind: those of hosts {left}"

    def _order(self, *words: object) -> None:
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(" ".join(map(str, words)) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "done\n", "the switch has died"


@pytest.fixture
def network() -> Iterator[Network]:
    """Four hosts with addresses of their own. Needs root, `ip`, `nsenter` and tap devices."""
    require("netns", sys.platform == "linux" and os.geteuid() == 0, "network namespaces need Linux and root")
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    require("netns", not missing, f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)")
    try:
        network = Network()
    except OSError as error:  # in a container without the rights, say
        require("netns", False, str(error))
        raise
    try:
        yield network
    finally:
        network.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Five hosts with a real Slurm. Needs root, and the packages slurm-wlm, munge, openssh-server and iproute2."""
    require("slurm", sys.platform == "linux" and os.geteuid() == 0, "virtual hosts need Linux and root")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    require("slurm", not missing, f"not installed: {', '.join(missing)}")
    try:
        cluster = Cluster()
    except OSError as error:  # in a container without the rights, say
        require("slurm", False, str(error))
        raise
    try:
        yield cluster
    finally:
        cluster.close()
