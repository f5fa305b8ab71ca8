"""Exchanges with peers of a worker that reaches its host over the network: a thread sends its changes to the mailbox.

The replica x is that of the mailbox at the host (`mailbox_service`), and what training has changed since:

    begin       d = x - base                     base: the mailbox's values, as this worker knows them
    thread      base += d; sends d; receives e; base += e
    end         x += e                           after the next step, training goes on meanwhile

The training thread makes two passes over the memory and never waits. What a codec loses of d remains in x - base, and
is sent the next time. After a break, the host returns the mailbox's values and the number of the last change in them:
either d is in them, or it is sent again.
"""

import functools
import random
import threading
from collections.abc import Callable

import numpy as np

from maniple.center.chunked_model import ChunkedModel
from maniple.clock import Deadline, clock
from maniple.connection.link import Link
from maniple.connection.retry import Backoff, dropped_on_error, retry_until
from maniple.contracts import FlatModel, Outcome
from maniple.errors import HostAway, ManipleError, WaitedTooLong
from maniple.layout import Layout
from maniple.peers.changes import add, are_finite, pack, packed_bytes, unpack
from maniple.peers.gossip_exchange import restore, return_nonfinite
from maniple.peers.mailbox import Vectors
from maniple.rules import Rule
from maniple.rules.gossip import Gossip
from maniple.wire.frames import Stream
from maniple.wire.messages import ExchangedWithPeers, ExchangeWithPeers, MailboxOpened, OpenMailbox

_POLL_S = 0.25  # between exchanges that only publish steps and take messages; a sender waits 2 s for the receiver
_WAIT_S = 0.02


class RemoteExchange:
    """One remote worker's part in exchanges with peers.

    Attributes:
        sent, received, skipped, returned: as of a local worker's exchanges; skipped: also those that came while an
            exchange was on its way and another one was waiting.
        weight: this worker's weight among all, at the last exchange.
    """

    def __init__(
        self,
        rule: Rule,
        model: FlatModel,
        layout: Layout,
        link: Link,
        *,
        center: str,
        wire: str,
        seed: str,
        deadline_s: float,
    ) -> None:
        self._rule, self._layout, self._link, self._center = rule, layout, link, center
        self._codec, self._deadline_s = wire, deadline_s
        self._random = random.Random(seed)
        self._chunks = ChunkedModel(model, layout)
        self._base, self._change, self._move = layout.allocate(), layout.allocate(), layout.allocate()
        self._message: ExchangeWithPeers | None = None  # on its way; of its change, what is in `_change`
        self._is_done = False  # `_move` is to be added to the replica
        self._number = self._steps_before = 0
        self._is_wanted = False  # a message was due while an exchange was on its way
        self._next_poll = self._staleness = 0.0
        self._opened: Stream | None = None
        self._turn = threading.Condition()
        self._is_closed = threading.Event()
        self.sent = self.received = self.skipped = self.returned = 0
        self.weight = 0.0

    def begin(self) -> bool:
        """Set the replica to what is in the mailbox; returns whether a predecessor has published it."""
        opened, values = retry_until(self._link, lambda: self._open(is_back=False), self._deadline_s)
        self._base = values
        restore(self._chunks, self._layout.chunk_views(values))
        self._number, self._steps_before, self.weight = opened.change, opened.step, opened.weight
        threading.Thread(target=self._run, name="maniple-peers", daemon=True).start()
        return opened.has_predecessor

    def is_due(self) -> bool:
        """Draw whether to send a message after this step; the pace alone says when an outer step is due."""
        return not isinstance(self._rule, Gossip) or self._random.random() < self._rule.q

    def publish(self, step: int) -> Outcome:
        """Begin an exchange without a message, if none is on its way and the last one was some time ago."""
        if self._message is not None or clock.monotonic() < self._next_poll or not isinstance(self._rule, Gossip):
            return Outcome()
        return self._begin_exchange(step, is_sending=self._is_wanted)

    def receive(self, step: int) -> list[Outcome]:
        """Add to the replica what an exchange has brought, and begin the next one if a message is due."""
        if not self._is_done:
            return []
        self._chunks.begin()
        for k, move in enumerate(self._layout.chunk_views(self._move)):
            x = self._chunks.array(k)
            x += move
            self._chunks.commit(k)
        self._chunks.end()
        self._message, self._is_done = None, False
        self._next_poll = clock.monotonic() + _POLL_S
        return [self._begin_exchange(step, is_sending=True)] if self._is_wanted else []

    def prepare(self, step: int) -> Callable[[], Outcome] | None:
        """What begins an exchange with a message; None if one is on its way: the message comes with the next one."""
        if self._message is not None:
            self.skipped += self._is_wanted
            self._is_wanted = True
            return None
        return functools.partial(self._begin_exchange, step, is_sending=True)

    def leave(self, step: int, *, is_early: bool, timeout_s: float) -> None:
        """Hand over this worker's last changes and its share.

        Raises:
            WaitedTooLong: the host has not confirmed it in time.
        """
        self._is_wanted = False
        deadline = Deadline(timeout_s)
        self._await(deadline)
        self.receive(step)
        self._begin_exchange(step, is_last=True, is_early=is_early)
        self._await(deadline)
        self.receive(step)

    def complete(self, step: int, *, timeout_s: float) -> None:
        """Publish the replica as it is now, and wait for it (WaitedTooLong)."""
        self._is_wanted = False
        deadline = Deadline(timeout_s)
        self._await(deadline)
        self.receive(step)
        self._begin_exchange(step)
        self._await(deadline)
        self.receive(step)

    def close(self) -> None:
        """End the thread and the connection."""
        self._is_closed.set()
        with self._turn:
            self._turn.notify_all()
        self._link.abort()

    def _await(self, deadline: Deadline) -> None:
        with self._turn:
            while self._message is not None and not self._is_done:
                if deadline.is_over():
                    raise WaitedTooLong(
                        f"waited {deadline.waited_s:.0f} s for the host to confirm this worker's last change "
                        f"({self._link.reason}). Look whether the host runs."
                    )
                self._turn.wait(min(0.1, max(deadline.left_s(), 0.001)))

    def _begin_exchange(
        self, step: int, *, is_sending: bool = False, is_last: bool = False, is_early: bool = False
    ) -> Outcome:
        codec = "float32" if is_last else self._codec  # nothing is left to be sent later
        outcome = Outcome(size_bytes=2 * packed_bytes(self._layout, codec), staleness=self._staleness)
        self._is_wanted, self._staleness = False, 0.0
        bases, changes = self._layout.chunk_views(self._base), self._layout.chunk_views(self._change)
        self._chunks.begin()
        for k, (base, change) in enumerate(zip(bases, changes, strict=True)):
            x = self._chunks.array(k)
            outcome.refused += return_nonfinite(self._layout, k, x, base)
            with np.errstate(over="ignore"):
                np.subtract(x, base, out=change)
            if not are_finite(change):
                change[~np.isfinite(change)] = 0
            self._chunks.commit(k)
        self._chunks.end()
        self._number += 1
        with self._turn:
            self._message = ExchangeWithPeers(
                self._number, self._steps_before + step, codec, repr(self._rule), is_sending, is_last, is_early
            )
            self._turn.notify_all()
        return outcome.with_unique_names()

    # The thread

    def _run(self) -> None:
        while not self._is_closed.is_set():
            with self._turn:
                if self._message is None or self._is_done:
                    self._turn.wait(1.0)
                    continue
            self._complete_exchange()
            with self._turn:
                self._is_done = True
                self._turn.notify_all()
        self._link.drop("this worker has left")

    def _complete_exchange(self) -> None:
        """Send the change until it is confirmed."""
        assert self._message is not None
        codec = self._message.codec
        packed = pack(self._change, codec)
        self._change = unpack(np.concatenate(packed), self._layout, codec)  # as the host will see it
        self._move, backoff = self._layout.allocate(), Backoff()
        while not self._is_closed.is_set():
            try:
                with dropped_on_error(self._link):
                    if self._link.stream() is not self._opened and self._is_included_after_break():
                        return
                    self._exchange([part.data for part in packed])
                    return
            except HostAway:
                self._is_closed.wait(_WAIT_S)
            except (OSError, ManipleError):
                self._is_closed.wait(backoff.next_s())

    def _exchange(self, packed: list[memoryview]) -> None:
        assert self._message is not None
        codec = self._message.codec
        limit = packed_bytes(self._layout, codec)
        reply, data = self._link.request(self._message, *packed, reply=ExchangedWithPeers, max_reply_bytes=limit)
        back = unpack(data, self._layout, codec)
        add(self._base, self._change)
        add(self._base, back)
        add(self._move, back)
        self.sent, self.received = self.sent + reply.sent, self.received + reply.received
        self.skipped, self.returned = self.skipped + reply.skipped, self.returned + reply.returned
        self.weight, self._staleness = reply.weight, reply.staleness

    def _is_included_after_break(self) -> bool:
        """Learn what the mailbox has become in the meantime. Returns whether the change on its way is included."""
        assert self._message is not None
        opened, values = self._open(is_back=True)
        if is_included := opened.change == self._message.number:
            add(self._base, self._change)
        elif opened.change != self._message.number - 1:  # a host that was resumed has begun with new mailboxes
            self._message = self._renumbered(self._message, opened.change + 1)
        add(self._move, {dtype: value - self._base[dtype] for dtype, value in values.items()})
        self._base, self.weight = values, opened.weight
        return is_included

    def _renumbered(self, message: ExchangeWithPeers, number: int) -> ExchangeWithPeers:
        self._number = number
        return ExchangeWithPeers(
            number, message.step, message.codec, message.rule, message.is_sending, message.is_last, message.is_early
        )

    def _open(self, *, is_back: bool) -> tuple[MailboxOpened, Vectors]:
        limit = packed_bytes(self._layout, "float32")
        message = OpenMailbox(self._center, repr(self._rule), is_back)
        opened, data = self._link.request(message, reply=MailboxOpened, max_reply_bytes=limit)
        values = unpack(data, self._layout, "float32")
        self._opened = self._link.stream()
        return opened, values
