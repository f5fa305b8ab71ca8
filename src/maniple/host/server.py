"""The server: the network side of a host, with one thread per connection.

All its state is in the segment and the run folder. If it is killed, the launcher passes the listening sockets to a
successor, which finishes pending operations and continues.
"""

import contextlib
import socket
import threading
import traceback
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

from maniple.center.memory_quota import MemoryQuota
from maniple.center.shared import finish_all
from maniple.center.staging import StagingFiles
from maniple.center.tcp_server import CenterService, WorkerLeft
from maniple.center.worker_sessions import WorkerSessions
from maniple.clock import Deadline, clock
from maniple.controller import Controller
from maniple.environment import Environment
from maniple.errors import BadFrame, ManipleError, say
from maniple.feed.remote_feed import serve_feed
from maniple.host.controller_requests import ControllerRequests
from maniple.host.heartbeat_service import HEARTBEAT_TIMEOUT_S, HeartbeatService, HostWorkers
from maniple.host.snapshots import BestCenter, RestorePoint, export_arrays, lineage_of
from maniple.host.watchers import WatcherService, serve_doctor
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import Segment
from maniple.peers.mailbox_service import MailboxService
from maniple.record import Events, RunFolder
from maniple.rules import warm_up
from maniple.wire.auth import AUTH_TIMEOUT_S, authenticate_client
from maniple.wire.frames import NO_TIMEOUT_S, Stream, configure_socket
from maniple.wire.messages import AuthResponse, Welcome, refusal_of
from maniple.wire.tls import host_context

_MAX_CONNECTIONS = 4096
_MAX_UNAUTHENTICATED = 64  # silent strangers beyond this number make room for newer connections
_GOODBYE_TIMEOUT_S = 2.0  # two heartbeats, in which workers learn that the run is over
_WATCHER_TIMEOUT_S = 0.8  # for watchers after that; the launcher kills the server after 3 s
_LOG_INTERVAL_S = 1.0
OVER_FILE = "over"


class Server:
    """All connections of one host."""

    def __init__(self, environment: Environment, controller: Controller) -> None:
        assert environment.segment is not None and environment.run is not None and environment.token is not None
        self._token, self._tls = environment.token, None
        if environment.certificate is not None and environment.key is not None:
            self._tls = host_context(environment.certificate, environment.key)
        self._over = threading.Event()  # the run has ended: tell the workers, then end this process
        self._segment = Segment(environment.segment)
        self._folder = RunFolder(environment.run)
        self._events = Events(self._folder.events("server"))
        self._restored = RestorePoint.read(environment.segment)
        self._workers = HostWorkers(
            self._segment,
            self._events,
            environment.world,
            are_external=environment.is_external,
            is_queued=environment.is_queued,
        )
        self._sessions = WorkerSessions(StagingFiles(self._segment.path))
        best = BestCenter(self._segment, self._folder, self._events)
        self._requests = ControllerRequests(controller, self._segment, self._events, environment.limits, best)
        self._heartbeats = HeartbeatService(
            environment, self._workers, self._requests, self._sessions, is_over=self._over.is_set
        )
        self._watchers = WatcherService(self._segment, self._folder, self._events, self._requests)
        self._quota = MemoryQuota(environment.segment, int(environment.max_memory_mb * 1e6))
        world = self._segment.external_workers or environment.world
        self._mailboxes = MailboxService(self._segment, self._quota, self._workers.rank, world)
        self._failures = 0  # of connections, since the last log line about one
        self._next_log_line = 0.0
        self._lock = threading.Lock()
        self._unauthenticated: OrderedDict[int, socket.socket] = OrderedDict()
        self._connections = 0
        self._serving = Counter[str]()  # authenticated connections, by role
        self._have_workers_left = False

    def run(self, listeners: list[socket.socket]) -> None:
        """Finish what a killed predecessor had begun, then serve connections until the run is over."""
        with (
            contextlib.closing(ByteLocks(self._segment.path / "server")) as guard,
            guard.hold(0, timeout_s=10, what="the end of another server of this run"),
        ):
            finished = finish_all(self._segment)
            self._sessions.staging.remove_leftovers()
            self._workers.expect_returns(HEARTBEAT_TIMEOUT_S)
            self._events.write("serving", finished=finished, restored=self._restored.count)  # before the first "joined"
            for listener in listeners:
                threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            if any(one.family != socket.AF_UNIX for one in listeners):  # else values are exchanged in shared memory
                warm_up(["float32", "float64"])
            self._over.wait()
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Wait until workers have learned that the run is over, then until watchers have read the last events."""
        waited_s = self._wait_for("control", _GOODBYE_TIMEOUT_S)
        self._have_workers_left = True
        self._wait_for("watch", max(_GOODBYE_TIMEOUT_S - waited_s, _WATCHER_TIMEOUT_S))

    def _wait_for(self, role: str, timeout_s: float) -> float:
        """Wait until no connection of this role is left, or the time is over; returns how long."""
        deadline = Deadline(timeout_s)
        while self._serving[role] and not deadline.is_over():
            clock.sleep(0.02)
        return deadline.waited_s

    def end(self) -> None:
        """Tell each worker at its next heartbeat that the run is over, then end."""
        self._over.set()

    def end_if_over(self, *_: Any) -> None:
        """Handle SIGTERM: end in order if the run is over; otherwise only this process was killed."""
        if not (self._segment.path / OVER_FILE).exists():
            raise SystemExit(143)
        self.end()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:  # e.g. no free descriptors: waiting connections are accepted once there are some
                if self._over.wait(0.05):
                    return
                continue
            with self._lock:
                if self._connections >= _MAX_CONNECTIONS:
                    link.close()
                    continue
                self._connections += 1
                self._unauthenticated[link.fileno()] = link
                if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                    _, oldest = self._unauthenticated.popitem(last=False)
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._serve_connection, args=(link,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(link, link.fileno())

    def _serve_connection(self, link: socket.socket) -> None:
        number = link.fileno()
        try:
            stream = Stream(configure_socket(link, self._tls, is_host=True, timeout_s=AUTH_TIMEOUT_S))
            proof = authenticate_client(stream, self._token, self._welcome)
            with self._lock:
                self._unauthenticated.pop(number, None)
                self._serving[proof.role] += 1
            try:
                self._serve_role(stream, proof)
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, ManipleError):
                    raise  # the connection has broken
                if not isinstance(error, ManipleError) or isinstance(error, BadFrame):
                    self._log_failure(proof, error)
                if not isinstance(error, ManipleError):
                    error = BadFrame(f"the host could not do what was asked: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    stream.send(refusal_of(error))
                stream.linger()
            finally:
                with self._lock:
                    self._serving[proof.role] -= 1
        except (OSError, ManipleError):
            pass  # strangers, broken connections, workers that end: `HeartbeatService` records those that had joined
        finally:
            self._forget(link, number)

    def _log_failure(self, proof: AuthResponse, error: Exception) -> None:
        """Log a connection that an error has ended; the event has the traceback of a defect."""
        with self._lock:
            self._failures += 1
            if clock.monotonic() < self._next_log_line:  # a peer that keeps failing must not fill the disk
                return
            count, self._failures = self._failures, 0
            self._next_log_line = clock.monotonic() + _LOG_INTERVAL_S
        text = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        more = f" ({count - 1} more since the last line)" if count > 1 else ""
        say(f"a connection ({proof.role}) of {proof.worker[:32]!r} was ended: {text}{more}")
        trace = {} if isinstance(error, ManipleError) else {"traceback": traceback.format_exc()[-4000:]}
        self._events.write("connection failed", role=proof.role, error=text, count=count, **trace)

    def _forget(self, link: socket.socket, number: int) -> None:
        with self._lock:
            self._connections -= 1
            if self._unauthenticated.get(number) is link:
                del self._unauthenticated[number]
        link.close()

    def _serve_role(self, stream: Stream, proof: AuthResponse) -> None:
        if not (proof.worker.isalnum() and proof.worker.isascii() and len(proof.worker) <= 32):
            raise BadFrame(f"{proof.worker!r} cannot name a worker.")
        if proof.role == "control":
            self._heartbeats.serve(stream, proof.worker)
        elif proof.role == "ask":
            self._requests.serve(stream, proof.worker)
        elif proof.role == "feed":
            serve_feed(stream, self._segment.path, proof.worker, self._over.is_set, self._quota.take)
        elif proof.role == "peers":
            self._mailboxes.serve(stream, proof.worker)
        elif proof.role == "doctor":
            serve_doctor(stream, self._segment, self._folder)
        elif proof.role == "watch":
            self._watchers.serve(stream, lambda: self._have_workers_left)
        else:
            self._serve_center(stream, proof.worker)

    def _serve_center(self, stream: Stream, worker: str) -> None:
        stream.set_timeout(NO_TIMEOUT_S)
        session = self._sessions.start(worker, stream)
        try:
            CenterService(
                session,
                self._segment,
                worker,
                rank=lambda: self._workers.rank(worker),
                staging=self._sessions.staging,
                included=self._restored.includes,
                recalled=self._restored.knows,
                save=lambda path: export_arrays(self._segment, self._folder, path),
                quota=self._quota,
            ).serve()
        except WorkerLeft:
            self._sessions.forget(worker)
            raise
        finally:
            self._sessions.end(worker, session)

    def _welcome(self, mac: bytes) -> Welcome:
        return Welcome(mac, lineage_of(self._segment), self._restored.count, self._restored.saved)


def mark_over(segment: Path) -> None:
    """Mark a run as over, so that a server that receives SIGTERM afterwards tells the workers."""
    with contextlib.suppress(OSError):
        (segment / OVER_FILE).touch()
