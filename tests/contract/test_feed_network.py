"""Feeds over TCP: connections that break, hosts that are away, and words that nobody should say."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from maniple.connection.link import Endpoint
from maniple.environment import Environment
from maniple.errors import HostAway, ManipleError
from maniple.feed import remote_feed as remote
from maniple.feed.local_feed import Batches
from maniple.feed.remote_feed import RemoteConsumer, RemoteProducer
from maniple.feed.ring import Ring
from maniple.wire.address import Address
from tests.contract.feed_ends import WAIT_S, Ends, push, together

from ..serving import TOKEN, Serving


def test_connection_that_breaks_after_a_quiet_time_is_mended(tmp_path):
    host = Serving(tmp_path)
    environment = Environment(address=str(host.address), token=TOKEN, host_deadline_s=0.2)
    sink, source = RemoteProducer(environment, "x", 4), RemoteConsumer(environment, "x")
    push(sink, [1.0])
    assert source.take(WAIT_S)[0].tolist() == [1.0]
    time.sleep(0.4)
    for one in (sink, source):
        one._link.abort()
    push(sink, [2.0])
    sink.end(None)
    assert [arrays[0].tolist() for arrays in Batches("x", source)] == [[2.0]]
    for one in (sink, source, host):
        one.close()


def test_producer_that_ends_does_not_wait_long_for_a_host_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_END_S", 0.2)
    host = Serving(tmp_path)
    sink = RemoteProducer(Environment(address=str(host.address), token=TOKEN), "x", 4)
    sink._link.abort()
    sink._link._endpoint = Endpoint(Address(path=str(tmp_path / "gone")), TOKEN)
    with pytest.raises(HostAway, match=r"away for 0\.2 s"):
        sink.end(None)
    sink.close()
    host.close()


def test_pushes_survive_broken_connections_exactly_once(tmp_path):
    host = Serving(tmp_path)
    ends = Ends(host, True)
    rng = random.Random(1)
    sink, batches, taken = ends.sink(high_water=3), ends.batches(), []
    done = threading.Event()

    def produce() -> None:
        for number in range(60):
            push(sink, [number], np.zeros(rng.choice([1, 50_000, 400_000])))
        sink.end(None)
        done.set()

    def cut() -> None:
        while not done.wait(rng.uniform(0.0, 0.03)):
            sink._link.abort()

    together(produce, cut, lambda: taken.extend(int(arrays[0][0]) for arrays in batches))
    for one in ends.opened:
        one.close()
    host.close()
    assert taken == list(range(60))


def test_worker_whose_connection_breaks_goes_on(tmp_path):
    host = Serving(tmp_path)
    ends = Ends(host, True)
    sink, source, taken = ends.sink(high_water=3), ends.source(), []
    done = threading.Event()

    def produce() -> None:
        for number in range(40):
            push(sink, [number], np.zeros(100_000))
        sink.end(None)

    def consume() -> None:
        taken.extend(int(arrays[0][0]) for arrays in Batches("x", source))
        done.set()

    def cut() -> None:
        while not done.wait(0.02):
            source._link.abort()

    together(produce, consume, cut)
    for one in ends.opened:
        one.close()
    host.close()
    assert set(taken) == set(range(40))  # at least once across a break


def test_hostile_words_on_a_feed_are_refused(tmp_path):
    from maniple.connection.link import Endpoint, Link
    from maniple.wire import messages as said
    from maniple.wire.messages import Refusal

    host = Serving(tmp_path)
    try:
        for first, second in (
            (said.RegisterProducer("../x", 0, 1, 4), None),
            (said.RegisterProducer("x", 7, 1 << 40, 4), None),
            (said.FetchBatch(""), None),
            (said.SendBatch(), None),
            (said.RegisterProducer("x", -1, 1, 4), said.PushBatch(1, -5)),
            (said.RegisterProducer("x", -1, 1, 4), said.PushBatch(0, 8)),
            (said.RegisterProducer("x", -1, 1, 4), said.BatchReceived(1)),
        ):
            link = Link(Endpoint(host.address, TOKEN), "feed")
            stream = link.stream()
            stream.send(first)
            if second is not None:
                assert isinstance(stream.receive_message(), said.ProducerRegistered)
                stream.send(second)
            assert isinstance(stream.receive_message(), Refusal)
            link.drop()
        link = Link(Endpoint(host.address, TOKEN), "feed")
        stream = link.stream()
        for message, payload in ((said.RegisterProducer("z", -1, 1, 4), b""), (said.PushBatch(1, 64), b"")):
            stream.send(message, payload)
            stream.receive_message()
        stream.send(said.BatchData(1), b"\xff" * 64)  # no batch
        refusal = stream.receive_message()
        assert isinstance(refusal, Refusal) and refusal.kind == "BadFrame"
        link.drop()
    finally:
        host.close()


def test_errors_of_the_host_are_raised_as_what_they_are(tmp_path, monkeypatch):
    from maniple.errors import SharedMemoryFull

    def full(*_: Any) -> None:
        raise SharedMemoryFull("no room")

    host = Serving(tmp_path)
    ends = Ends(host, True)
    sink = ends.sink()
    monkeypatch.setattr(Ring, "buffer", full)
    with pytest.raises(SharedMemoryFull, match="no room"):
        push(sink, [1.0])
    assert issubclass(SharedMemoryFull, ManipleError)
    sink.close()
    host.close()
