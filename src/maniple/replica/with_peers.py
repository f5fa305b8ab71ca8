"""Sharing with peers: each worker exchanges with random other workers, and waits for none.

There is a center all the same, for snapshots, `--resume`, validation and late workers: from time to time the live
worker with the lowest rank sets it to the mean of all replicas.
"""

from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.center.arrays import GivenValues
from maniple.clock import clock
from maniple.contracts import Array, Center, Outcome
from maniple.errors import WaitedTooLong
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import Segment
from maniple.pace import RateLimit
from maniple.peers.gossip_exchange import GossipExchange
from maniple.peers.neighbors import Neighbors
from maniple.peers.outer_exchange import OuterExchange
from maniple.peers.remote_exchange import RemoteExchange
from maniple.replica.context import TrainingContext
from maniple.replica.sharing import Sharing
from maniple.rules.gossip import Gossip, NoLoCo

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

_REFRESH_SHARE = 0.01  # of the time for publishing steps between two exchanges, which a kill would lose
_PUBLISH_SHARE = 0.01  # of the time of one worker, for setting the center to the mean of all
_PUBLISH_EVERY_S = 0.25  # at most so often, however small the model
_PUBLISH_S = 10.0  # for which a worker that leaves waits for another that sets the center
_ROW_S = 2.0  # between two rows `gossip`
_SOURCE = "its mailbox"


class WithPeers(Sharing):
    """Exchanges one replica with those of random peers.

    Attributes:
        neighbors: the mailboxes of all workers.
    """

    _center: Center
    neighbors: Neighbors
    _local: GossipExchange | OuterExchange
    _peers: GossipExchange | OuterExchange | RemoteExchange

    def __init__(self, center: Center, segment: Segment) -> None:
        super().__init__(center)
        self._segment = segment
        self._set_paces()

    def _set_paces(self) -> None:
        self._refresh_pace, self._publish_pace = RateLimit(_REFRESH_SHARE), RateLimit(_PUBLISH_SHARE)
        self._steps = 0  # since the pace was last due
        self._refused_step = 0  # the last one with values that were not finite
        self._next_row = self._next_publish = 0.0

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        rule, environment, segment = self._rule, context.environment, self._segment
        number, rank = len(context.replicas), environment.rank
        self.neighbors = Neighbors(segment, number, self._layout, rule, rank=rank, seed=environment.seed)
        self._publishing = segment.path / "publish"
        if isinstance(rule, Gossip):
            self._local = GossipExchange(rule, model, self._layout, self.neighbors, rank=rank)
        else:
            assert isinstance(rule, NoLoCo)
            self._local = OuterExchange(rule, model, self._layout, self.neighbors)
        self._peers = self._local
        self._attach_shared()

    def begin(self) -> None:
        """Start from the center, or from what an earlier process of this rank has published."""
        self._pull_center()
        continues = self._local.begin(self._context.environment.world)
        self.neighbors.look()
        if continues:
            self._context.events.write("continues", weight=self._peers.weight)

    def step(self) -> None:
        replica = self.replica
        replica.count_step()
        now = clock.monotonic()
        if self._context.host.is_over:
            return
        self._look(now)
        self._steps += 1
        elapsed_s, is_sending = now - replica.start, False
        if replica.pace.due(self._steps, elapsed_s):
            self._steps, is_sending = 0, self._peers.is_due()
        self._exchange(is_sending=is_sending)
        if replica.steps_since_exchange and self._refresh_pace.due(1, elapsed_s):
            self._commit()
        self._publish_if_due(now, elapsed_s)
        if now >= self._next_row:
            self._next_row = now + _ROW_S
            self._write_row()

    def _look(self, now: float) -> None:
        """Find workers that have joined or left, if it is time."""
        if self.neighbors.look(now) and self.neighbors.is_first:
            self._local.adopt_shares()

    def _publish_if_due(self, now: float, elapsed_s: float) -> None:
        """Set the center to the mean of all, if it is time and this is the first worker."""
        if now >= self._next_publish and self._publish_pace.due(1, elapsed_s):
            self._next_publish = now + _PUBLISH_EVERY_S
            self._publish_if_first()

    def _publish_if_first(self) -> None:
        if self.neighbors.is_first:
            self.publish()

    def exchange(self) -> None:
        """Take what has come, and send a message or make an outer step now."""
        self.replica.refuse_inside_center("exchange() was called")
        if not (self._is_finished or self._context.host.is_over):
            self._exchange(is_sending=True)
        self._context.exit_if_signalled()

    def _exchange(self, *, is_sending: bool) -> None:
        """Take what has come, and perhaps send."""
        replica = self.replica
        begin = clock.monotonic()
        replica.is_exchanging = True  # a SIGTERM waits
        try:
            made = self._peers.receive(replica.steps)
        finally:
            replica.is_exchanging = False
        spent_s = clock.monotonic() - begin if made else 0.0
        if is_sending and (act := self._peers.prepare(replica.steps)) is not None:
            outcome, cost_s = replica.timed("exchange", act)
            made, spent_s = [*made, outcome], spent_s + cost_s
        if not made:
            return
        for outcome in made:
            replica.progress.exchange(outcome)
        self._count(made, spent_s)

    def _count(self, made: list[Outcome], cost_s: float) -> None:
        """Count the commits of one step, after which all steps so far are published."""
        replica, samples = self.replica, self._context.samples
        replica.count_exchange(cost_s, sum(outcome.size_bytes for outcome in made))
        if replica.is_primary and samples.shards:
            samples.write_position(replica, is_common=False)
        # A step counts once: its first commit has set what is not finite to its last published value.
        refused = Outcome(refused=[name for outcome in made for name in outcome.refused])
        if refused.refused or (self._refusals.in_a_row and replica.steps > self._refused_step):
            self._refused_step = replica.steps
            self._refusals.check(refused.with_unique_names(), source=_SOURCE)

    def _write_row(self) -> None:
        peers = self._peers
        self._context.events.write(
            "gossip",
            step=self.replica.steps,
            sent=peers.sent,
            received=peers.received,
            skipped=peers.skipped,
            returned=peers.returned,
            weight=peers.weight,
        )

    # The mean of all replicas

    def publish(self) -> None:
        """Set the center to the mean of all mailboxes, unless another worker is just doing so."""
        with closing(ByteLocks(self._publishing)) as lock:
            if lock.take(0):
                self._push_mean()

    def _push_mean(self) -> None:
        begin = clock.monotonic()
        if self._context.host.is_over or (values := self._mean()) is None:
            return
        outcome, _ = self.replica.timed(
            "keep", self._center.push, GivenValues(self._layout.entries, values.__getitem__)
        )
        self._publish_pace.exchanged(clock.monotonic() - begin, outcome.size_bytes)

    def _mean(self) -> list[Array] | None:
        mean = self.neighbors.mean()
        return None if mean is None else self._layout.views(mean)

    def publish_for_snapshot(self) -> None:
        """Publish this worker's last steps; the first worker also sets the center to the mean."""
        if not self._is_finished and not self._context.host.is_over:
            self._commit()
            self._publish_if_first()

    def publish_validated(self) -> bool:
        """Set the center to the mean, which may have changed a little since it was validated."""
        self.publish()
        return True

    def _commit(self) -> None:
        """Publish the replica as it is now."""
        replica, begin = self.replica, clock.monotonic()
        replica.is_exchanging = True  # a SIGTERM waits
        try:
            outcome = self._peers.publish(replica.steps)
        finally:
            replica.is_exchanging = False
        cost_s = clock.monotonic() - begin
        self._refresh_pace.exchanged(cost_s, outcome.size_bytes)
        if outcome.size_bytes:
            self._count([outcome], cost_s)

    def pull(self) -> None:
        """Set the replica to the mean of all."""
        if self._is_finished or (values := self._mean()) is None:
            return
        self._show(values)
        self._commit()

    def push(self) -> None:
        """Publish the replica, and set the center to the mean of all."""
        if not self._is_finished:
            self._commit()
            self.publish()
        self._context.exit_if_signalled()

    @contextmanager
    def center(self) -> Generator[None]:
        """Let the model hold the mean of all replicas, as they were last published, and this one as it is."""
        if self._is_finished:
            yield
            return
        self._commit()
        values = self._mean()
        with self._own_values_kept():
            self.replica.is_center = True
            try:
                if values is not None:
                    self._show(values)
                yield
            finally:
                self.replica.is_center = False

    def _show(self, values: list[Array]) -> None:
        self._model.begin()
        for i, value in enumerate(values):
            self._model.array(i)[:] = value
            self._model.commit(i)

    # The end

    def finish(self, *, exchange: bool, timeout_s: float) -> None:
        """Hand over this worker's share, and set the center to the mean of all."""
        super().finish(exchange=exchange, timeout_s=timeout_s)
        self.neighbors.close()

    def _finish(self, timeout_s: float) -> None:
        del timeout_s  # everything is on this machine
        replica = self.replica
        if replica.is_center or self._context.host.is_over:
            return
        replica.is_exchanging = True
        try:
            self._local.leave(replica.steps, is_early=self._context.is_signalled)
        finally:
            replica.is_exchanging = False
        replica.count_exchange(0.0, self._layout.size_bytes)
        self._write_row()
        # One after the other, so that the last one includes what all before it have committed.
        with closing(ByteLocks(self._publishing)) as lock:
            try:
                lock.retry_until(0, timeout_s=_PUBLISH_S, what="another worker to set the center")
            except WaitedTooLong as error:
                self._context.events.write("unpublished", reason=str(error))
                return
            self._push_mean()
