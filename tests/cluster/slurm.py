"""A real Slurm on machines of the tests' own: h0 has the controller, h1 to h4 the work, and an sshd each.

Partition `main` is the default; jobs of `urgent` take the place of those in `main`, which are requeued. Each node says
that it has 4 cores and 2 GPUs.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster import machines

HOSTS = 4
TOOLS = ("ip", "nsenter", "unshare", "munged", "slurmctld", "slurmd", "sbatch", "sshd", "ssh-keygen")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_GRACE_S = 20.0
_COMMAND_S = 60.0

_CONF = """\
ClusterName=maniple
SlurmctldHost=h0({controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/ctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
KillWait=20
TmpFS={folder}/tmp.%n
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,bf_interval=1
GresTypes=gpu
NodeName=h[1-{hosts}] CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_BOOT = """\
export SLURM_CONF={folder}/slurm.conf PATH={path}
hostname h$1; mount --bind {folder}/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm
if [ $1 = 0 ]; then
    munged --force --key-file={folder}/munge/key --socket={folder}/munge/sock --pid-file={folder}/munge/pid \\
        --log-file={folder}/munge/log --seed-file={folder}/munge/seed
    slurmctld
else
    $(command -v sshd) -f {folder}/ssh/sshd_config -E {folder}/log/sshd.$1
    slurmd
fi
echo up > {folder}/up.$1
while :; do sleep 3600 & wait; done
"""
_SSHD = """\
Port 22
HostKey {folder}/ssh/host
AuthorizedKeysFile {folder}/ssh/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
"""
_SSH = """\
Host *
  User root
  IdentityFile {folder}/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/ssh/known
  LogLevel ERROR
  BatchMode yes
"""


class Cluster:
    """Hosts h0 to h4 and their Slurm. Commands run on h0 unless said otherwise."""

    def __init__(self) -> None:
        self._name = f"maniple-{secrets.token_hex(3)}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir="/tmp"))  # short: sockets lie in it
        self._started: list[subprocess.Popen[str]] = []
        _furnish(self.folder)
        self._machines = subprocess.Popen(
            [sys.executable, "-I", machines.__file__, self._name, str(self.folder), str(HOSTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then close it
        )
        assert self._machines.stdout is not None and self._machines.stderr is not None
        try:
            if self._machines.stdout.readline() != "ready\n":
                raise OSError(self._machines.stderr.read().strip())
            self._await_nodes()
        except BaseException:
            self.close()
            raise

    @property
    def ssh_config(self) -> Path:
        """By `ssh -F` with this file, each host reaches h1 to h4."""
        return self.folder / "ssh" / "config"

    def address(self, host: int) -> str:
        """The address of a host."""
        return machines.address(host)

    def memory(self, host: int) -> Path:
        """The host's /dev/shm, as seen from here."""
        return Path("/proc", self._init(host), "root", "dev", "shm")

    def on(self, host: int, *command: str | Path, folder: Path | None = None, check: bool = True) -> str:
        """Run a command on a host, and wait for its end; gives what it printed."""
        done = subprocess.run(
            self._there(host, command), cwd=folder or self.folder, env=self._environment(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command} on h{host}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def start(self, host: int, *command: str | Path, folder: Path, output: Path) -> subprocess.Popen[str]:
        """Run a command on a host, and go on."""
        with output.open("w") as file:
            process = subprocess.Popen(
                self._there(host, command), cwd=folder, env=self._environment(), text=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to what `start` has started: the child of nsenter, which stays outside the pid space."""
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def off(self, host: int) -> None:
        """Power a host off."""
        self._order("off", host)

    def boot(self, host: int) -> None:
        """Start a host again."""
        self._order("boot", host)

    def cut(self, host: int) -> None:
        """From now on nothing reaches a host, or comes from it."""
        self._order("cut", host)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        self._order("heal", host)

    def clear(self) -> None:
        """Cancel all jobs and wait until the queue is empty and all nodes are idle."""
        self.on(0, "scancel", "--user=root", check=False)
        self._await_nodes()

    def close(self) -> None:
        """Power all off, and remove everything."""
        for process in self._started:
            if process.poll() is None:
                with suppress(OSError):
                    self.signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._machines.communicate(timeout=_GRACE_S)  # the end of its input is the end of the machines
        if self._machines.poll() is None:
            self._machines.kill()
            self._machines.communicate()
        for process in self._started:
            process.wait(_GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        left = list(Path("/run/netns").glob(f"{self._name}-*"))
        assert not left, f"namespaces left behind: {left}"

    def _there(self, host: int, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", "-t", self._init(host), "-n", "-u", "-m", "-p", "--wd=.", *map(str, command)]

    def _environment(self) -> dict[str, str]:
        """That of the test, but the hosts have a /dev/shm of their own."""
        kept = {name: value for name, value in os.environ.items() if name != "MANIPLE_SHM"}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def _init(self, host: int) -> str:
        return (self.folder / f"init.{host}").read_text()

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + _COMMAND_S
        while self.on(0, "sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False).strip() != str(HOSTS):
            if time.monotonic() > deadline:
                raise OSError(f"Slurm has not {HOSTS} idle nodes: {self.on(0, 'sinfo', check=False)}")
            time.sleep(0.1)

    def _order(self, order: str, host: int) -> None:
        assert self._machines.stdin is not None and self._machines.stdout is not None
        self._machines.stdin.write(f"{order} {host}\n")
        self._machines.stdin.flush()
        assert self._machines.stdout.readline() == "done\n", "the machines have died"


def _furnish(folder: Path) -> None:
    """All that the hosts need in the folder that they share."""
    folder.chmod(0o711)
    for name in ("state", "log", "munge", "ssh", "gpu", *(f"tmp.h{i}" for i in range(HOSTS + 1))):
        (folder / name).mkdir(mode=0o711)
    Path("/run/sshd").mkdir(exist_ok=True)
    names = "".join(f"{machines.address(i)} h{i}\n" for i in range(HOSTS + 1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (folder / "boot").write_text(_BOOT.format(folder=folder, path=PATH))
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, controller=machines.address(0), hosts=HOSTS))
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(64))
    (folder / "munge" / "key").chmod(0o600)
    for i in range(2):
        os.mknod(folder / "gpu" / str(i), 0o20666, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu/[0-1]\n")
    _furnish_ssh(folder)


def _furnish_ssh(folder: Path) -> None:
    for name in ("id", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "ssh" / name], check=True)
    key = (folder / "ssh" / "host.pub").read_text()
    known = "".join(f"h{i},{machines.address(i)} {key}" for i in range(HOSTS + 1))
    (folder / "ssh" / "known").write_text(known)
    (folder / "ssh" / "sshd_config").write_text(_SSHD.format(folder=folder))
    (folder / "ssh" / "config").write_text(_SSH.format(folder=folder))
