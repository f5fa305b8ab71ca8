"""A worker's connection to its host, where all begin together."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.contracts import Center
from maniple.environment import Environment
from maniple.errors import PeerLost, WaitedTooLong
from maniple.memory.locks import held_by
from maniple.memory.segment import DEAD, LIVE
from maniple.rules import BSP
from maniple.worker import connection
from maniple.worker.connection import LocalConnection, RemoteConnection
from tests.serving import TOKEN, Serving


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ["MANIPLE_SHM"]), "0" * 16, tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def second(segment: Segment) -> Iterator[LocalConnection]:
    """The connection of worker 1 in a run that is to be repeatable; its host does not answer."""
    environment = Environment(
        rank=1, world=2, segment=segment.path, address="127.0.0.1:1", token="x", launcher="maniple"
    )
    connection = LocalConnection(environment.replace(deterministic=True), lambda: (0, 0, False))
    yield connection
    connection.leave(is_early=False)


def open_as(connection: LocalConnection | RemoteConnection) -> tuple[Center, bool]:
    return connection.open("center-0", adapt({"w": np.full(3, 2.0)}, None), rule=BSP(), lock=True, wire="float32")


def test_worker_1_does_not_overtake_worker_0_that_has_begun_to_create_the_center(segment, second):
    """Worker 0 has created the file, and does not hold its lock yet."""
    segment.mark(0, LIVE)
    (segment.path / "center-0").touch(mode=0o600)
    found: list[tuple[Center, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(open_as(second)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "worker 1 has begun with its own values"
    first, is_creator = SharedCenter.open_or_create(segment, "center-0", adapt({"w": np.full(3, 1.0)}, None), rank=0)
    waiting.join(60)
    assert is_creator and not found[0][1]
    for center in (first, found[0][0]):
        center.close()


def test_worker_0_that_sent_no_heartbeat_for_a_while_still_creates_the_center(segment, second):
    segment.mark(0, DEAD)  # as the server says of one that has not beaten for a while
    found: list[tuple[Center, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(open_as(second)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "worker 1 has begun with its own values"
    segment.mark(0, LIVE)
    model = adapt({"w": np.full(3, 1.0)}, None)
    first, is_creator = SharedCenter.open_or_create(segment, "center-0", model, rank=0, lock=True, note="")
    waiting.join(60)
    assert is_creator and not found[0][1]
    assert found[0][0].read(0).tolist() == [1.0] * 3
    for center in (first, found[0][0]):
        center.close()


def test_a_repeatable_run_does_not_begin_without_worker_0(segment, second, monkeypatch):
    monkeypatch.setattr(connection, "_FIRST_WORKER_TIMEOUT_S", 0.1)
    segment.mark(0, DEAD)
    with pytest.raises(PeerLost, match="worker 0 is gone and has not made center-0"):
        open_as(second)


def test_over_the_network_too_all_begin_with_the_values_of_worker_0(tmp_path):
    serving = Serving(tmp_path, world=2)
    environment = Environment(
        world=2, segment=tmp_path / "elsewhere", address=str(serving.address), token=TOKEN, launcher="maniple"
    )
    connections = [
        RemoteConnection(environment.replace(rank=rank, node="elsewhere"), lambda: (0, 0, False)) for rank in (0, 1)
    ]
    found: list[tuple[Center, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(open_as(connections[1])))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "worker 1 has begun with its own values"
    model = {"w": np.full(3, 1.0)}
    first, is_creator = connections[0].open("center-0", adapt(model, None), rule=BSP(), lock=True, wire="float32")
    waiting.join(60)
    assert is_creator and not found[0][1]
    mine = adapt({"w": np.full(3, 2.0)}, None)
    found[0][0].pull(mine)
    assert mine.array(0).tolist() == [1.0] * 3
    for center in (first, found[0][0]):
        center.close()
    for one in connections:
        one.leave(is_early=False)
    serving.close()


HOLD = """
import os, sys, time
from pathlib import Path
from maniple.memory.locks import held_by
with held_by(3, Path(sys.argv[1]), timeout_s=60):
    if "--leak" in sys.argv:  # as a library does that starts processes without closing files
        for number in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{number}") == sys.argv[1]:
                os.set_inheritable(int(number), True)
        print(os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ), flush=True)
    else:
        print("held", flush=True)
    time.sleep(600)
"""


def holding(path: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a lock as worker 3, and what it says of that."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def waited_in_vain(path: Path) -> str:
    with pytest.raises(WaitedTooLong) as caught, held_by(1, path, timeout_s=0.05):
        pass
    return str(caught.value)


def test_timeout_of_the_workers_lock_tells_whether_its_holder_runs_or_is_stopped(tmp_path):
    path = tmp_path / "lock"
    process, _ = holding(path)
    try:
        said = waited_in_vain(path)
        assert f"Worker 3 (process {process.pid}) has held it since " in said and "is alive" in said
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        said = waited_in_vain(path)
        assert f"is stopped (SIGSTOP, Ctrl-Z). Continue it with `kill -CONT {process.pid}`" in said
    finally:
        process.kill()
        process.communicate()
    with held_by(1, path, timeout_s=10):  # what the killed one has recorded holds no longer
        assert "Worker 1" in waited_in_vain(path)
        assert "is this very worker: the lock cannot be taken twice" in waited_in_vain(path)


def test_timeout_of_the_workers_lock_tells_of_a_holder_that_has_ended_and_left_it_to_a_child(tmp_path):
    path = tmp_path / "lock"
    process, child = holding(path.resolve(), "--leak")
    try:
        process.kill()
        process.wait(60)
        said = waited_in_vain(path)
        assert f"process {process.pid}" in said and "has ended, but a process that it had started keeps" in said
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.communicate(timeout=60)


def test_timeout_of_the_workers_lock_names_a_holder_that_reached_its_host_by_network(tmp_path):
    serving = Serving(tmp_path, world=2)
    environment = Environment(
        world=2, segment=tmp_path / "elsewhere", address=str(serving.address), token=TOKEN, launcher="maniple"
    )
    connections = [
        RemoteConnection(environment.replace(rank=rank, node="elsewhere"), lambda: (0, 0, False)) for rank in (0, 1)
    ]
    try:
        with (
            connections[1].lock(1),
            pytest.raises(WaitedTooLong, match=rf"Worker 1 \(process {os.getpid()}\) has held it since"),
            connections[0].lock(0.05),
        ):
            pass
    finally:
        for one in connections:
            one.leave(is_early=False)
        serving.close()
