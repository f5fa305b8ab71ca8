"""Gossip: messages between two workers, each applied exactly once, and nobody waits.

    sender      writes the outbox; commits: message k for worker j, and its own state without what it gave away
    receiver    after its next step: takes it; commits: its new state, and that k of this sender is applied
    sender      sees that k is applied, and may send again

A sender whose last message is not taken yet sends none. If the receiver is not alive any more, or has not taken it for
two seconds, the sender takes its message back, in a commit of its own, while it keeps the receiver from taking it
(`Mailbox.delivery`). It then sends to others, until the silent one commits something.
"""

import functools
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from maniple.center.arrays import GivenValues
from maniple.center.chunked_model import ChunkedModel
from maniple.clock import clock
from maniple.contracts import Array, FlatModel, Outcome
from maniple.layout import Layout
from maniple.peers.mailbox import NOBODY, Mailbox
from maniple.peers.neighbors import Neighbors
from maniple.rules.gossip import Gossip, Shared, merge

_PATIENCE_S = 2.0  # longer than most steps; a receiver with longer ones still gets the messages of its last 2 s

Act = Callable[[int, Array], None]  # changes chunk k of the replica


class GossipExchange:
    """One worker's part in gossip.

    Attributes:
        sent, received, skipped, returned: messages so far; skipped: not sent, since the last one was not taken yet or
            nobody was there to take it; returned: taken back from receivers that had gone or were silent.
    """

    def __init__(self, rule: Gossip, model: FlatModel, layout: Layout, neighbors: Neighbors, *, rank: int) -> None:
        self._rule, self._neighbors, self._layout, self._rank = rule, neighbors, layout, rank
        self._own = neighbors.own
        self._chunks = ChunkedModel(model, layout)
        self._outbox = layout.chunk_views(self._own.outbox)
        self._header = own_header(self._own)
        self._steps_before = int(self._header["step"][0])  # of predecessors
        self._posted_s = clock.monotonic()
        self._silent: dict[int, int] = {}  # receivers of messages that were taken back, and their commits then
        self.sent = self.received = self.skipped = self.returned = 0

    @property
    def weight(self) -> float:
        """This worker's weight among all."""
        return float(self._header["weight"][0])

    def begin(self, world: int) -> bool:
        """Continue with what a predecessor has published, and return True; else publish the model."""
        if self.weight > 0:
            restore(self._chunks, self._layout.chunk_views(self._own.vectors["x"]))
            return True
        is_newcomer = self._own.commits > 0 or self._rank >= world  # its predecessor may have handed over its share
        weight = self._rule.first_weight(world, is_newcomer=is_newcomer)
        self._change(0, _keep, weight=weight, is_newcomer=not weight)
        return False

    def include(self, change: int, *, rank: int) -> None:
        """Let the next commit say that it includes this change, which worker `rank` has sent from another machine."""
        self._header["applied"][0, rank] = change

    def is_due(self) -> bool:
        """Draw whether to send a message after this step."""
        return self._neighbors.random.random() < self._rule.q

    def publish(self, step: int) -> Outcome:
        """Commit the replica as it is now."""
        return self._change(step, _keep)

    def receive(self, step: int) -> list[Outcome]:
        """Take the messages for this worker that have come since the last call."""
        found: list[Outcome] = []
        for rank, box in self._neighbors.changed():
            commits, header = box.commits, box.header()
            if header is None:
                continue  # at the next step
            if not self._is_for_me(rank, header):
                self._neighbors.mark_seen(rank, commits)
                continue
            with self._own.delivery() as is_free:
                header = box.header()  # the sender may have taken it back meanwhile
                if is_free and header is not None and self._is_for_me(rank, header):
                    found.append(self._take(rank, box, header, step))
        return found

    def prepare(self, step: int) -> Callable[[], Outcome] | None:
        """What sends a message to a random peer; None if nobody is there, or the last message is not taken yet."""
        peer = self._receiver() if self.weight > 0 and self._is_outbox_free(step) else None
        if peer is None:
            self.skipped += 1
            return None
        return functools.partial(self._send, step, *peer)

    def _send(self, step: int, rank: int, box: Mailbox, header: Array) -> Outcome:
        share, shared = self._rule.share(self.weight, float(header["weight"][0]))
        slots = self._layout.chunk_views(box.vectors["x"])  # may change meanwhile: any values are a valid exchange

        def act(k: int, x: Array) -> None:
            self._rule.send(x, slots[k], self._outbox[k], share)

        self.sent += 1
        return self._post(step, act, rank, header, shared)

    def leave(self, step: int, *, is_early: bool = False) -> None:
        """Hand over this worker's whole share to a live peer; else it stays in the mailbox, and a peer adopts it."""
        del is_early  # the share counts in any case
        self._neighbors.look()
        self.receive(step)
        peer = self._receiver() if self.weight and self._is_outbox_free(step) else None
        if peer is None:
            self.publish(step)
            return

        def act(k: int, x: Array) -> None:
            self._outbox[k][:] = x

        self._post(step, act, peer[0], peer[2], Shared(self.weight, self.weight))

    def adopt_shares(self) -> None:
        """Hand over the shares that workers have left in their mailboxes, in their place."""
        for rank in self._neighbors.left():
            if (neighbors := self._neighbors.of(rank)) is None:
                continue
            with closing(neighbors):
                values = self._layout.views(self._layout.allocate())
                model = GivenValues(self._layout.entries, values.__getitem__)
                gone = GossipExchange(self._rule, model, self._layout, neighbors, rank=rank)
                restore(gone._chunks, self._layout.chunk_views(gone._own.vectors["x"]))
                gone.leave(0)

    def _receiver(self) -> tuple[int, Mailbox, Array] | None:
        """A random live peer with its header; one that has no weight yet comes first."""
        heard = [(rank, box) for rank, box in self._neighbors.live() if box.commits != self._silent.get(rank)]
        live = [(rank, box, header) for rank, box in heard if (header := box.header()) is not None]
        newcomers = [one for one in live if one[2]["is_newcomer"][0]]
        found = newcomers or [one for one in live if one[2]["weight"][0] > 0]
        return self._neighbors.random.choice(found) if found else None

    def _is_for_me(self, rank: int, header: Array) -> bool:
        is_new = int(header["number"][0]) > int(self._header["applied"][0, rank])
        return is_new and int(header["receiver"][0]) == self._rank

    def _take(self, rank: int, box: Mailbox, header: Array, step: int) -> Outcome:
        weight, shared = self.weight, _shared(header)
        if not weight + shared.weight:  # it has handed over its share: the sender will take the message back
            return Outcome()
        outbox = self._layout.chunk_views(box.outbox)

        def act(k: int, x: Array) -> None:
            merge(x, outbox[k], weight, shared)

        self.received += 1
        applied = self._header["applied"].copy()
        applied[0, rank] = header["number"][0]
        outcome = self._change(step, act, weight=weight + shared.weight, is_newcomer=False, applied=applied)
        outcome.staleness = float(max(0, self._steps_before + step - int(header["seen_step"][0])))
        return outcome

    def _is_outbox_free(self, step: int) -> bool:
        """Whether the last message was taken, or could be taken back from a receiver that is gone."""
        receiver, number = int(self._header["receiver"][0]), int(self._header["number"][0])
        if receiver == NOBODY:
            return True
        box = self._neighbors.box(receiver)
        if box is None or (applied := box.applied(self._rank)) is None:
            return False
        if applied >= number:
            return True
        if self._neighbors.is_live(receiver) and clock.monotonic() - self._posted_s < _PATIENCE_S:
            return False
        with box.delivery() as is_free:
            if not is_free or (applied := box.applied(self._rank)) is None:
                return False
            if applied < number:
                if self._neighbors.is_live(receiver):
                    self._silent[receiver] = box.commits
                self._take_back(step)
        return True

    def _take_back(self, step: int) -> None:
        weight, shared = self.weight, _shared(self._header)

        def act(k: int, x: Array) -> None:
            merge(x, self._outbox[k], weight, shared)

        self.returned += 1
        self._change(step, act, weight=weight + shared.weight, receiver=NOBODY)

    def _post(self, step: int, act: Act, rank: int, header: Array, shared: Shared) -> Outcome:
        """Commit with a message for worker `rank`, whose header was seen. `act` writes the outbox."""
        self._posted_s = clock.monotonic()
        return self._change(
            step,
            act,
            weight=self.weight - shared.weight,
            receiver=rank,
            number=int(self._header["number"][0]) + 1,
            message_weight=shared.weight,
            message_mass=shared.mass,
            seen_step=int(header["step"][0]),
        )

    def _change(self, step: int, act: Act, **fields: Any) -> Outcome:
        """Apply `act` to the replica, and commit it with these fields of the header."""
        outcome = Outcome(size_bytes=self._layout.size_bytes)
        old, new = (self._layout.chunk_views(one["x"]) for one in (self._own.vectors, self._own.next))
        self._chunks.begin()
        for k, slot in enumerate(new):
            x = self._chunks.array(k)
            outcome.refused += return_nonfinite(self._layout, k, x, old[k])
            act(k, x)
            slot[:] = x
            self._chunks.commit(k)
        self._chunks.end()
        for name, value in fields.items():
            self._header[name] = value
        self._header["step"] = self._steps_before + step
        self._own.commit(self._header)
        return outcome.with_unique_names()


def own_header(own: Mailbox) -> Array:
    """A copy of the header in this worker's own mailbox; that of a new mailbox if nothing was committed."""
    header = own.header()
    assert header is not None  # nobody else writes to it
    if not own.commits:
        header["receiver"] = NOBODY
    return header


def restore(chunks: ChunkedModel, values: list[Array]) -> None:
    """Set the replica to these values."""
    chunks.begin()
    for k, value in enumerate(values):
        chunks.array(k)[:] = value
        chunks.commit(k)
    chunks.end()


def return_nonfinite(layout: Layout, k: int, x: Array, last: Array) -> list[str]:
    """Set what is not finite in chunk k of the replica to its last published value; the names of these parameters."""
    if math.isfinite(x.sum()):
        return []
    with np.errstate(all="ignore"):
        (positions,) = np.nonzero(~np.isfinite(x))
    x[positions] = last[positions]
    return layout.names_at(k, positions) if positions.size else []


def _shared(header: Array) -> Shared:
    return Shared(float(header["message_weight"][0]), float(header["message_mass"][0]))


def _keep(_k: int, _x: Array) -> None:
    """Leave the replica as it is."""
