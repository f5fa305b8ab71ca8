"""Sessions: of all data connections of a worker, only the newest one may apply anything.

A worker that reconnects asks what of its last exchange was applied. What still arrives on the older connection must
not be applied after that.
"""

import threading

from maniple.center.staging import StagingFiles
from maniple.memory.locks import LockQueue
from maniple.wire.frames import Stream


class Superseded(ConnectionError):
    """The worker has made a newer connection; this one may not apply anything any more."""


class WorkerSessions:
    """The newest data connection of each worker. Only that one may apply anything."""

    def __init__(self, staging: StagingFiles) -> None:
        self.staging = staging
        self._lock = threading.Lock()
        self._lock_queue = LockQueue()
        self._sessions: dict[str, WorkerSession] = {}

    def start(self, worker: str, stream: Stream) -> "WorkerSession":
        """Make `stream` the connection of `worker`, once the older one has completed what it is applying."""
        with self._lock:
            before = self._sessions.get(worker)
            lock = threading.Lock() if before is None else before.lock
            session = WorkerSession(stream, lock, self._lock_queue)
            self._sessions[worker] = session
        if before is not None:
            before.supersede()
        return session

    def end(self, worker: str, session: "WorkerSession") -> None:
        """Remove a session that has ended, unless the worker has a newer one."""
        with self._lock:
            if self._sessions.get(worker) is session:
                del self._sessions[worker]

    def forget(self, worker: str) -> None:
        """End the session of a worker that has left, and forget what was applied for it."""
        with self._lock:
            session = self._sessions.pop(worker, None)
        if session is not None:
            session.supersede()
        self.staging.forget(worker)


class WorkerSession:
    """One data connection of a worker. All connections to one host queue for parameters in `lock_queue`."""

    def __init__(self, stream: Stream, lock: threading.Lock, lock_queue: LockQueue) -> None:
        self.stream, self.lock, self.lock_queue = stream, lock, lock_queue
        self._is_superseded = False

    def __enter__(self) -> None:
        """Keep newer sessions from starting for the length of a `with` block; Superseded if one has started."""
        self.lock.acquire()
        if self._is_superseded:
            self.lock.release()
            raise Superseded("the worker has reconnected")

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def supersede(self) -> None:
        """End the session, once it has completed what it is applying."""
        self.stream.abort()
        with self.lock:
            self._is_superseded = True
