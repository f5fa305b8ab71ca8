"""Machines inside one machine: each has an address, a name, a pid space and a /dev/shm of its own.

Files are shared, as by NFS.

    python machines.py NAME FOLDER COUNT

makes the network namespaces NAME-h0 to NAME-hCOUNT on a bridge in NAME-sw, boots the hosts by FOLDER/boot, says
"ready", and then answers each line of its input with "done":

    off HOST, boot HOST      power off: all its processes are killed at once; start it again
    cut HOST, heal HOST      nothing passes to or from that host any more; all as before

FOLDER/init.HOST holds the process id of a host's init, by which `nsenter` gets there. When its input ends, because its
user has closed it or is dead, all hosts are powered off and the namespaces removed.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_BOOT_S = 60.0


def address(number: int) -> str:
    """The address of a host, counted from 0."""
    return f"10.77.0.{number or 254}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


class Machines:
    """All hosts."""

    def __init__(self, name: str, folder: Path, count: int) -> None:
        self._name, self._folder, self._count = name, folder, count
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def plug(self) -> None:
        """Make the network."""
        switch = f"{self._name}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i in range(self._count + 1):
            host = f"{self._name}-h{i}"
            _ip("netns", "add", host)
            _ip("-n", switch, "link", "add", f"vh{i}", "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", switch, "link", "set", f"vh{i}", "master", "br0", "up")
            _ip("-n", host, "address", "add", f"{address(i)}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                _ip("-n", host, "link", "set", card, "up")

    def boot(self, *hosts: int) -> None:
        """Start hosts, and wait until they are up."""
        for i in hosts:
            self._mark(i, "up").unlink(missing_ok=True)
            with (self._folder / "log" / f"init.{i}").open("ab") as log:
                self._running[i] = subprocess.Popen(  # killed, it takes its child along, and that all of the pid space
                    ["nsenter", f"--net=/run/netns/{self._name}-h{i}", "unshare", "--uts", "--mount", "--pid", "--fork",
                     "--mount-proc", "--kill-child", "bash", str(self._folder / "boot"), str(i)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        for i in hosts:
            self._await_up(i)

    def _await_up(self, i: int) -> None:
        deadline = time.monotonic() + _BOOT_S
        while not self._mark(i, "up").exists():
            if self._running[i].poll() is not None or time.monotonic() > deadline:
                raise OSError(f"host h{i} does not boot: {(self._folder / 'log' / f'init.{i}').read_text()[-500:]}")
            time.sleep(0.02)
        pid = self._running[i].pid
        self._mark(i, "init").write_text(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())

    def off(self, i: int) -> None:
        """Power a host off."""
        if (process := self._running.pop(i, None)) is not None:
            process.kill()
            process.wait()

    def cut(self, i: int) -> None:
        """Take its cable out."""
        _ip("-n", f"{self._name}-sw", "link", "set", f"vh{i}", "down")

    def heal(self, i: int) -> None:
        """Put it in again."""
        _ip("-n", f"{self._name}-sw", "link", "set", f"vh{i}", "up")

    def remove(self) -> None:
        """Power all off and remove the network."""
        for i in list(self._running):
            self.off(i)
        for part in ("sw", *(f"h{i}" for i in range(self._count + 1))):
            with contextlib.suppress(OSError):  # it was not made
                _ip("netns", "delete", f"{self._name}-{part}")

    def _mark(self, i: int, kind: str) -> Path:
        return self._folder / f"{kind}.{i}"


def main(name: str, folder: Path, count: int) -> None:
    """Make the hosts, obey, remove them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    machines = Machines(name, folder, count)
    try:
        machines.plug()
        machines.boot(*range(count + 1))
        print("ready", flush=True)
        for line in sys.stdin:
            order, host = line.split()
            {"off": machines.off, "boot": machines.boot, "cut": machines.cut, "heal": machines.heal}[order](int(host))
            print("done", flush=True)
    except OSError as error:
        sys.exit(f"no machines can be made: {error}")
    finally:
        machines.remove()
        shutil.rmtree(folder, ignore_errors=True)  # also if its user is dead


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
