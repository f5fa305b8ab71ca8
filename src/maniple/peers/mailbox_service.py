"""The mailboxes of remote workers, at the host: the server exchanges with peers in their place.

    worker      sends d_k, change number k: by how much training has changed its replica since the last exchange
    host        x += d_k, and commits x together with k; takes the messages for the worker, and sends one
    worker      receives by how much that has changed x, and adds it to its replica

x lies in a mailbox like any other, so local workers need not know where the worker is, and what holds for mailboxes
holds here: SIGKILL of the worker, the server or a peer loses and doubles no message. The worker keeps the place of a
number in its own mailbox for k: in `applied`, its own rank, which sends itself no messages. After a break, k tells it
whether its last change was included.
"""

import threading
from collections.abc import Callable
from contextlib import closing, suppress

import numpy as np

from maniple.center.arrays import GivenValues, center_file
from maniple.center.memory_quota import MemoryQuota
from maniple.center.shared import SharedCenter
from maniple.clock import Deadline, clock
from maniple.errors import BadFrame, InvalidArgument, NotAdmitted, WaitedTooLong
from maniple.layout import Layout
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import Segment
from maniple.peers.changes import add, are_finite, pack, packed_bytes, unpack
from maniple.peers.gossip_exchange import GossipExchange
from maniple.peers.mailbox import Vectors, mailbox_bytes
from maniple.peers.mean import mailbox_paths, publish_mean
from maniple.peers.neighbors import Neighbors
from maniple.peers.outer_exchange import OuterExchange
from maniple.rules import Rule, noted_rule
from maniple.rules.gossip import Gossip, NoLoCo
from maniple.wire.codecs import CODECS
from maniple.wire.frames import NO_TIMEOUT_S, Stream
from maniple.wire.messages import ExchangedWithPeers, ExchangeWithPeers, MailboxOpened, OpenMailbox

_OWNER_TIMEOUT_S = 5.0  # for the end of an older connection, which was aborted
_JOIN_TIMEOUT_S = 5.0  # for a worker's heartbeat connection, after a restart of the server
_PUBLISH_SHARE = 0.01  # of the time, for setting the center to the mean of all
_PUBLISH_EVERY_S = 0.25  # at most so often, however small the model
_PUBLISH_S = 10.0  # for which a worker that leaves waits for another that sets the center
_MAX_RULE = 1000  # characters of a rule's description


class MailboxService:
    """The connections of all remote workers that exchange with peers. Of each worker, only the newest one counts.

    Args:
        rank: gives the rank of a worker by its name; -1 before it has joined.
        world: how many workers were started together.
    """

    def __init__(self, segment: Segment, quota: MemoryQuota, rank: Callable[[str], int], world: int) -> None:
        self._segment, self._quota, self._rank, self._world = segment, quota, rank, world
        self._streams: dict[tuple[str, int], Stream] = {}
        self._lock = threading.Lock()

    def serve(self, stream: Stream, worker: str) -> None:
        """Exchange with peers in a worker's place, until it closes the connection."""
        stream.set_timeout(NO_TIMEOUT_S)
        message = stream.receive_message()
        if not isinstance(message, OpenMailbox):
            raise BadFrame(f"{type(message).__name__} came where a mailbox was to be opened.")
        key = message.center, self._rank_of(worker)
        with self._lock:
            before, self._streams[key] = self._streams.get(key), stream
        if before is not None:
            before.abort()
        try:
            self._serve(stream, message, key[1])
        finally:
            with self._lock:
                if self._streams.get(key) is stream:
                    del self._streams[key]

    def _rank_of(self, worker: str) -> int:
        deadline = Deadline(_JOIN_TIMEOUT_S)
        while (rank := self._rank(worker)) < 0:
            if deadline.is_over():
                raise NotAdmitted(
                    f"a worker has opened its mailbox, but has not joined the run within {_JOIN_TIMEOUT_S:g} s, or "
                    "another process has its rank. Start it again."
                )
            clock.sleep(0.02)
        return rank

    def _serve(self, stream: Stream, message: OpenMailbox, rank: int) -> None:
        file = center_file(message.center)
        center = SharedCenter.open(self._segment, self._segment.path / file)
        if center is None or not file.startswith("center-"):
            raise InvalidArgument(
                f"there is no center {message.center!r} whose mailboxes could be opened. Share a model first."
            )
        with closing(center):
            rule, number = _checked_rule(message.rule, center.note), int(file.removeprefix("center-"))
            layout = Layout(center.layout.entries)
            if not (self._segment.path / f"peers-{number}.{rank}").exists():
                self._quota.take(mailbox_bytes(layout, rule.mailbox_vectors), files=1)
            with closing(StandIn(self._segment, number, layout, rule, center, rank=rank)) as stand_in:
                has_predecessor = stand_in.begin(self._world, is_back=message.is_back)
                reply = MailboxOpened(stand_in.change, stand_in.steps_before, stand_in.weight, has_predecessor)
                stream.send(reply, *pack(stand_in.values, "float32"))
                while True:
                    stand_in.serve(stream)


class StandIn:
    """One remote worker among the mailboxes.

    Attributes:
        values: its replica, as it is in the mailbox.
        change: the number of the worker's last change that they include.
        steps_before: its steps when the mailbox was opened.
    """

    def __init__(
        self, segment: Segment, number: int, layout: Layout, rule: Rule, center: SharedCenter, *, rank: int
    ) -> None:
        self._segment, self._number, self._layout, self._center = segment, number, layout, center
        self._rule, self._rank = rule, rank
        self._neighbors = Neighbors(segment, number, layout, rule, rank=rank, seed=0, timeout_s=_OWNER_TIMEOUT_S)
        own = self._neighbors.own
        self._is_new = not own.commits
        self.values: Vectors = {dtype: one.copy() for dtype, one in own.vectors[rule.mailbox_vectors[0]].items()}
        views = layout.views(self.values)
        self._model = GivenValues(layout.entries, views.__getitem__)
        if isinstance(rule, Gossip):
            self._peers = GossipExchange(rule, self._model, layout, self._neighbors, rank=rank)
        else:
            assert isinstance(rule, NoLoCo)
            self._peers = OuterExchange(rule, self._model, layout, self._neighbors)
        header = own.header()
        assert header is not None
        self.change, self.steps_before = int(header["applied"][0, rank]), int(header["step"][0])
        self._known = {dtype: vector.copy() for dtype, vector in self.values.items()}  # to the worker
        self._next_publish = 0.0

    @property
    def weight(self) -> float:
        """The worker's weight among all."""
        return self._peers.weight

    def begin(self, world: int, *, is_back: bool) -> bool:
        """Continue with what is in the mailbox, and return True; else begin with the center's values."""
        self._neighbors.look()
        if self._is_new:
            self._center.pull(self._model)
        if self._is_new or not is_back:
            # Where none was started by a launcher, the first one has weight, and the others are newcomers.
            is_first = not world and not (mailbox_paths(self._segment, self._number).keys() - {self._rank})
            has_predecessor = self._peers.begin(self._rank + 1 if is_first else world)
        else:
            has_predecessor = True
        self._known = {dtype: vector.copy() for dtype, vector in self.values.items()}
        return has_predecessor

    def serve(self, stream: Stream) -> None:
        """Receive one change, exchange with peers, and reply."""
        message, size = stream.receive()
        if not isinstance(message, ExchangeWithPeers) or message.codec not in CODECS:
            raise BadFrame(f"{type(message).__name__} came where a change of a replica was expected.")
        data = stream.receive_bytes(size, at_most=packed_bytes(self._layout, message.codec))
        change = unpack(data, self._layout, message.codec)
        if message.number != self.change + 1 or not 0 <= message.step < 1 << 62:
            raise BadFrame(f"change {message.number} came where change {self.change + 1} was expected.")
        vars(self._rule).update(vars(_checked_rule(message.rule, repr(self._rule))))
        reply = self._exchange(message, change)
        back = {dtype: vector - self._known[dtype] for dtype, vector in self.values.items()}
        packed = pack(back, message.codec)
        add(self._known, unpack(np.concatenate(packed), self._layout, message.codec))
        stream.send(reply, *packed)

    def _exchange(self, message: ExchangeWithPeers, change: Vectors) -> ExchangedWithPeers:
        peers, step = self._peers, message.step - self.steps_before
        add(self.values, change)
        add(self._known, change)
        if not all(map(are_finite, self.values.values())):
            raise BadFrame("a change would make the replica in the mailbox infinite.")
        counts = peers.sent, peers.received, peers.skipped, peers.returned
        if self._neighbors.look(clock.monotonic()) and self._neighbors.is_first:
            peers.adopt_shares()
        peers.include(message.number, rank=self._rank)
        if isinstance(peers, GossipExchange):
            peers.publish(step)
        outcomes = peers.receive(step)
        if message.is_last:
            peers.leave(step, is_early=message.is_early)
        elif (message.is_sending or isinstance(peers, OuterExchange)) and (act := peers.prepare(step)) is not None:
            outcomes.append(act())
        self.change = message.number
        self._publish(is_last=message.is_last)
        now = peers.sent, peers.received, peers.skipped, peers.returned
        staleness = max((outcome.staleness for outcome in outcomes), default=0.0)
        sent, received, skipped, returned = (after - before for after, before in zip(now, counts, strict=True))
        return ExchangedWithPeers(self.weight, sent, received, skipped, returned, staleness)

    def _publish(self, *, is_last: bool) -> None:
        """Set the center to the mean of all from time to time, if no worker before this one does so."""
        begin = clock.monotonic()
        if not is_last and (begin < self._next_publish or not self._neighbors.is_first):
            return
        with closing(ByteLocks(self._segment.path / "publish")) as lock:
            if is_last:
                with suppress(WaitedTooLong):
                    lock.retry_until(0, timeout_s=_PUBLISH_S, what="another worker to set the center")
                    publish_mean(self._neighbors.mean(), self._center, self._layout)
            elif lock.take(0):
                publish_mean(self._neighbors.mean(), self._center, self._layout)
        now = clock.monotonic()
        self._next_publish = now + max(_PUBLISH_EVERY_S, (now - begin) / _PUBLISH_SHARE)

    def close(self) -> None:
        """Let another connection of this worker, or its successor, continue."""
        self._neighbors.close()


def _checked_rule(described: str, noted: str) -> Rule:
    """The rule that a worker describes; BadFrame unless it is of the kind that is noted with the center."""
    rule, known = noted_rule(described[:_MAX_RULE]), noted_rule(noted)
    if rule is None or known is None or type(rule) is not type(known) or not rule.has_peers:
        raise BadFrame(
            f"{described[:_MAX_RULE]!r} is no rule for exchanges with peers over the network, where the run has "
            f"{noted[:_MAX_RULE]!r}. Use Gossip or NoLoCo."
        )
    return rule
