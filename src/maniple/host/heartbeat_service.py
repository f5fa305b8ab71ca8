"""Workers at the host: they join, send heartbeats, and leave or are lost.

`HeartbeatService`  takes a worker's progress and events, and tells it of stops and changed settings
`HostWorkers`       gives each worker a rank, and decides from its connection and process whether it is alive
"""

import functools
import math
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from maniple.center.worker_sessions import WorkerSessions
from maniple.clock import Deadline, clock
from maniple.controller import WorkerProcess
from maniple.environment import Environment
from maniple.errors import BadFrame, InvalidArgument
from maniple.host.controller_requests import ControllerRequests, check_counts
from maniple.host.worker_speeds import WorkerSpeeds
from maniple.memory.segment import DEAD, LEFT, LIVE, MAX_WORKERS, NEVER, Segment
from maniple.monitor.row_reader import bad_progress
from maniple.record import Events, RunFolder
from maniple.record.events import append_rows
from maniple.record.rows import BadRow, decode_row
from maniple.settings.options import joining_settings
from maniple.wire.frames import Stalled, Stream
from maniple.wire.messages import Heartbeat, HeartbeatReply, JoinReply, JoinRequest, Refusal

# A worker without a heartbeat for this long is considered dead; it may come back. Ten seconds tolerate a garbage
# collection or a swapped-out process and still free its leases quickly.
HEARTBEAT_TIMEOUT_S = 10.0
HEARTBEAT_MAX_S = 1.0  # interval without a limit in sight: stops and changed settings reach workers within a second
HEARTBEAT_MIN_S = 0.05  # interval near a limit: --max-batches is exceeded by at most 50 ms of work
_HEARTBEAT_COST_S = 0.001  # of the host per heartbeat: with many workers it must not spend all its time on them
_MAX_ROWS_BYTES = 8 << 20  # events that come with one heartbeat
_REJECTED_INTERVAL_S = 10.0  # between two rows about rejected ones, so that those do not fill the disk
_MAX_NODE = 255  # characters of a machine's name
_RETURN_TIMEOUT_S = 10.0  # for a process that is alive and whose connection has broken
_PAUSE_POLL_S = 0.2
# A gap between polls that means a stopped process: far above the delays of a busy machine, and half of what workers
# wait for an answer before they reconnect.
_PAUSE_MIN_S = 3.0


def heartbeat_interval_s(next_check_s: float, live: int) -> float:
    """The interval between heartbeats of one of `live` workers, if limits are to be checked in `next_check_s`."""
    return max(HEARTBEAT_MIN_S, min(HEARTBEAT_MAX_S, next_check_s), _HEARTBEAT_COST_S * live)


class HeartbeatService:
    """The heartbeat connections of one host. Once `is_over`, it tells each worker that the run has ended."""

    def __init__(
        self,
        environment: Environment,
        workers: "HostWorkers",
        requests: ControllerRequests,
        sessions: WorkerSessions,
        is_over: Callable[[], bool],
    ) -> None:
        assert environment.run is not None
        self._environment, self._folder = environment, RunFolder(environment.run)
        self._workers, self._requests, self._sessions, self._is_over = workers, requests, sessions, is_over
        self._speeds = WorkerSpeeds()
        self._written: dict[str, int] = {}  # by worker: number of the newest heartbeat whose rows are written
        self._writing = threading.Lock()

    def serve(self, stream: Stream, worker: str) -> None:
        """Admit a worker, and answer its heartbeats until it leaves or is lost."""
        stream.set_timeout(HEARTBEAT_TIMEOUT_S)
        join = stream.receive_message()
        if not isinstance(join, JoinRequest):
            raise BadFrame(f"{type(join).__name__} came where a worker's join request was expected.")
        rank, incarnation = self._workers.join(worker, stream, join)
        writer = RowWriter(self._folder.events(rank), rank)
        world = max(self._environment.world, rank + 1)
        try:
            settings = joining_settings(self._environment)
            stream.send(JoinReply(rank, incarnation, world, self._workers.live, settings))
            while self._serve_heartbeat(stream, worker, (rank, incarnation), writer):
                pass
        except Exception as error:  # whatever ends the connection, the worker is gone
            self._workers.lose(worker, stream, str(error), is_silent=isinstance(error, Stalled))
            raise
        finally:
            writer.report_rejected(is_last=True)

    def _serve_heartbeat(self, stream: Stream, worker: str, who: WorkerProcess, writer: "RowWriter") -> bool:
        """Answer one heartbeat; returns whether another one is expected."""
        heartbeat, size = stream.receive()
        if not isinstance(heartbeat, Heartbeat):
            raise BadFrame(f"{type(heartbeat).__name__} came where a worker's heartbeat was expected.")
        check_counts(heartbeat)
        rows = stream.receive_bytes(size, at_most=_MAX_ROWS_BYTES)
        is_full = bool(rows) and not self._write_rows(worker, heartbeat.number, bytes(rows), writer)
        stop_reason = self._requests.count(who, heartbeat.steps, heartbeat.samples)
        if heartbeat.is_last:
            writer.report_rejected(is_last=True)
            self._workers.leave(worker, is_early=heartbeat.is_early)
            self._requests.forget(worker)
            self._sessions.forget(worker)
        if self._is_over():
            stream.send(Refusal("RunOver", "the run has ended"))
            return False
        self._speeds.count(who, heartbeat.steps, clock.monotonic(), is_last=heartbeat.is_last)
        live = self._workers.live
        interval_s = heartbeat_interval_s(self._requests.next_check_s, live)
        changes, speed = self._requests.changes, self._speeds.relative(who)
        stream.send(HeartbeatReply(live, interval_s, stop_reason, changes, is_full, speed))
        return not heartbeat.is_last

    def _write_rows(self, worker: str, number: int, rows: bytes, writer: "RowWriter") -> bool:
        """Append a worker's events, once; returns False if that is not possible now, for example on a full disk.

        The worker then keeps them and stays a member: events are no reason to cut it off from the center.
        """
        with self._writing:
            if number > self._written.get(worker, 0):
                if not writer.write(rows):
                    return False
                self._written[worker] = number
        return True


class HostWorkers:
    """The workers of a run.

    Args:
        reserved: ranks below it belong to workers that the launcher starts.
        are_external: another launcher starts them, and reports neither their starts nor their ends.
        is_queued: a batch queue starts them, and each requests its own rank.
    """

    def __init__(
        self, segment: Segment, events: Events, reserved: int, *, are_external: bool = False, is_queued: bool = False
    ) -> None:
        self._segment, self._events, self._are_external = segment, events, are_external
        if are_external:  # as many as under the server before this one
            reserved = segment.external_workers or reserved
        self._reserved, self._first_free = 0 if is_queued else reserved, reserved
        self._lock = threading.Lock()
        self._ranks: dict[str, int] = {}
        self._streams: dict[str, Stream] = {}  # the newest heartbeat connection of each
        self._incarnations: dict[str, int] = {}
        self._local_pids: dict[str, int] = {}  # of workers on this machine
        self._self_joined: set[int] = set()  # ranks of workers that no launcher of this host has started
        self._pauses = _detect_pauses()

    def expect_returns(self, timeout_s: float) -> None:
        """Consider workers lost that were alive under the previous server and do not return within `timeout_s`."""
        first = 0 if self._are_external else self._reserved
        expected = [rank for rank in range(first, MAX_WORKERS) if self._segment.state(rank) == LIVE]

        def mark_lost() -> None:
            deadline = Deadline(timeout_s)
            while not deadline.is_over():
                clock.sleep(0.1)
            with self._lock:
                known = self._ranks.values()
                gone = [rank for rank in expected if rank not in known and self._segment.state(rank) == LIVE]
                for rank in gone:
                    self._segment.mark(rank, DEAD)
            for rank in gone:
                self._events.write("lost", worker=rank, reason="it did not return to a new server", live=self.live)

        if expected:
            threading.Thread(target=mark_lost, name="maniple-returns", daemon=True).start()

    @property
    def live(self) -> int:
        """The number of live workers."""
        return self._segment.live

    def rank(self, worker: str) -> int:
        """The rank of a worker; -1 before it has joined."""
        return self._ranks.get(worker, -1)

    def join(self, worker: str, stream: Stream, request: JoinRequest) -> tuple[int, int]:
        """Admit a worker, new or reconnecting; returns its rank and incarnation."""
        if not (0 <= request.pid < 1 << 31 and len(request.node) <= _MAX_NODE and request.node.isprintable()):
            raise BadFrame(f"process {request.pid} on {request.node[:_MAX_NODE]!r} cannot be a worker.")
        is_ours = request.is_near or request.is_expected  # started by this host's launcher, with a given rank
        with self._lock:
            self._resize_external(request)
            is_known = worker in self._ranks
            if is_ours and not 0 <= request.rank < self._reserved:
                raise BadFrame(
                    f"a worker says that the launcher started it as rank {request.rank}, where 0 to "
                    f"{self._reserved - 1} were."
                )
            rank = request.rank if is_ours else self._requested_rank(worker, request)
            is_external = self._are_external and is_ours and not request.is_back  # its launcher did not announce it
            is_new_here = not is_ours and (rank != request.rank or not request.is_back)
            if not is_known and (is_external or is_new_here):
                self._segment.renew(rank)
            if not request.is_near or self._segment.state(rank) == DEAD:  # a local one marks itself as it joins
                self._segment.mark(rank, LIVE)
            if request.is_near:
                self._local_pids[worker] = request.pid
            if not is_ours:
                self._self_joined.add(rank)
            self._ranks[worker] = rank
            self._streams[worker] = stream
            incarnation = self._incarnations[worker] = self._segment.incarnation(rank)
            event = "returned" if request.is_back else "restarted" if request.restarts else "joined"
            # Written under the lock, so that the last event has the final number of live workers.
            self._events.write(
                event, worker=rank, node=request.node, pid=request.pid, near=request.is_near, live=self.live
            )
        return rank, incarnation

    def _resize_external(self, request: JoinRequest) -> None:
        """Follow an elastic launcher that starts another number of workers than before.

        Worker 0 knows the number; another one may join before it, and show that there is at least one more.
        """
        if not self._are_external or request.is_back or not 0 < request.external_workers <= MAX_WORKERS:
            return
        count = request.external_workers if request.rank == 0 else max(self._reserved, request.external_workers)
        if any(rank < count and self._segment.state(rank) == LIVE for rank in self._self_joined):
            raise InvalidArgument(
                f"the launcher has started {count} workers now, {self._reserved} before, but a worker that has joined "
                "by itself has the rank of one of them. End that worker."
            )
        self._reserved = self._segment.external_workers = count
        self._first_free = max(self._first_free, count)

    def _requested_rank(self, worker: str, request: JoinRequest) -> int:
        """The rank of a worker that no launcher of this host has started: the requested one, or a free one."""
        if worker in self._ranks:
            return self._ranks[worker]
        if not self._reserved <= request.rank < MAX_WORKERS:
            return self._free_rank()
        holders = [name for name, rank in self._ranks.items() if rank == request.rank]
        # A restarted worker takes the rank of its predecessor, even if that is not known to be dead yet. A worker that
        # was cut off and finds its rank taken gets another one.
        if holders and self._segment.state(request.rank) == LIVE and (request.is_back or not request.restarts):
            return self._free_rank()
        for name in holders:
            del self._ranks[name]
            self._streams.pop(name, None)
        return request.rank

    def leave(self, worker: str, *, is_early: bool) -> None:
        """Note that a worker leaves in order; an external one that leaves early may be restarted."""
        with self._lock:
            self._streams.pop(worker, None)
            rank = self._ranks.pop(worker, -1)
            if rank >= 0 and self._segment.is_live(rank, self._incarnations.pop(worker)):
                self._segment.mark(rank, DEAD if is_early and self._are_external else LEFT)
            self._events.write("left", worker=rank, live=self.live)

    def lose(self, worker: str, stream: Stream, reason: str, *, is_silent: bool) -> None:
        """Note that a heartbeat connection broke; this matters only if the worker has made no newer one.

        The launcher knows whether its own workers have died, so for them only missing heartbeats count. An external
        worker on this machine is dead when its process has ended.
        """
        if self._are_external and worker in self._local_pids and not is_silent:
            self._wait_for_return(worker, stream, self._local_pids[worker])
        elif self._pauses.was_recent:  # the worker gave up a host that did not answer, and is about to reconnect
            self._wait_for_return(worker, stream)
        with self._lock:
            if self._streams.get(worker) is not stream:
                return
            del self._streams[worker]
            rank = self._ranks[worker]
            # The launcher may have started a successor, which is alive; and a worker that has left stays so.
            counts = is_silent or self._are_external or worker not in self._local_pids
            if counts and self._segment.is_live(rank, self._incarnations[worker]):
                self._segment.mark(rank, DEAD)
            self._events.write("lost", worker=rank, reason=reason, live=self.live)

    def _wait_for_return(self, worker: str, stream: Stream, pid: int | None = None) -> None:
        """Wait until a worker has made a newer connection, its process `pid` has ended, or the time is over."""
        poll = select.poll()
        with ExitStack() as stack:
            if pid is not None:
                try:
                    process = os.pidfd_open(pid)
                except OSError:
                    return
                stack.callback(os.close, process)
                poll.register(process, select.POLLIN)
            deadline = Deadline(_RETURN_TIMEOUT_S)
            while self._streams.get(worker) is stream and not deadline.is_over() and not poll.poll(50):
                pass

    def _free_rank(self) -> int:
        for rank in range(self._first_free, MAX_WORKERS):
            if self._segment.state(rank) == NEVER:
                return rank
        raise InvalidArgument(f"the run has had {MAX_WORKERS} workers, and no more can join it.")


class _PauseDetector:
    """Tells whether this process was stopped recently (SIGSTOP, a suspended job), or starved of its core.

    A thread notes the time every `_PAUSE_POLL_S`; a much longer gap is a pause. The time is the operating
    system's, whatever clock the run has: a pause is an event of this process.
    """

    def __init__(self) -> None:
        self._noted = time.monotonic()
        self._resumed = -math.inf
        threading.Thread(target=self._poll, name="maniple-pauses", daemon=True).start()

    @property
    def was_recent(self) -> bool:
        """Whether a pause ended so recently that workers may still be reconnecting."""
        self._note()
        return time.monotonic() - self._resumed < _RETURN_TIMEOUT_S

    def _poll(self) -> None:
        while True:
            time.sleep(_PAUSE_POLL_S)
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        if now - self._noted > _PAUSE_MIN_S:
            self._resumed = now
        self._noted = now


_detect_pauses = functools.cache(_PauseDetector)  # one thread per process


class RowWriter:
    """Writes the events of one remote worker to their file, without rows that no reader could use.

    A row `rejected` reports how many were dropped, and what was wrong with the first; the worker itself continues.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._count, self._reason = 0, ""  # rejected rows that were not reported yet
        self._next_report = 0.0

    def write(self, rows: bytes) -> bool:
        """Append the valid rows; returns False if that is not possible now. The heartbeat is then repeated."""
        valid: list[bytes] = []
        errors: list[str] = []
        for line in filter(None, rows.split(b"\n")):
            try:
                decode_row(line)
                if reason := bad_progress(line):
                    raise BadRow(reason)
                valid.append(line + b"\n")
            except BadRow as error:
                errors.append(str(error)[:200])
        try:
            append_rows(self._path, b"".join(valid))
        except OSError:
            return False
        self._count += len(errors)
        self._reason = self._reason or next(iter(errors), "")
        self.report_rejected()
        return True

    def report_rejected(self, *, is_last: bool = False) -> None:
        """Append the row about rejected ones, if there are any and it is time."""
        now = clock.time()
        if not self._count or (now < self._next_report and not is_last):
            return
        row = {"event": "rejected", "timestamp": now, "datestamp": time.strftime("%Y-%m-%d %H:%M")}
        row |= {"worker": self._rank, "rows": self._count, "reason": self._reason}
        self._count, self._reason, self._next_report = 0, "", now + _REJECTED_INTERVAL_S
        with suppress(OSError):
            append_rows(self._path, msgspec.json.encode(row) + b"\n")
