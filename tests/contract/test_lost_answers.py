"""Answers that are lost at the worst moment: what was applied is neither forgotten nor sent again."""

import multiprocessing
import threading
import time

import numpy as np
import pytest

import maniple
from maniple import Downpour
from maniple.adapters import adapt
from maniple.center import SharedCenter
from maniple.center.snapshot import check_snapshot, write_snapshot
from maniple.center.staging import AppliedTable, applied_number, by_worker
from maniple.center.tcp_client import PendingExchange, TcpCenter
from maniple.connection.link import Link
from maniple.contracts import ExchangeInfo
from maniple.errors import HostAway
from maniple.host import Host
from maniple.memory.segment import Segment

from ..serving import TOKEN, Serving

pytestmark = pytest.mark.usefixtures("entry_chunks")


@pytest.fixture
def host(tmp_path):
    host = Serving(tmp_path)
    yield host
    host.close()


def unreachable() -> None:
    raise HostAway("away")


class Worker:
    """One model on a link that may be shared with others."""

    def __init__(self, link: Link, name: str = "center-0") -> None:
        self.link, self.params = link, {"w": np.zeros(4), "v": np.zeros(2)}
        self.center, _ = TcpCenter.open_or_create(link, name, adapt(self.params), deadline_s=10)
        self.state = [{"center": np.zeros(4)}, {"center": np.zeros(2)}]

    def add(self, value: float) -> None:
        for array in self.params.values():
            array += value

    def exchange(self) -> None:
        self.center.exchange(adapt(self.params), Downpour(), self.state, ExchangeInfo())

    def value(self) -> float:
        look = {name: np.zeros_like(array) for name, array in self.params.items()}
        self.center.pull(adapt(look), peek=True)
        (value,) = {float(x) for array in look.values() for x in array}
        return value

    def exchange_without_answer(self, host: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
        """All is applied, no answer arrives, and the host is away."""

        def cut(self, stream, outcome):
            raise ConnectionResetError("cut")

        with monkeypatch.context() as patch:
            patch.setattr(PendingExchange, "_receive", cut)
            expected = applied_number(self.link.sequence + 1, 2)
            drop = self.link.drop

            def late(reason: str = "") -> None:
                deadline = time.monotonic() + 60
                while (
                    expected not in by_worker(AppliedTable(host.segment.path).rows()).values()
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.005)
                drop(reason)
                patch.setattr(self.link, "_reconnect", unreachable)

            patch.setattr(self.link, "drop", late)
            with pytest.raises(HostAway):
                self.exchange()


def test_what_was_applied_without_an_answer_is_not_sent_again(host, monkeypatch):
    worker, other = Worker(Link(host.door(), "data")), Worker(Link(host.door(), "data"))
    worker.add(1)
    worker.exchange_without_answer(host, monkeypatch)
    other.add(10)
    other.exchange()
    worker.add(100)  # it trains on
    worker.exchange()
    assert worker.value() == 111
    assert float(worker.params["w"][0]) == 111


def test_a_look_at_the_center_leaves_an_open_question_open(host, monkeypatch):
    worker, other = Worker(Link(host.door(), "data")), Worker(Link(host.door(), "data"))
    worker.add(1)
    worker.exchange_without_answer(host, monkeypatch)
    other.add(10)
    other.exchange()
    own = {name: array.copy() for name, array in worker.params.items()}
    worker.center.pull(adapt(worker.params), peek=True)
    for name, array in own.items():
        worker.params[name][:] = array
    worker.exchange()
    assert worker.value() == 11


def test_open_questions_of_all_centers_on_a_link_are_answered_before_the_next_exchange(host, monkeypatch):
    link = Link(host.door(), "data")
    first, second = Worker(link), Worker(link, "center-1")
    first.add(1)
    first.exchange_without_answer(host, monkeypatch)
    second.add(5)
    second.exchange()
    first.exchange()
    assert (first.value(), second.value()) == (1, 5)


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupted_call_does_not_answer_the_next_one(host, monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", TOKEN)
    with maniple.Client(str(host.address), timeout_s=10) as client:
        client.create("a", np.zeros(3))
        client.create("b", np.ones(3))
        with monkeypatch.context() as patch:
            patch.setattr(client._link.stream(), "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.pull("a")
        np.testing.assert_array_equal(client.pull("b"), 1)


def test_a_forked_client_is_another_one(host, monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", TOKEN)
    client = maniple.Client(str(host.address), timeout_s=10)
    client.create("a", np.zeros(3))

    def push() -> None:
        for _ in range(20):
            client.push("a", np.ones(3), alpha=1, beta=1)

    children = [multiprocessing.get_context("fork").Process(target=push) for _ in range(3)]
    for child in children:
        child.start()
    push()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    np.testing.assert_array_equal(client.pull("a"), 80)
    client.close()


# Hosts killed while they begin


def test_a_segment_that_was_never_finished_is_thrown_away(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    first = Host.start(memory, tmp_path, "run", {})
    center = adapt({"w": np.ones(3)})
    SharedCenter.open_or_create(first.segment, "center-0", center, rank=0)[0].close()
    first.close(0)
    half = Segment.create(memory, first.lineage, tmp_path / "run", is_incomplete=True)  # killed while restoring
    half.close()
    again = Host.resume(memory, tmp_path / "run", {})
    assert "begins again from snapshot-000001" in again.notices[0]
    again.close(0)
    assert list(memory.iterdir()) == []


def test_snapshot_of_a_restored_center_remembers_workers_that_are_still_away(tmp_path, host):
    Worker(Link(host.door(), "data"))
    before = {"away": {"center-0": [applied_number(17, 1), applied_number(17, 2)]}}
    path = write_snapshot(host.segment, tmp_path / "center", lineage="x", restored=1, versions={}, applied=before)
    assert check_snapshot(path, "x").applied["away"] == before["away"]


def test_owner_of_a_segment_is_rewritten_without_a_moment_of_nothing(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path / "a-long-name-of-a-run")
    size = (segment.path / "host").stat().st_size
    segment.close()
    again = Segment.adopt(tmp_path, "0123456789abcdef", tmp_path / "short")
    assert (segment.path / "host").stat().st_size >= size
    assert b"short" in (segment.path / "host").read_bytes()
    again.remove()


def test_whoever_takes_over_a_segment_removes_the_collectives_of_the_dead(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    for name in ("collectives-0", "collectives-0.1.2.3", "collectives-calls", "collectives-0.parcel-7", "center-0"):
        (segment.path / name).touch()
    segment.close()
    again = Segment.adopt(tmp_path, "0123456789abcdef", tmp_path)
    assert [path.name for path in segment.path.glob("c*")] == ["center-0"]
    again.remove()


def test_exchanges_of_two_models_on_one_link_may_run_at_once(host):
    """As they do in the background, by EASGD(overlap=True)."""
    link, count = Link(host.door(), "data"), 30
    workers, errors = [Worker(link, f"center-{k}") for k in range(2)], list[BaseException]()

    def train(worker: Worker) -> None:
        try:
            for _ in range(count):
                worker.add(1)
                worker.exchange()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert [worker.value() for worker in workers] == [count, count]
