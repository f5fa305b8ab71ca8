"""A worker's connection to its host. `LocalConnection` shares memory with the host; `RemoteConnection` reaches it
over the network."""

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from maniple.adapters import Adapter
from maniple.center import Segment, SharedCenter
from maniple.center.gate import Gate
from maniple.center.gate_memory import agreement_on
from maniple.center.tcp_client import TcpCenter, find_layout
from maniple.clock import Deadline, clock
from maniple.collectives.deadline import start_deadline_s
from maniple.connection.link import Endpoint, Link
from maniple.connection.retry import retry_until
from maniple.connection.training_link import TrainingLink
from maniple.contracts import Center
from maniple.environment import Environment
from maniple.errors import InvalidArgument, PeerLost
from maniple.memory.locks import held_by
from maniple.memory.segment import DEAD, LEFT, LIVE, NEVER, CenterFile
from maniple.record import Events, RunFolder
from maniple.rules import Rule, warm_up_in_background
from maniple.sampler import LeaseTable, LeaseTerms, Lender
from maniple.sampler.remote_leases import RemoteLender
from maniple.settings.options import with_joining_settings
from maniple.wire.messages import JoinReply, JoinRequest, Welcome
from maniple.worker.controller_client import ControllerClient
from maniple.worker.heartbeat_sender import Count, HeartbeatSender

_FIRST_WORKER_TIMEOUT_S = 30.0  # worker 0 may count as dead for this long, on a busy machine, and still come back
_RETRY_S = 0.05  # between two questions whether the center exists


class _Connection:
    """What both kinds of connection have in common.

    Attributes:
        environment: the worker's environment, completed by the host's join reply.
        events: the record of this worker.
        segment: the run's shared memory, if it is on this machine.
        status: the heartbeats, with what the last one has reported.
    """

    events: Events
    segment: Segment | None = None
    _lock_file: Path

    def __init__(self, environment: Environment, count: Count, request: JoinRequest) -> None:
        self.environment, self._count = environment, count
        self._endpoint = Endpoint.of(environment)
        self.status = HeartbeatSender(self._endpoint, request, count=count)
        self._controller = self._new_client()

    def ask(self, request: str, info: dict[str, Any], *, timeout_s: float) -> Any:
        """The controller's answer."""
        return self._controller.ask(request, info, timeout_s=timeout_s)

    def lock(self, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock that the workers of this machine share."""
        return held_by(self.environment.rank, self._lock_file, timeout_s=timeout_s)

    def check_while_waiting(self, on_wait: Callable[[], None]) -> None:
        """Let the training thread call `on_wait` while it waits for a host that is away; it may raise to give up."""

    def peer_link(self) -> Link:
        """A new link for exchanges with peers through the host."""
        return Link(self._endpoint, "peers", lineage=self.status.lineage)

    def _identity(self) -> tuple[int, int]:
        """This worker's rank and incarnation."""
        joined = self.status.joined
        assert joined is not None
        return joined.rank, joined.incarnation

    def _new_client(self) -> ControllerClient:
        return ControllerClient(self._endpoint, who=self._identity, count=self._count, status=self.status)

    def _accept_settings(self, reply: JoinReply) -> None:
        """Complete the environment. External workers know their number from their launcher."""
        world = self.environment.world if self.environment.is_external else reply.world
        known = with_joining_settings(self.environment, reply.settings)
        self.environment = known.replace(rank=reply.rank, world=world)


class LocalConnection(_Connection):
    """A worker on its host's machine, which maps the run's shared memory. Heartbeats start in the background.

    An external worker waits for the host's join reply, since its launcher has not set the run's settings. It is
    connected before it counts as live, so that the host notices when it dies.
    """

    def __init__(self, environment: Environment, count: Count) -> None:
        rank, workers = environment.rank, environment.world if environment.is_external else 0
        request = JoinRequest(
            environment.node, os.getpid(), rank, environment.restarts, is_near=True, external_workers=workers
        )
        super().__init__(environment, count, request)
        assert environment.segment is not None
        self.segment = self._segment = Segment(environment.segment)
        self._lock_file = self._segment.path / "node"
        state = self._segment.state(rank)
        if state == LEFT:  # this process has joined, left, and joins again
            self._segment.renew(rank)
        elif state == LIVE and not environment.is_external:
            raise InvalidArgument(
                f"process {os.getpid()} cannot join as worker {rank}: another process with the same environment "
                "variables has joined and not left. Of all processes that one script of `maniple run` starts, let only "
                "one call maniple.join(), or start more workers (-n)."
            )
        self.events = Events(RunFolder(environment.run).events(rank) if environment.run else None, worker=rank)
        self._tables: list[LeaseTable] = []
        if environment.is_external:
            from maniple.worker.external_launch import join_host

            self._accept_settings(join_host(self.status, environment))
        self._holder = rank, self._segment.incarnation(rank)
        self._segment.mark(rank, LIVE)
        self.status.start()

    def open(
        self, name: str, model: Adapter, *, rule: Rule, lock: bool, wire: str, gate: Gate | None = None
    ) -> tuple[Center, bool]:
        """The center `name`, and whether this worker has created it."""
        del wire  # nothing is sent in shared memory
        if rule.is_synchronous and self.environment.rank:
            self._await_center(name)
        center, is_creator = SharedCenter.open_or_create(
            self._segment,
            name,
            model,
            rank=self.environment.rank,
            lock=lock,
            note=repr(rule),
            state=rule.center_state,
            gate=agreement_on(gate, rule),
        )
        # In shared memory the worker computes exchanges.
        warm_up_in_background(center.layout.sizes, size_bytes=center.layout.size_bytes)
        return center, is_creator

    def _await_center(self, name: str) -> None:
        """Wait until worker 0 has created the center: synchronous training starts from its values."""
        deadline, last_alive_s = Deadline(start_deadline_s(self.environment.collectives_deadline_s)), 0.0
        path = self._segment.path / name
        # Complete, not only there: between creating the file and locking it, another creator could be faster.
        while not (path.exists() and CenterFile.is_ready(path)) and not self.status.is_over:
            state = self._segment.state(0)
            if state in {NEVER, LIVE}:
                last_alive_s = deadline.waited_s
            if state == LEFT or deadline.waited_s - last_alive_s > _FIRST_WORKER_TIMEOUT_S:
                if self.environment.deterministic:
                    raise PeerLost(
                        f"worker 0 is gone and has not made {name}, and a repeatable run (--deterministic) starts "
                        "from its values. Look at what it printed, and start the run again."
                    )
                return
            deadline.wait(f"worker 0 to make {name}")

    def _identity(self) -> tuple[int, int]:
        return self._holder

    def lender(self, number: int, terms: LeaseTerms) -> "Lender":
        """The leases of this worker's sampler `number`."""
        table = LeaseTable.open(self._segment, number, terms, self._holder)
        self._tables.append(table)
        return table

    def leave(self, *, is_early: bool, **row: Any) -> None:
        """Leave the run and close the record with a row `leave`; `is_early`: before this worker has finished."""
        self._segment.mark(self.environment.rank, DEAD if is_early and self.environment.is_external else LEFT)
        self.events.write("leave", **row)
        self.status.leave(timeout_s=1.0 if self.status.joined else 0.0, is_early=is_early)
        for table in self._tables:
            table.close()
        self._segment.close()
        self.events.close()


class RemoteConnection(_Connection):
    """A worker that reaches its host over the network."""

    def __init__(self, environment: Environment, count: Count) -> None:
        # A launcher on another machine passes its segment, which is not here, and a rank. A queue passes a rank too,
        # but no launcher waits for the worker.
        is_expected = environment.segment is not None
        rank = environment.rank if is_expected or environment.is_queued else -1
        workers = environment.world if environment.is_external and is_expected else 0
        request = JoinRequest(
            environment.node, os.getpid(), rank, environment.restarts, is_expected=is_expected, external_workers=workers
        )
        super().__init__(environment, count, request)
        reply = self.status.join(environment.join_deadline_s)
        self._accept_settings(reply)
        self.status.host_deadline_s = self.environment.host_deadline_s
        self._lock_file = Path(tempfile.gettempdir()) / f"maniple-{self.status.lineage}-{os.getuid()}.lock"
        self._lenders: list[ControllerClient] = []
        self.events = Events(None, sink=self.status.write, worker=reply.rank)
        self._link = TrainingLink(self._endpoint, lineage=self.status.lineage, on_restored=self._warn_restored)
        self.status.on_away = self._link.abort  # a pull or push in progress is repeated at once
        self.status.start()

    def check_while_waiting(self, on_wait: Callable[[], None]) -> None:
        self._link.on_wait = on_wait

    def open(
        self, name: str, model: Adapter, *, rule: Rule, lock: bool, wire: str, gate: Gate | None = None
    ) -> tuple[Center, bool]:
        if not lock:
            raise InvalidArgument(
                "lock=False works in shared memory only, and this worker reaches its host by network."
            )
        environment = self.environment
        if rule.is_synchronous and environment.rank:
            self._await_center(name)
        return TcpCenter.open_or_create(
            self._link,
            name,
            model,
            rank=environment.rank,
            wire=wire,
            note=repr(rule),
            state=rule.center_state,
            gate=agreement_on(gate, rule),
            deadline_s=environment.host_deadline_s,
            live=lambda: self.status.live,
            parameter_count=model.parameter_count,
        )

    def _await_center(self, name: str) -> None:
        """Wait until worker 0 has created the center: synchronous training starts from its values."""
        deadline = Deadline(start_deadline_s(self.environment.collectives_deadline_s))
        while not self.status.is_over:
            try:
                retry_until(self._link, lambda: find_layout(self._link, name), self.environment.host_deadline_s)
                return
            except InvalidArgument:
                deadline.wait(f"worker 0 to make {name}")
                clock.sleep(_RETRY_S)

    def lender(self, number: int, terms: LeaseTerms) -> RemoteLender:
        """The leases of this worker's sampler `number`, requested over a separate connection."""
        client = self._new_client()
        self._lenders.append(client)
        return RemoteLender(client.ask, number, terms, on_away=self._check_host)

    def _check_host(self) -> None:
        if (error := self.status.absence()) is not None:
            raise error

    def leave(self, *, is_early: bool, **row: Any) -> None:
        self.events.write("leave", **row)
        self._link.close("this worker has left")
        for client in self._lenders:
            client.close()
        # A worker that ends because its host is gone has waited for it long enough.
        timeout = {} if self.status.is_connected else {"timeout_s": 1.0}
        self.status.leave(**timeout, is_early=is_early)

    def _warn_restored(self, welcome: Welcome) -> None:
        self.events.write("restored", snapshot_time=welcome.restored_from)
        if not welcome.restored_from:  # the host had ended in order, and nothing is lost
            return
        when = time.strftime("%H:%M:%S", time.localtime(welcome.restored_from))
        lost_s = max(0.0, clock.time() - welcome.restored_from)
        warnings.warn(
            f"the host began again from its snapshot of {when}: contributions of the last {lost_s:.0f} s are lost",
            stacklevel=2,
        )


HostConnection = LocalConnection | RemoteConnection
