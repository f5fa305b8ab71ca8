"""Feeds over TCP: connections that break, hosts that are away, and words that nobody should say."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from maniple.center.link import Door
from maniple.errors import HostAway, ManipleError
from maniple.feed import remote
from maniple.feed.batches import Batches
from maniple.feed.remote import RemoteSink, RemoteSource
from maniple.feed.ring import Ring
from maniple.place import Place
from maniple.wire.address import Address
from tests.contract.feeding import WAIT_S, Ends, push, together

from ..serving import TOKEN, Serving


def test_connection_that_breaks_after_a_quiet_time_is_mended(tmp_path):
    host = Serving(tmp_path)
    place = Place(address=str(host.address), token=TOKEN, host_deadline_s=0.2)
    sink, source = RemoteSink(place, "x", 4), RemoteSource(place, "x")
    push(sink, [1.0])
    assert source.take(WAIT_S)[0].tolist() == [1.0]
    time.sleep(0.4)
    for one in (sink, source):
        one._line._link.abort()
    push(sink, [2.0])
    sink.end(None)
    assert [arrays[0].tolist() for arrays in Batches("x", source)] == [[2.0]]
    for one in (sink, source, host):
        one.close()


def test_producer_that_ends_does_not_wait_long_for_a_host_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_LAST_S", 0.2)
    host = Serving(tmp_path)
    sink = RemoteSink(Place(address=str(host.address), token=TOKEN), "x", 4)
    sink._line._link.abort()
    sink._line._link._door = Door(Address(path=str(tmp_path / "gone")), TOKEN)
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
            sink._line._link.abort()

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
            source._line._link.abort()

    together(produce, consume, cut)
    for one in ends.opened:
        one.close()
    host.close()
    assert set(taken) == set(range(40))  # at least once across a break


def test_hostile_words_on_a_feed_are_refused(tmp_path):
    from maniple.center.link import Door, Link
    from maniple.wire import batches as said
    from maniple.wire.messages import Refusal

    host = Serving(tmp_path)
    try:
        for first, second in (
            (said.Supply("../x", 0, 1, 4), None),
            (said.Supply("x", 7, 1 << 40, 4), None),
            (said.Fetch(""), None),
            (said.Room(), None),
            (said.Supply("x", -1, 1, 4), said.Push(1, -5)),
            (said.Supply("x", -1, 1, 4), said.Push(0, 8)),
            (said.Supply("x", -1, 1, 4), said.Got(1)),
        ):
            link = Link(Door(host.address, TOKEN), "feed")
            stream = link.stream()
            stream.send(first)
            if second is not None:
                assert isinstance(stream.receive_message(), said.Supplied)
                stream.send(second)
            assert isinstance(stream.receive_message(), Refusal)
            link.drop()
        link = Link(Door(host.address, TOKEN), "feed")
        stream = link.stream()
        for message, payload in ((said.Supply("z", -1, 1, 4), b""), (said.Push(1, 64), b"")):
            stream.send(message, payload)
            stream.receive_message()
        stream.send(said.Batch(1), b"\xff" * 64)  # no batch
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
