"""The link of a training thread: a host that is silent or away delays nothing, and nothing is lost or doubled by it."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from maniple import Downpour
from maniple.adapters import adapt
from maniple.center.tcp_client import TcpCenter
from maniple.connection import training_link
from maniple.connection.link import Endpoint
from maniple.connection.training_link import TrainingLink
from maniple.contracts import ExchangeInfo
from maniple.errors import HostAway
from maniple.wire import frames
from maniple.wire.address import Address
from maniple.wire.progress import progress_of
from tests.serving import TOKEN, Serving
from tests.waiting import PATIENCE_S, await_

LINEAGE = "0123456789abcdef"


class Wire:
    """A proxy between a worker and its host, which can delay all bytes to the worker, hold them back, or hang up."""

    def __init__(self, host: Address) -> None:
        self.delay_s = 0.0
        self._host, self._flows = host, threading.Event()
        self._flows.set()
        self._listener = Address().listen()
        self.address = Address(port=self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Forward no byte from now on, in both directions, and accept none either."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def hang_up(self) -> None:
        """Break all connections."""
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = self._host.connect(PATIENCE_S)
                self._sockets += [near, far]
                threading.Thread(target=self._forward, args=(near, far, lambda: 0.0), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, lambda: self.delay_s), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, delay_s: Callable[[], float]) -> None:
        with contextlib.suppress(OSError):
            while True:
                select.select([source], [], [])
                self._flows.wait()
                data = source.recv(1 << 16)
                if not data:
                    break
                time.sleep(delay_s())
                self._flows.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Serving]:
    host = Serving(tmp_path)
    yield host
    host.close()


@pytest.fixture
def wire(host: Serving) -> Iterator[Wire]:
    wire = Wire(host.address)
    yield wire
    wire.close()


class Worker:
    """A worker whose steps add whole numbers: the center is the sum of all of them."""

    def __init__(self, wire: Wire, size: int = 50_000) -> None:
        self.link = TrainingLink(Endpoint(wire.address, TOKEN), lineage=LINEAGE)
        self.params = {"w": np.zeros(size)}
        self.center, _ = TcpCenter.open_or_create(self.link, "center-0", adapt(self.params), deadline_s=PATIENCE_S)
        self.state = [{"center": np.zeros(size)}]
        self.steps = 0

    def step(self) -> bool:
        """Train, and exchange; return whether the host was there."""
        self.params["w"] += 1
        self.steps += 1
        try:
            self.center.exchange(adapt(self.params), Downpour(), self.state, ExchangeInfo())
        except HostAway:
            return False
        return True

    def value(self) -> float:
        """The center's value, which is the same in all elements."""
        look = {"w": np.zeros_like(self.params["w"])}
        self.center.pull(adapt(look), peek=True)
        (value,) = set(look["w"].tolist())
        return value


@pytest.fixture
def worker(wire: Wire) -> Iterator[Worker]:
    worker = Worker(wire)
    yield worker
    worker.link.close("the test is over")


@pytest.fixture
def small(wire: Wire) -> Iterator[Worker]:
    """A worker whose exchange fits into socket buffers, and is made by one thread."""
    worker = Worker(wire, 10)
    yield worker
    worker.link.close("the test is over")


def count_exchanges_until(worker: Worker, is_enough: Callable[[int], bool]) -> None:
    """Make steps until enough of them have found the host."""
    made, end = 0, time.monotonic() + PATIENCE_S
    while not is_enough(made):
        made += worker.step()
        time.sleep(0.01)
        assert time.monotonic() < end, "no exchange was made"


@pytest.mark.parametrize("which", ["worker", "small"])
def test_a_silent_host_ends_an_exchange_and_its_contribution_counts_once(which, wire, request, monkeypatch):
    worker = request.getfixturevalue(which)
    count_exchanges_until(worker, lambda made: made >= 1)
    tried_by: set[threading.Thread] = set()
    attempt = worker.link._attempt

    def noted(*timeouts_s: float):
        tried_by.add(threading.current_thread())
        return attempt(*timeouts_s)

    monkeypatch.setattr(worker.link, "_attempt", noted)
    wire.hold()
    assert not worker.step()
    assert not worker.link.is_connected
    for _ in range(100):
        assert not worker.step(), "the host cannot have answered"
    wire.release()
    count_exchanges_until(worker, lambda made: made >= 2)
    assert worker.value() == worker.steps
    assert worker.params["w"][0] == worker.steps
    assert tried_by and threading.current_thread() not in tried_by


def test_connections_that_break_again_and_again_lose_and_double_nothing(worker, wire):
    over = threading.Event()

    def break_all() -> None:
        while not over.wait(0.05):
            wire.hang_up()

    breaking = threading.Thread(target=break_all)
    breaking.start()
    try:
        for _ in range(300):
            worker.step()
    finally:
        over.set()
        breaking.join()
    count_exchanges_until(worker, lambda made: made >= 2)
    assert worker.value() == worker.steps


def test_an_exchange_continues_over_the_next_connection_if_that_is_there_at_once(worker, wire, monkeypatch):
    monkeypatch.setattr(training_link, "_FIRST_ATTEMPT_S", PATIENCE_S)
    monkeypatch.setattr(training_link, "_RETRY_S", PATIENCE_S)
    monkeypatch.setattr(worker.link, "_stall_s", PATIENCE_S)
    assert worker.step()
    for _ in range(5):
        wire.hang_up()
        assert worker.step()
    assert worker.value() == worker.steps == 6


def test_a_host_that_is_slow_for_good_is_given_more_time_until_exchanges_are_made(small, wire, monkeypatch):
    monkeypatch.setattr(frames, "progress_of", lambda pipe: progress_of(pipe)._replace(patience_s=0.0))
    monkeypatch.setattr(small.link, "_stall_s", 0.1)
    monkeypatch.setattr(training_link, "_STALL_S", 0.1)
    wire.delay_s = 0.4  # of each answer
    count_exchanges_until(small, lambda made: made >= 2)
    assert small.link._stall_s > 0.3
    wire.delay_s = 0.0
    assert small.value() == small.steps
    count_exchanges_until(small, lambda _: small.link._stall_s == 0.1)


def test_what_waits_for_the_host_anyway_does_so(worker, wire):
    wire.hold()
    assert not worker.step()
    releasing = threading.Timer(0.3, wire.release)
    releasing.start()
    assert worker.value() in {0, 1}
    releasing.join()


def test_a_closed_link_makes_no_more_connections(worker, wire):
    wire.hold()
    assert not worker.step()
    worker.link.close("the test is over")
    wire.release()
    await_(lambda: not [one for one in threading.enumerate() if one.name == "maniple-connect"])
    assert not worker.step() and not worker.link.is_connected


def test_attempts_are_given_more_time_and_an_unused_connection_is_closed(monkeypatch):
    timeouts: list[tuple[float, float]] = []
    monkeypatch.setattr(training_link, "_TIMEOUTS_S", ((0.0, 1.0), (0.0, 2.0), (0.0, 3.0)))  # all have timed out
    closed = threading.Event()

    class Unused:
        def close(self) -> None:
            closed.set()

    def attempt(connect_s: float, auth_s: float):
        timeouts.append((connect_s, auth_s))
        if len(timeouts) < 5:
            raise TimeoutError("timed out")
        return Unused(), None

    attempts = training_link._Attempts(attempt)  # type: ignore[arg-type]
    await_(lambda: len(timeouts) == 5)
    attempts.cancel()
    assert closed.wait(PATIENCE_S)
    assert [auth_s for _, auth_s in timeouts] == [1, 2, 3, 3, 3]
    assert (attempts.failed, attempts.reason) == (4, "timed out")


def test_a_defect_of_an_attempt_is_raised_in_the_training_thread(monkeypatch, host):
    link = TrainingLink(host.door(), lineage=LINEAGE)

    def defective(*_: float):
        raise ZeroDivisionError("defect")

    monkeypatch.setattr(link, "_attempt", defective)
    monkeypatch.setattr(training_link, "_FIRST_ATTEMPT_S", PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        link.stream()
