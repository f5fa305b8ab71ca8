"""The control connection: says once a second that this worker is alive, and hears how many live and whether to stop.

It has a thread and a connection of its own, so that values under way never delay it, and it alone makes new
tries when the host is gone: training never waits for them. A worker elsewhere also sends its rows by it.
"""

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable

import msgspec

from maniple.center.link import Door, Link, checked
from maniple.center.locks import Patience
from maniple.center.tcp import insist
from maniple.changes import Changes
from maniple.errors import BadFrame, ManipleError
from maniple.wire.messages import Beat, Beaten, Join, Joined, Refusal
from maniple.worker.seat import Count

_MOST_BYTES = 32 << 20  # of rows kept while the host is away or its disk is full: then the oldest are dropped
_FULL_S, _LAST_FULL_S = 5.0, 0.5  # until rows are sent again to a host whose disk was full; the same on leaving
_BEAT_BYTES = 1 << 20
_GOODBYE_S = 10.0  # a host that is being started again is back by then
_ANSWER_S = 6.0  # a host that has not answered a beat for so long is away


class Control:
    """This worker's membership in its run. `join` waits for the host; without it, `start` finds it in its own time."""

    def __init__(self, door: Door, who: Join, *, count: Count) -> None:
        self.live = 1
        self.is_over = False  # the host has ended the run
        self.stop = ""  # why this worker should stop, once the controller has said so
        self.changes = Changes()  # settings that a person has changed; another object when there is something new
        self.joined: Joined | None = None
        self.on_away: Callable[[], None] = lambda: None  # called when the host is found to be away
        self._who, self._count = who, count
        self._link = Link(door, "control", timeout_s=_ANSWER_S)
        self._lock = threading.Lock()  # of the three that follow
        self._rows: deque[bytes] = deque()
        self._size_bytes = 0  # of them
        self._dropped = 0  # rows, since the last that was sent
        self._under_way: list[bytes] = []  # with beat `_number`, until it is answered
        self._number = 0
        self._within_s = 1.0
        self._full_until = 0.0  # no rows are sent before
        self._away: Patience | None = None  # while the host is away
        self._wake = threading.Event()
        self._leave_by = 0.0  # not yet
        self._is_early = False  # it leaves before it has come to its end
        self._thread = threading.Thread(target=self._beat_on, name="maniple-control", daemon=True)

    def join(self, deadline_s: float) -> Joined:
        """Wait until the host has taken this worker in."""
        return insist(self._link, self._join, deadline_s)

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()

    @property
    def lineage(self) -> str:
        """The lineage of the host's center."""
        assert self._link.lineage is not None
        return self._link.lineage

    @property
    def is_connected(self) -> bool:
        """The host has answered the last beat."""
        return self._away is None

    @property
    def away_s(self) -> float:
        """For how long the host has been away; 0 while it is there."""
        away = self._away
        return 0.0 if away is None else away.waited_s

    @property
    def reason(self) -> str:
        """Why the host is away."""
        return self._link.reason

    def write(self, row: bytes) -> None:
        """Send a row with the next beat. Of too many, the oldest are dropped, and counted in the next that is sent."""
        with self._lock:
            if len(row) < _BEAT_BYTES:  # what is larger was logged by mistake
                self._rows.append(row)
                self._size_bytes += len(row)
            else:
                self._dropped += 1
            while self._size_bytes > _MOST_BYTES:
                self._size_bytes -= len(self._rows.popleft())
                self._dropped += 1

    def leave(self, patience_s: float = _GOODBYE_S, *, is_early: bool = False) -> None:
        """Send the last rows and say goodbye; a host that is away is waited for a little."""
        self._is_early = is_early
        self._leave_by = time.monotonic() + patience_s
        self._full_until = 0.0
        self._wake.set()
        self._thread.join(patience_s + (_ANSWER_S if self.joined else 0.0))

    def _join(self) -> Joined:
        answer = self._link.say(self._who)
        if not isinstance(answer, Joined):
            raise BadFrame("the host was told of a new worker, and said something else.")
        self.joined, self.live = answer, answer.live
        self._who = msgspec.structs.replace(self._who, rank=answer.rank, is_back=True)
        return answer

    def _beat_on(self) -> None:
        while not self.is_over:
            is_last = bool(self._leave_by)
            try:
                if not self._link.is_connected:
                    self._link.stream()
                    self._join()
                while self._can_send and not self.is_over:
                    self._beat()
                if is_last and self._undelivered and time.monotonic() < self._leave_by and not self.is_over:
                    self._beat()  # its disk is full: perhaps there is room in a moment
                    time.sleep(0.05)
                    continue
                self._beat(is_last=is_last)
                self._away = None
            except (OSError, ManipleError) as error:
                self._link.drop(str(error))
                if self._away is None:
                    self._away = Patience(math.inf, slice_s=_ANSWER_S + 1.0)  # a try may take that long
                    self.on_away()
                self._away.is_over()
                if is_last and time.monotonic() < self._leave_by:
                    time.sleep(0.05)
                    continue
            if is_last:
                break
            self._wake.wait(self._within_s if self.is_connected else 0.05)
        self._link.drop("this worker has left")
        if self._undelivered and not self.is_over:
            lost = f"{self._undelivered:,} rows of this worker's record are lost"
            warnings.warn(f"{lost}: its host is away, or could not write them.", stacklevel=2)

    @property
    def _undelivered(self) -> int:
        """The rows that the host has not written."""
        return len(self._rows) + len(self._under_way)

    @property
    def _can_send(self) -> bool:
        return bool(self._undelivered) and time.monotonic() >= self._full_until

    def _take(self) -> list[bytes]:
        """The next rows to be sent together; the first tells how many before it were dropped."""
        taken: list[bytes] = []
        with self._lock:
            size = 0
            while self._rows and size < _BEAT_BYTES:
                taken.append(self._rows.popleft())
                size += len(taken[-1])
            self._size_bytes -= size
            if taken and self._dropped:
                taken[0] = taken[0].rstrip()[:-1] + b',"dropped":%d}\n' % self._dropped
                self._dropped = 0
        return taken

    def _beat(self, *, is_last: bool = False) -> None:
        rows = b""
        if self._can_send:
            if not self._under_way:
                self._number += 1
                self._under_way = self._take()
            rows = b"".join(self._under_way)
        stream = self._link.stream()
        steps, samples, _ = self._count()
        stream.send(Beat(self._number, is_last, steps, samples, self._is_early), rows)
        answer = stream.receive_message()
        if isinstance(answer, Refusal) and answer.kind == "RunOver":
            self.is_over = True
            return
        checked(answer)
        if not isinstance(answer, Beaten):
            raise BadFrame("the host's beat was expected.")
        self.live, self.stop, self._within_s = answer.live, answer.stop, answer.within_s
        if answer.changes and answer.changes != self.changes.text:
            self.changes = Changes.read(answer.changes)
        if answer.is_full:
            self._full_until = time.monotonic() + (_LAST_FULL_S if self._leave_by else _FULL_S)
        elif rows:
            self._under_way = []
