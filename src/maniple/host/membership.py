"""Membership: which workers there are, and whether they are alive, as the host's server sees them."""

import functools
import math
import os
import select
import threading
import time

from maniple.center.locks import Patience
from maniple.center.segment import DEAD, LEFT, LIVE, MAX_WORKERS, NEVER, Segment
from maniple.errors import BadFrame, InvalidArgument
from maniple.record import Events
from maniple.wire.messages import Join
from maniple.wire.stream import Stream

_MAX_NODE = 255  # characters of a machine's name
_RETURN_S = 10.0  # for a process that lives and whose connection has broken
_NOTE_S = 0.2
_STOPPED_S = (
    3.0  # far above the delays of a busy machine; workers wait twice as long for an answer before they reconnect
)


class _Stops:
    """Tells whether this process was stopped (SIGSTOP, a suspended job) a short while ago.

    A thread notes the time again and again; if that took too long, the process was stopped, or starved of its core.
    """

    def __init__(self) -> None:
        self._noted = time.monotonic()
        self._resumed = -math.inf
        threading.Thread(target=self._note_on, name="maniple-stops", daemon=True).start()

    @property
    def are_recent(self) -> bool:
        """It was stopped, and has not gone on for longer than workers take to return."""
        self._note()
        return time.monotonic() - self._resumed < _RETURN_S

    def _note_on(self) -> None:
        while True:
            time.sleep(_NOTE_S)
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        if now - self._noted > _STOPPED_S:
            self._resumed = now
        self._noted = now


@functools.cache
def _stops() -> _Stops:
    """Those of this process."""
    return _Stops()


class Membership:
    """The workers of a run. Ranks below `reserved` belong to the workers that the launcher starts.

    `are_guests`: that launcher is another one, and says neither when it starts them nor what becomes of them.
    `is_queued`: a batch queue starts them, and each asks for its rank when it comes.
    """

    def __init__(
        self, segment: Segment, events: Events, reserved: int, *, are_guests: bool = False, is_queued: bool = False
    ) -> None:
        self._segment, self._events, self._are_guests = segment, events, are_guests
        if are_guests:  # as many as there were under the server before this one
            reserved = segment.guests or reserved
        self._reserved, self._first_free = 0 if is_queued else reserved, reserved
        self._lock = threading.Lock()
        self._ranks: dict[str, int] = {}
        self._speakers: dict[str, Stream] = {}  # the newest control connection of each
        self._beats: dict[str, int] = {}  # the newest beat of each whose rows are written
        self._incarnations: dict[str, int] = {}
        self._near: dict[str, int] = {}  # the process of each
        self._strangers: set[int] = set()  # the ranks of those who have joined by themselves
        self._stops = _stops()

    def await_returns(self, timeout_s: float) -> None:
        """Those who were alive under the server before this one return within `timeout_s`, or count as lost."""
        first = 0 if self._are_guests else self._reserved
        expected = [rank for rank in range(first, MAX_WORKERS) if self._segment.state(rank) == LIVE]

        def look() -> None:
            patience = Patience(timeout_s)
            while not patience.is_over():
                time.sleep(0.1)
            with self._lock:
                known = self._ranks.values()
                gone = [rank for rank in expected if rank not in known and self._segment.state(rank) == LIVE]
                for rank in gone:
                    self._segment.mark(rank, DEAD)
            for rank in gone:
                self._events.write("lost", worker=rank, reason="it did not return to a new server", live=self.live)

        if expected:
            threading.Thread(target=look, name="maniple-returns", daemon=True).start()

    @property
    def live(self) -> int:
        """p, the workers alive now."""
        return self._segment.live

    def rank(self, worker: str) -> int:
        """The rank of a worker; -1 before it has joined."""
        return self._ranks.get(worker, -1)

    def join(self, worker: str, stream: Stream, said: Join) -> tuple[int, int]:
        """A worker has come, or come back; gives its rank and how often that was taken."""
        if not (0 <= said.pid < 1 << 31 and len(said.node) <= _MAX_NODE and said.node.isprintable()):
            raise BadFrame(f"process {said.pid} on {said.node[:_MAX_NODE]!r} cannot be a worker.")
        is_ours = said.is_near or said.is_expected  # the launcher has started it, with a rank of its own
        with self._lock:
            self._mind_guests(said)
            is_known = worker in self._ranks
            rank = self._rank_given(said.rank) if is_ours else self._rank_elsewhere(worker, said)
            is_guest = self._are_guests and is_ours and not said.is_back  # whom nobody has announced
            is_new_here = not is_ours and (rank != said.rank or not said.is_back)
            if not is_known and (is_guest or is_new_here):
                self._segment.renew(rank)
            if not said.is_near or self._segment.state(rank) == DEAD:  # a near one marks itself when it comes
                self._segment.mark(rank, LIVE)
            if said.is_near:
                self._near[worker] = said.pid
            if not is_ours:
                self._strangers.add(rank)
            self._ranks[worker] = rank
            self._speakers[worker] = stream
            incarnation = self._incarnations[worker] = self._segment.incarnation(rank)
            event = "returned" if said.is_back else "restarted" if said.restarts else "joined"
            # Rows are written under the lock: the last one has the number of workers that are alive after it.
            self._events.write(event, worker=rank, node=said.node, pid=said.pid, near=said.is_near, live=self.live)
        return rank, incarnation

    def _mind_guests(self, said: Join) -> None:
        """An elastic launcher may start another number of workers the next time; the first of them knows best.

        Any other may come before it, and be one more than there were.
        """
        if not self._are_guests or said.is_back or not 0 < said.guests <= MAX_WORKERS:
            return
        count = said.guests if said.rank == 0 else max(self._reserved, said.guests)
        if any(rank < count and self._segment.state(rank) == LIVE for rank in self._strangers):
            raise InvalidArgument(
                f"the launcher has started {count} workers now, {self._reserved} before, but somebody who has joined "
                "by himself has the rank of one of them. End that worker."
            )
        self._reserved = self._segment.guests = count
        self._first_free = max(self._first_free, count)

    def _rank_given(self, rank: int) -> int:
        if not 0 <= rank < self._reserved:
            raise BadFrame(
                f"a worker says that the launcher started it as rank {rank}, where 0 to {self._reserved - 1} were."
            )
        return rank

    def _rank_elsewhere(self, worker: str, said: Join) -> int:
        """The rank of a worker whom no launcher of this host has started: the one it asks for, or a free one."""
        if worker in self._ranks:
            return self._ranks[worker]
        if not self._reserved <= said.rank < MAX_WORKERS:
            return self._free()
        holders = [name for name, rank in self._ranks.items() if rank == said.rank]
        # Who is started again takes the place of its predecessor, though that is not known to be dead yet. One who
        # was cut off, and comes back when its place is taken, has none to take back.
        if holders and self._segment.state(said.rank) == LIVE and (said.is_back or not said.restarts):
            return self._free()
        for name in holders:
            del self._ranks[name]
            self._speakers.pop(name, None)
        return said.rank

    def is_news(self, worker: str, beat: int) -> bool:
        """The rows of this beat are not written yet."""
        return beat > self._beats.get(worker, 0)

    def heard(self, worker: str, beat: int) -> None:
        """The rows of this beat are written."""
        self._beats[worker] = max(beat, self._beats.get(worker, 0))

    def leave(self, worker: str, *, is_early: bool) -> None:
        """A worker has said goodbye; a guest that goes early may be started again."""
        with self._lock:
            self._speakers.pop(worker, None)
            rank = self._ranks.pop(worker, -1)
            if rank >= 0 and self._segment.is_live(rank, self._incarnations.pop(worker)):
                self._segment.mark(rank, DEAD if is_early and self._are_guests else LEFT)
            self._events.write("left", worker=rank, live=self.live)

    def lose(self, worker: str, stream: Stream, reason: str, *, is_silent: bool) -> None:
        """A control connection has ended without a goodbye; it counts if the worker has made no newer one.

        Whether a worker of the launcher has died is known to the launcher: of such a one only silence counts. A guest
        of this machine counts as dead when its process has ended.
        """
        if self._are_guests and worker in self._near and not is_silent:
            self._await_end(worker, stream)
        elif self._stops.are_recent:  # it has given up a host that did not answer, and is about to return
            self._await_return(worker, stream)
        with self._lock:
            if self._speakers.get(worker) is not stream:
                return
            del self._speakers[worker]
            rank = self._ranks[worker]
            # The launcher may have started a successor meanwhile, who lives; and one who has left stays so.
            counts = is_silent or self._are_guests or worker not in self._near
            if counts and self._segment.is_live(rank, self._incarnations[worker]):
                self._segment.mark(rank, DEAD)
            self._events.write("lost", worker=rank, reason=reason, live=self.live)

    def _await_return(self, worker: str, stream: Stream) -> None:
        """Until a worker has made a newer connection, or has had the time to."""
        patience = Patience(_RETURN_S)
        while self._speakers.get(worker) is stream and not patience.is_over():
            time.sleep(0.05)

    def _await_end(self, worker: str, stream: Stream) -> None:
        """Until a guest's process has ended, it has made a newer connection, or has had the time to."""
        try:
            process = os.pidfd_open(self._near[worker])
        except OSError:
            return
        poll = select.poll()
        poll.register(process, select.POLLIN)
        deadline = time.monotonic() + _RETURN_S
        while self._speakers.get(worker) is stream and time.monotonic() < deadline and not poll.poll(50):
            pass
        os.close(process)

    def _free(self) -> int:
        for rank in range(self._first_free, MAX_WORKERS):
            if self._segment.state(rank) == NEVER:
                return rank
        raise InvalidArgument(f"the run has had {MAX_WORKERS} workers, and no more can join it.")
