"""Sharing with peers over the network: the host exchanges in this worker's place, and a thread of its own asks it to.

The training thread waits for the host only where the script asks for the shared parameters, and at the end.
"""

from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.center.arrays import GivenValues
from maniple.clock import clock
from maniple.connection.link import Link
from maniple.contracts import Array, Center
from maniple.errors import WaitedTooLong
from maniple.peers.remote_exchange import RemoteExchange
from maniple.replica.context import TrainingContext
from maniple.replica.sharing import Sharing
from maniple.replica.with_peers import WithPeers

if TYPE_CHECKING:
    from maniple.replica.replica import Replica


class WithRemotePeers(WithPeers):
    """Exchanges one replica with those of random peers, through the host."""

    _remote: RemoteExchange

    def __init__(self, center: Center, link: Link, *, wire: str) -> None:
        Sharing.__init__(self, center)
        self._link, self._wire = link, wire
        self._set_paces()

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        Sharing.attach(self, replica, model, context)
        environment, number = context.environment, len(context.replicas)
        self._link.on_wait = context.exit_if_overdue
        self._peers = self._remote = RemoteExchange(
            self._rule,
            model,
            self._layout,
            self._link,
            center=f"center-{number}",
            wire=self._wire,
            seed=f"{environment.seed} {environment.rank} {environment.restarts}",
            deadline_s=environment.host_deadline_s,
        )
        self._attach_shared()

    def begin(self) -> None:
        """Start from the center, or from what an earlier process of this rank has published."""
        self._pull_center()
        with self._context.requiring_host(self.replica):
            continues = self._remote.begin()
        if continues:
            self._context.events.write("continues", weight=self._remote.weight)

    def publish(self) -> None:
        """Do nothing: the host sets the center to the mean of all."""

    def publish_validated(self) -> bool:
        """False: the center itself was validated."""
        return False

    def push(self) -> None:
        """Publish the replica; the host sets the center to the mean of all."""
        if not self._is_finished:
            with self._context.requiring_host(self.replica):
                self._remote.complete(self.replica.steps, timeout_s=self._context.environment.host_deadline_s)
        self._context.exit_if_signalled()

    def _look(self, now: float) -> None:
        del now  # the host looks for other workers

    def _publish_if_due(self, now: float, elapsed_s: float) -> None:
        del now, elapsed_s  # the host does it

    def _publish_if_first(self) -> None:
        """Do nothing, likewise."""

    def _mean(self) -> list[Array] | None:
        """The center, which the host sets to the mean of all from time to time."""
        values = self._layout.views(self._layout.allocate())
        with self._context.requiring_host(self.replica):
            self._center.pull(GivenValues(self._layout.entries, values.__getitem__), peek=True)
        return values

    def finish(self, *, exchange: bool, timeout_s: float) -> None:
        """Hand over this worker's share; wait at most `timeout_s` for a host that is away."""
        Sharing.finish(self, exchange=exchange, timeout_s=timeout_s)
        self._remote.close()

    def _finish(self, timeout_s: float) -> None:
        replica, begin = self.replica, clock.monotonic()
        if replica.is_center or self._context.host.is_over:
            return
        replica.is_exchanging = True
        try:
            self._remote.leave(replica.steps, is_early=self._context.is_signalled, timeout_s=timeout_s)
        except WaitedTooLong as error:
            self._context.events.write("unpublished", reason=str(error))
            return
        finally:
            replica.is_exchanging = False
        replica.count_exchange(clock.monotonic() - begin, self._layout.size_bytes)
        self._write_row()
