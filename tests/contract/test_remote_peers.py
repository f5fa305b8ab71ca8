"""A remote worker and its mailbox at the host: each change counts once, whatever the connection loses."""

import socket
import threading
from typing import ClassVar

import numpy as np
import pytest

from maniple import Every, Gossip, NoLoCo, Replica
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.memory_quota import MemoryQuota
from maniple.clock import Deadline
from maniple.collectives.engines import SingleWorker
from maniple.connection.link import Endpoint, Link
from maniple.environment import Environment
from maniple.errors import BadFrame, InvalidArgument, WaitedTooLong
from maniple.layout import Layout
from maniple.memory.segment import LEFT, LIVE
from maniple.peers.gossip_exchange import GossipExchange
from maniple.peers.mailbox_service import MailboxService
from maniple.peers.neighbors import Neighbors
from maniple.peers.remote_exchange import RemoteExchange
from maniple.replica import sharing_for
from maniple.replica.context import TrainingContext
from maniple.replica.with_remote_peers import WithRemotePeers
from maniple.wire.address import Address
from maniple.wire.frames import Stream
from maniple.wire.messages import ExchangedWithPeers, ExchangeWithPeers, OpenMailbox, Welcome

SIZE = 10


class LossyStream(Stream):
    """The host's end of a connection, which breaks at the next message of a type in `breaks`."""

    breaks: ClassVar[list[type]] = []

    def _break_at(self, message) -> None:
        if type(message) in self.breaks:
            self.breaks.remove(type(message))
            raise ConnectionResetError("lost")

    def send(self, message, *payload) -> None:
        self._break_at(message)
        super().send(message, *payload)

    def receive(self, **rest):
        message, size = super().receive(**rest)
        self._break_at(message)
        return message, size


class PairLink(Link):
    """A link to a service in this process."""

    def __init__(self, service: MailboxService) -> None:
        super().__init__(Endpoint(Address(), "token", worker="w1"), "peers")
        self.service = service

    def _attempt(self, connect_s, auth_s):
        near, far = socket.socketpair()
        threading.Thread(target=self._serve, args=(LossyStream(far),), daemon=True).start()
        return Stream(near), Welcome(b"", "lineage", 0, 0.0)

    def _serve(self, stream) -> None:
        try:
            self.service.serve(stream, "w1")
        except (OSError, BadFrame):
            pass
        finally:
            stream.close()


class Workers:
    """Worker 0 on the host's machine, and worker 1 elsewhere; their model is one vector."""

    def __init__(self, folder, rule) -> None:
        self.segment, self.rule = Segment.create(folder, "0123456789abcdef", folder), rule
        self.x = [np.zeros(SIZE), np.zeros(SIZE)]
        models = [adapt({"x": x}) for x in self.x]
        self.layout = Layout(models[0].entries)
        self.center, _ = SharedCenter.open_or_create(self.segment, "center-0", models[0], rank=0, note=repr(rule))
        self.service = MailboxService(self.segment, MemoryQuota(self.segment.path), lambda _: 1, 2)
        self.link = PairLink(self.service)
        self.neighbors = Neighbors(self.segment, 0, self.layout, rule, rank=0, seed=0)
        if isinstance(rule, Gossip):
            self.local = GossipExchange(rule, models[0], self.layout, self.neighbors, rank=0)
            self.local.begin(2)
        self.segment.mark(0, LIVE)
        self.segment.mark(1, LIVE)
        self.remote = self.new_remote(models[1])

    def new_remote(self, model) -> RemoteExchange:
        return RemoteExchange(
            self.rule, model, self.layout, self.link, center="center-0", wire="float32", seed="", deadline_s=10
        )

    def exchange(self, step: int, *, is_sending: bool = False) -> None:
        self.remote._begin_exchange(step, is_sending=is_sending)
        self.remote._await(Deadline(20))
        self.remote.receive(step)

    @property
    def published(self) -> np.ndarray:
        """What is in the mailbox of the remote worker."""
        self.neighbors.look()
        return self.neighbors.box(1).vectors["x"]["float64"]

    @property
    def sums(self) -> tuple[float, float]:
        boxes = {0: self.neighbors.own, 1: self.neighbors.box(1)}
        headers = {rank: box.header()[0] for rank, box in boxes.items()}
        weight = sum(header["weight"] for header in headers.values())
        total = sum(headers[rank]["weight"] * box.vectors["x"]["float64"][0] for rank, box in boxes.items())
        for rank, header in headers.items():
            if header["receiver"] >= 0 and headers[int(header["receiver"])]["applied"][rank] < header["number"]:
                weight += header["message_weight"]
                total += header["message_mass"] * boxes[rank].outbox["float64"][0]
        return float(weight), float(total)

    def end(self) -> None:
        self.remote.close()
        self.neighbors.close()
        self.center.close()
        self.segment.remove()


@pytest.fixture
def workers(tmp_path):
    made: list[Workers] = []

    def workers(rule=None) -> Workers:
        made.append(Workers(tmp_path, rule or Gossip(q=1.0)))
        return made[-1]

    yield workers
    LossyStream.breaks = []
    for one in made:
        one.end()


@pytest.mark.parametrize("lost", [ExchangedWithPeers, ExchangeWithPeers, OpenMailbox])
def test_a_change_counts_once_whether_it_or_its_reply_is_lost(workers, lost):
    pair = workers()
    pair.remote.begin()
    for step in range(1, 21):
        pair.x[1] += 1
        LossyStream.breaks = [lost] if lost is not OpenMailbox else [ExchangedWithPeers, OpenMailbox]
        pair.exchange(step)
        np.testing.assert_array_equal(pair.published, step)
        np.testing.assert_array_equal(pair.x[1], step)
    assert pair.neighbors.box(1).header()["step"][0] == 20


@pytest.mark.parametrize("rule", [Gossip(q=1.0), Gossip(q=1.0, elastic=False)], ids=repr)
def test_messages_both_ways_conserve_the_sums_over_lost_replies(workers, rule):
    pair = workers(rule)
    pair.remote.begin()
    pair.x[0][:] = 4.0
    pair.local.publish(1)
    pair.exchange(1)
    before = pair.sums
    for step in range(2, 40):
        if step % 3 == 0:
            LossyStream.breaks = [ExchangedWithPeers]
        pair.exchange(step, is_sending=True)
        pair.neighbors.look()
        pair.local.receive(step)
        if act := pair.local.prepare(step):
            act()
        assert pair.sums == pytest.approx(before)
    assert pair.local.received > 10 and pair.local.sent > 10
    np.testing.assert_allclose(pair.x[1], pair.published)


def test_training_goes_on_while_an_exchange_is_on_its_way(workers):
    pair = workers()
    pair.remote.begin()
    pair.x[1] += 1
    pair.remote.prepare(1)()
    pair.x[1] += 10
    assert pair.remote.prepare(2) is None, "it comes with the next exchange"
    pair.remote._await(Deadline(20))
    assert len(pair.remote.receive(3)) == 1
    pair.remote._await(Deadline(20))
    pair.remote.receive(4)
    header = pair.neighbors.box(1).header()[0] if pair.neighbors.look() else None
    assert header["receiver"] == 0 and header["message_mass"] == 1.0
    np.testing.assert_allclose(pair.published + pair.neighbors.box(1).outbox["float64"], 11.0)


def test_a_successor_continues_with_what_is_in_the_mailbox(workers):
    pair = workers()
    assert not pair.remote.begin()
    pair.x[1] += 5
    pair.exchange(7)
    pair.remote.close()
    x = np.zeros(SIZE)
    pair.remote, pair.x[1] = pair.new_remote(adapt({"x": x})), x
    assert pair.remote.begin()
    np.testing.assert_array_equal(x, 5.0)
    x += 1
    pair.exchange(1)
    np.testing.assert_array_equal(pair.published, 6.0)
    assert pair.neighbors.box(1).header()["step"][0] == 8


def test_a_worker_that_leaves_hands_over_its_share(workers):
    pair = workers()
    pair.remote.begin()
    pair.x[1] += 8
    pair.remote.leave(1, is_early=False, timeout_s=20)
    pair.segment.mark(1, LEFT)
    pair.neighbors.look()
    pair.local.receive(1)
    assert pair.local.weight == 2.0
    np.testing.assert_allclose(pair.x[0], 4.0)


def test_a_host_that_is_away_delays_only_the_one_who_waits_for_it(workers):
    pair = workers()
    pair.remote.begin()
    LossyStream.breaks = [ExchangeWithPeers, *[OpenMailbox] * 1000]
    pair.remote.prepare(1)()
    assert pair.remote.receive(2) == []
    with pytest.raises(WaitedTooLong, match="confirm this worker's last change"):
        pair.remote.complete(2, timeout_s=0.2)


def test_the_host_refuses_a_rule_of_another_kind_and_a_center_that_is_not_there(workers):
    pair = workers()
    link = PairLink(pair.service)
    for message in (OpenMailbox("center-0", repr(NoLoCo())), OpenMailbox("center-0", "Own(q=1)")):
        link.stream().send(message)
        with pytest.raises(ConnectionError):
            link.stream().receive()
        link.drop()
    with pytest.raises(InvalidArgument, match="no center"):
        near, far = socket.socketpair()
        stream = Stream(near)
        stream.set_timeout(5)
        stream.send(OpenMailbox("center-7", repr(Gossip())))
        pair.service.serve(Stream(far), "w1")


@pytest.mark.parametrize("rule", [Gossip(q=0.5), Gossip(q=0.5, elastic=False), NoLoCo(every=2)], ids=repr)
def test_a_remote_replica_shows_the_center_and_leaves_its_last_steps(workers, rule):
    pair = workers(rule)
    model = adapt({"x": pair.x[1]})
    sharing = sharing_for(
        rule,
        pair.center,
        pace=Every(rule.every),
        wire="float32",
        is_alone=False,
        open_collectives=SingleWorker,
        peer_link=lambda: pair.link,
    )
    assert isinstance(sharing, WithRemotePeers)
    context = TrainingContext(Environment(rank=1, world=2, own_data=True, host_deadline_s=20))
    replica = Replica(model, sharing, rule=rule, pace=Every(rule.every), context=context)
    sharing.begin()
    pair.remote.close()
    pair.remote = sharing._remote
    for _ in range(20):
        pair.x[1] += 1
        replica.step()
    before = pair.x[1].copy()
    with replica.center():
        assert (pair.x[1] <= 20).all()
    np.testing.assert_array_equal(pair.x[1], before)
    replica.finish(exchange=True)
    box = pair.neighbors.box(1) or (pair.neighbors.look() and pair.neighbors.box(1))
    assert box.header()["step"][0] == 20
