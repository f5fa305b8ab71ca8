"""Heartbeats: once a second a worker reports to its host, which answers with the live workers and whether to stop.

Heartbeats have their own thread and connection, so that exchanges never delay them. The host sets the interval
(`host/heartbeat_service`). A worker on another machine also sends the rows of its record here.
"""

import math
import threading
import warnings
from collections import deque
from collections.abc import Callable

import msgspec

from maniple.clock import Deadline, clock
from maniple.connection.link import Endpoint, Link, check_reply
from maniple.connection.retry import retry_until
from maniple.errors import HostAway, ManipleError
from maniple.live_settings import Changes
from maniple.replica.context import HostUpdates
from maniple.wire.messages import Heartbeat, HeartbeatReply, JoinReply, JoinRequest, Refusal

Count = Callable[[], tuple[int, int, bool]]  # steps and samples so far; whether all samples are used

_BUFFER_BYTES = 32 << 20  # of rows, about a day's, kept while the host is away; then the oldest are dropped
_FULL_S, _LAST_FULL_S = 5.0, 0.5  # pause before rows are sent again to a host whose disk was full; the same on leaving
_HEARTBEAT_BYTES = 1 << 20  # of rows in one heartbeat: a larger message would delay its answer
_LEAVE_TIMEOUT_S = 10.0  # a host that is being restarted is back by then
_REPLY_TIMEOUT_S = 6.0  # below the host's own heartbeat timeout of 10 s
_RETRY_S = 0.05


class HeartbeatSender(HostUpdates):
    """This worker's membership in its run. `join` waits for the host; without it, `start` finds it in the background.

    Attributes:
        joined: the host's answer to the join request, once it has come.
        on_away: called when the host is found to be away.
        host_deadline_s: how long training continues without the host; a local host that ends is noticed otherwise.
    """

    def __init__(self, door: Endpoint, who: JoinRequest, *, count: Count) -> None:
        super().__init__()
        self.joined: JoinReply | None = None
        self.on_away: Callable[[], None] = lambda: None
        self.host_deadline_s = math.inf
        self._address = door.address
        self._who, self._count = who, count
        self._link = Link(door, "control", timeout_s=_REPLY_TIMEOUT_S)
        self._lock = threading.Lock()  # of the three that follow
        self._rows: deque[bytes] = deque()
        self._size_bytes = 0  # of the rows
        self._dropped = 0  # rows, since the last that was sent
        self._unanswered: list[bytes] = []  # rows sent with heartbeat `_number`
        self._number = 0
        self._within_s = 1.0
        self._full_until = 0.0  # no rows are sent before
        self._away: Deadline | None = None  # while the host is away
        self._wake = threading.Event()
        self._leave_by = 0.0  # not yet
        self._is_early = False  # the worker leaves before it has finished
        self._thread = threading.Thread(target=self._run, name="maniple-control", daemon=True)

    def join(self, deadline_s: float) -> JoinReply:
        """Wait until the host has accepted this worker."""
        return retry_until(self._link, self._join, deadline_s)

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._thread.start()

    @property
    def lineage(self) -> str:
        """The lineage of the host's center."""
        assert self._link.lineage is not None
        return self._link.lineage

    @property
    def is_connected(self) -> bool:
        """The host has answered the last heartbeat."""
        return self._away is None

    def absence(self) -> HostAway | None:
        """The error to end with once the host has been unreachable for longer than `host_deadline_s`."""
        away = self._away
        if away is None or away.waited_s <= self.host_deadline_s:
            return None
        return HostAway(
            f"the host at {self._address} has been away for {away.waited_s:.0f} s (limit {self.host_deadline_s:g} s): "
            f"{self._link.reason}. Start it again with `maniple serve --resume RUN`; raise --host-deadline if it may "
            "be away for longer."
        )

    def write(self, row: bytes) -> None:
        """Send a row with the next heartbeat. If there are too many, the oldest are dropped and counted."""
        with self._lock:
            if len(row) < _HEARTBEAT_BYTES:  # larger rows were logged by mistake
                self._rows.append(row)
                self._size_bytes += len(row)
            else:
                self._dropped += 1
            while self._size_bytes > _BUFFER_BYTES:
                self._size_bytes -= len(self._rows.popleft())
                self._dropped += 1

    def leave(self, timeout_s: float = _LEAVE_TIMEOUT_S, *, is_early: bool = False) -> None:
        """Send the last rows and leave; wait at most `timeout_s` for a host that is away."""
        self._is_early = is_early
        self._leave_by = clock.monotonic() + timeout_s
        self._full_until = 0.0
        self._wake.set()
        self._thread.join(timeout_s + (_REPLY_TIMEOUT_S if self.joined else 0.0))

    def _join(self) -> JoinReply:
        answer, _ = self._link.request(self._who, reply=JoinReply)
        self.joined, self.live = answer, answer.live
        self._who = msgspec.structs.replace(self._who, rank=answer.rank, is_back=True)
        return answer

    def _run(self) -> None:
        while not self.is_over:
            is_last = bool(self._leave_by)
            try:
                if not self._link.is_connected:
                    self._link.stream()
                    self._join()
                while self._can_send and not self.is_over:
                    self._send()
                if is_last and self._undelivered and clock.monotonic() < self._leave_by and not self.is_over:
                    self._send()  # the host's disk is full: perhaps there is room in a moment
                    clock.sleep(_RETRY_S)
                    continue
                self._send(is_last=is_last)
                self._away = None
            except (OSError, ManipleError) as error:
                self._link.drop(str(error))
                if self._away is None:
                    self._away = Deadline(math.inf, slice_s=_REPLY_TIMEOUT_S + 1.0)  # one attempt may take that long
                    self.on_away()
                self._away.is_over()
                if is_last and clock.monotonic() < self._leave_by:
                    clock.sleep(_RETRY_S)
                    continue
            if is_last:
                break
            self._wake.wait(self._within_s if self.is_connected else _RETRY_S)
        self._link.drop("this worker has left")
        if self._undelivered and not self.is_over:
            lost = f"{self._undelivered:,} rows of this worker's record are lost"
            warnings.warn(f"{lost}: its host is away, or could not write them.", stacklevel=2)

    @property
    def _undelivered(self) -> int:
        """The number of rows that the host has not written."""
        return len(self._rows) + len(self._unanswered)

    @property
    def _can_send(self) -> bool:
        return bool(self._undelivered) and clock.monotonic() >= self._full_until

    def _take(self) -> list[bytes]:
        """The next rows to send together; the first one says how many before it were dropped."""
        taken: list[bytes] = []
        with self._lock:
            size = 0
            while self._rows and size < _HEARTBEAT_BYTES:
                taken.append(self._rows.popleft())
                size += len(taken[-1])
            self._size_bytes -= size
            if taken and self._dropped:
                taken[0] = taken[0].rstrip()[:-1] + b',"dropped":%d}\n' % self._dropped
                self._dropped = 0
        return taken

    def _send(self, *, is_last: bool = False) -> None:
        rows = b""
        if self._can_send:
            if not self._unanswered:
                self._number += 1
                self._unanswered = self._take()
            rows = b"".join(self._unanswered)
        stream = self._link.stream()
        steps, samples, _ = self._count()
        stream.send(Heartbeat(self._number, is_last, steps, samples, self._is_early), rows)
        answer = stream.receive_message()
        if isinstance(answer, Refusal) and answer.kind == "RunOver":
            self.is_over = True
            return
        answer = check_reply(answer, HeartbeatReply)
        self.live, self.stop, self._within_s = answer.live, answer.stop, answer.within_s
        self.relative_speed = answer.relative_speed
        if answer.changes and answer.changes != self.changes.text:
            self.changes = Changes.read(answer.changes)
        if answer.is_full:
            self._full_until = clock.monotonic() + (_LAST_FULL_S if self._leave_by else _FULL_S)
        elif rows:
            self._unanswered = []
