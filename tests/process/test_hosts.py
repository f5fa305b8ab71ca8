"""Workers on other machines that `maniple run --hosts` starts: a real sshd, with memory of its own where it may."""

import getpass
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maniple.job import free_port
from tests.conftest import require
from tests.waiting import await_, is_gone

pytestmark = pytest.mark.usefixtures("without_numba")

TRAINING = """
    import os, sys, time, numpy as np, maniple
    from maniple.environment import read_environment
    worker = maniple.join()
    params = {"w": np.zeros(100)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    print("here", worker.rank, worker.world, worker.local_rank, worker.device, sys.argv[1:], os.getcwd(), flush=True)
    worker.log(pid=os.getpid(), connection=type(worker._connection).__name__)
    for step in range(int(sys.argv[1])):
        params["w"] += 1
        replica.step()
        time.sleep(0.01)
"""


def _sshd(tmp_path: Path, mark: str, *, is_elsewhere: bool) -> tuple[subprocess.Popen[bytes], int]:
    """A server on loopback, for this user and one key, made for this test."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = free_port()
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/key.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nSetEnv MANIPLE_TEST={mark}\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [str(shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")), "-D", "-e", "-f", str(config)]
    if is_elsewhere:  # it and its workers do not see the memory that the test's own processes share
        hidden = os.environ["MANIPLE_SHM"]
        command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {hidden} && exec "$@"', "sh", *command]
    return subprocess.Popen(command, stderr=(tmp_path / "sshd.log").open("wb")), port


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes `ssh HOST` reach a server of the test's own, whatever the host's name."""
    is_here = bool(shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") and shutil.which("ssh"))
    require("ssh", is_here, "workers on other hosts need ssh and sshd")
    started: list[subprocess.Popen[bytes]] = []

    def node(*, is_elsewhere: bool = False) -> None:
        if is_elsewhere:
            require("root", os.geteuid() == 0, "memory of its own needs root")
        server, port = _sshd(tmp_path, os.environ["MANIPLE_TEST"], is_elsewhere=is_elsewhere)
        started.append(server)
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "ssh").write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -p {port} -i {tmp_path}/key -l {getpass.getuser()} "
            f"-o HostName=127.0.0.1 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
            '"$@"\n'
        )
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        await_(lambda: "listening" in (tmp_path / "sshd.log").read_text())

    yield node
    for server in started:
        server.terminate()
        server.wait(20)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_workers_of_other_hosts_train_one_model(start, node, is_elsewhere, tmp_path):
    node(is_elsewhere=is_elsewhere)
    done = start(
        TRAINING, "-n", "2", "--hosts", "node-1,node-2", "--devices", "cpu:0,cpu:1", "--listen", "127.0.0.1:0",
        "--wire", "float16", args=("30", "part-{rank}"),
    )  # fmt: skip
    assert done.wait(100) == 0, done.output
    for rank in range(4):
        said = f"here {rank} 4 {rank % 2} cpu:{rank % 2} ['30', 'part-{rank}'] {tmp_path}"
        assert said in done.log(rank)
        assert f"W{rank} | {said}" in done.output
        assert done.events(rank, "log")[0]["connection"] == ("RemoteConnection" if is_elsewhere else "LocalConnection")
        assert done.events(rank, "leave")
    assert [row["node"] for row in done.events("host", "started")] == ["node-1", "node-1", "node-2", "node-2"]
    assert done.center["w"].tolist() == [120] * 100
    assert done.description["asked"]["hosts"] == ["node-1", "node-2"]


def test_a_remote_worker_that_dies_comes_back_with_its_rank(start, node):
    """Over encrypted connections, whose certificate goes with each start."""
    node(is_elsewhere=True)
    options = ("--hosts", "a,b", "--restarts", "1", "--listen", "127.0.0.1:0", "--tls")
    going = start(TRAINING, *options, args=("200",))
    pid = going.await_event(1, "log", timeout_s=60)[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert going.wait(100) == 0, going.output
    assert "worker 1 was killed by SIGKILL (exit code 137): restart 1 of 1" in going.output
    assert len(going.events(1, "log")) == 2
    assert going.events(1, "leave")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_remote_workers_end_with_their_launcher(start, node, number):
    node(is_elsewhere=True)
    going = start(TRAINING, "--hosts", "a,b", "--listen", "127.0.0.1:0", args=("100000",))
    pids = [going.await_event(rank, "log", timeout_s=60)[0]["pid"] for rank in range(2)]
    token = (going.folder / "token").read_text().strip()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        assert token.encode() not in _read(command)
    going.signal(number)
    going.wait(30)
    for pid in pids:
        await_(lambda pid=pid: is_gone(pid), 30)
    if number == signal.SIGINT:
        assert going.process.returncode == 130
        assert all(going.events(rank, "leave") for rank in range(2)), "each made its last exchange"
    else:
        for path in Path(os.environ["MANIPLE_SHM"]).iterdir():
            shutil.rmtree(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_host_that_cannot_be_reached_ends_the_run_with_the_words_of_ssh(run, node, tmp_path):
    node()
    (tmp_path / "key.pub").write_text("")
    done = run(TRAINING, "--hosts", "node-1", "--listen", "127.0.0.1:0", args=("3",))
    assert done.process.returncode == 1
    assert "Permission denied" in done.output
    assert json.loads((done.folder / "run.json").read_text())["exit_code"] == 1
