"""Membership: which workers came over the network, and whether they are alive, as the host's server sees them."""

import threading

from maniple.center.segment import DEAD, LEFT, LIVE, MAX_WORKERS, NEVER, Segment
from maniple.errors import InvalidArgument
from maniple.record import Events
from maniple.wire.stream import Stream


class Membership:
    """The remote workers of a run. Ranks below `reserved` belong to the workers that the launcher starts."""

    def __init__(self, segment: Segment, events: Events, reserved: int) -> None:
        self._segment, self._events, self._reserved = segment, events, reserved
        self._lock = threading.Lock()
        self._ranks: dict[str, int] = {}
        self._speakers: dict[str, Stream] = {}  # the newest control connection of each
        self._beats: dict[str, int] = {}  # the newest beat of each

    def await_returns(self, timeout_s: float) -> None:
        """Those who were alive under the server before this one return within `timeout_s`, or count as lost."""
        expected = [rank for rank in range(self._reserved, MAX_WORKERS) if self._segment.state(rank) == LIVE]

        def look() -> None:
            with self._lock:
                known = self._ranks.values()
                gone = [rank for rank in expected if rank not in known and self._segment.state(rank) == LIVE]
                for rank in gone:
                    self._segment.mark(rank, DEAD)
            for rank in gone:
                self._events.write("lost", worker=rank, reason="it did not return to a new server", live=self.live)

        if expected:
            timer = threading.Timer(timeout_s, look)
            timer.daemon = True
            timer.start()

    @property
    def live(self) -> int:
        """p, the workers alive now."""
        return self._segment.live

    def rank(self, worker: str) -> int:
        """The rank of a worker; -1 before it has joined."""
        return self._ranks.get(worker, -1)

    def join(self, worker: str, stream: Stream, *, node: str, pid: int, before: int, is_expected: bool = False) -> int:
        """A worker has come, or come back with the rank it had `before`; gives its rank.

        One that the launcher has started on another machine `is_expected`, with a rank of the launcher's own.
        """
        with self._lock:
            rank = self._ranks.get(worker, before)
            is_new = worker not in self._ranks
            is_expected = is_expected and 0 <= rank < self._reserved
            if is_expected:
                self._replace(rank, worker)
            is_taken = is_new and not is_expected and (rank < self._reserved or rank in self._ranks.values())
            if is_taken or not 0 <= rank < MAX_WORKERS:
                rank = self._free()
            is_back = before >= 0 and not (is_expected and is_new)
            self._ranks[worker] = rank
            self._speakers[worker] = stream
            self._segment.mark(rank, LIVE)
        self._events.write("returned" if is_back else "joined", worker=rank, node=node, pid=pid, live=self.live)
        return rank

    def _replace(self, rank: int, worker: str) -> None:
        """The launcher starts a worker again when its predecessor is dead: nothing is heard of that one any more."""
        for other in [other for other, its in self._ranks.items() if its == rank and other != worker]:
            del self._ranks[other]
            self._speakers.pop(other, None)

    def is_news(self, worker: str, beat: int) -> bool:
        """The rows of this beat have not come before."""
        is_news = beat > self._beats.get(worker, 0)
        self._beats[worker] = max(beat, self._beats.get(worker, 0))
        return is_news

    def leave(self, worker: str) -> None:
        """A worker has said goodbye."""
        with self._lock:
            self._speakers.pop(worker, None)
            rank = self._ranks.pop(worker, -1)
            if rank >= 0:
                self._segment.mark(rank, LEFT)
        self._events.write("left", worker=rank, live=self.live)

    def lose(self, worker: str, stream: Stream, reason: str) -> None:
        """A control connection has ended without a goodbye; it counts if the worker has made no newer one."""
        with self._lock:
            if self._speakers.get(worker) is not stream:
                return
            del self._speakers[worker]
            rank = self._ranks[worker]
            self._segment.mark(rank, DEAD)
        self._events.write("lost", worker=rank, reason=reason, live=self.live)

    def _free(self) -> int:
        for rank in range(self._reserved, MAX_WORKERS):
            if self._segment.state(rank) == NEVER:
                return rank
        raise InvalidArgument(f"the run has had {MAX_WORKERS} workers, and no more can join it.")
