"""The server: the host's network side, in a process of its own, one thread per connection.

It holds no state that the segment and the run folder do not hold: if it is killed, its successor takes the
listening sockets over from the launcher, finishes what was begun, and goes on.
"""

import contextlib
import socket
import ssl
import threading
import time
import traceback
from collections import OrderedDict
from pathlib import Path
from typing import Any

from maniple.center.allowance import Allowance
from maniple.center.locks import ByteLocks
from maniple.center.segment import Segment
from maniple.center.serving import Serving
from maniple.center.shared import Shared
from maniple.center.stage import Stages, finish_all
from maniple.center.turns import Left, Turn, Turns
from maniple.errors import BadFrame, ManipleError, say
from maniple.feed.serving import serve_feed
from maniple.host.best import Best
from maniple.host.control import SILENCE_S, Control
from maniple.host.desk import Controls, Desk
from maniple.host.examined import answer_doctor
from maniple.host.keeping import keep, save
from maniple.host.membership import Membership
from maniple.host.restored import Restored
from maniple.host.saving import save_as
from maniple.host.watched import Watched
from maniple.place import Place
from maniple.record import Events, Folder
from maniple.rules import warm_up
from maniple.wire.messages import Proof, Welcome, refusal_of
from maniple.wire.proof import HALF_OPEN_S, admit
from maniple.wire.stream import NEVER_S, Stream, prepare

_MAX_CONNECTIONS = 4096
_MAX_HALF_OPEN = 64
_GOODBYE_S = 2.0  # two beats
_LAST_LOOK_S = 0.8  # for watchers, if workers have taken all of that time: the launcher kills after 3 s
_LINE_EVERY_S = 1.0
_OVER = "over"


def tell_over(segment: Path) -> None:
    """The owner of a run says that it is over: a server that is told to end afterwards tells the workers."""
    with contextlib.suppress(OSError):
        (segment / _OVER).touch()


def unsay_over(segment: Path) -> None:
    """The run goes on after all."""
    (segment / _OVER).unlink(missing_ok=True)


class Server:
    """All connections of one host."""

    def __init__(self, place: Place, token: str, tls: ssl.SSLContext | None, controller: Controls) -> None:
        assert place.segment is not None and place.run is not None
        self._place, self._token, self._tls = place, token, tls
        self._segment = Segment(place.segment)
        self._folder = Folder(place.run)
        self._events = Events(self._folder.events("server"))
        self._lineage = place.segment.name.rpartition("-")[2]
        self._restored = Restored.read(place.segment)
        are = {"are_guests": place.is_guest, "is_queued": place.is_queued}
        self._members = Membership(self._segment, self._events, place.world, **are)
        self._turns = Turns(Stages(self._segment.path))
        best = Best(
            self._folder.center,
            lambda name: keep(self._segment, self._folder, self._lineage, self._restored, name=name),
        )
        desk = Desk(controller, self._segment, self._events, place.limits, best)
        self._control = Control(place, self._segment, self._folder, members=self._members, desk=desk, turns=self._turns)
        self._watched = Watched(
            self._segment,
            self._folder,
            self._events,
            desk,
            lambda: save(self._segment, self._folder, self._lineage, self._restored),
        )
        self._allowance = Allowance(place.segment, int(place.max_memory_mb * 1e6))
        self._failures = 0  # of connections, since the last line that told of one
        self._next_line = 0.0
        self._lock = threading.Lock()
        self._half_open: OrderedDict[int, socket.socket] = OrderedDict()
        self._connections = 0
        self._over = threading.Event()  # the run has ended: the workers are told, then this process ends
        self._is_told = False  # they are

    def run(self, listeners: list[socket.socket]) -> None:
        """Accept connections for ever. What a killed predecessor had begun is finished first."""
        guard = ByteLocks(self._segment.path / "server")
        with guard.hold(0, timeout_s=10, what="the end of another server of this run"):
            finished = finish_all(
                self._segment.path, lambda name: Shared.open(self._segment, self._segment.path / name)
            )
            self._turns.stages.begin()
            self._members.await_returns(SILENCE_S)
            threads = [threading.Thread(target=self._accept, args=(one,), daemon=True) for one in listeners]
            for thread in threads:
                thread.start()
            self._events.write("serving", finished=finished, restored=self._restored.count)
            if any(one.family != socket.AF_UNIX for one in listeners):  # else values come by shared memory
                warm_up(["float32", "float64"])
            self._over.wait()
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Let the workers hear that the run has ended, and then the watchers, who have their last rows by that."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._control.count and time.monotonic() < deadline:
            time.sleep(0.02)
        self._is_told = True
        deadline = max(deadline, time.monotonic() + _LAST_LOOK_S)
        while self._watched.count and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self) -> None:
        """Tell the workers that the run has ended, each at its next beat, and end."""
        self._over.set()

    def end_if_over(self, *_: Any) -> None:
        """SIGTERM: if the run is over, end as `end` does; else somebody has killed this process alone."""
        if not (self._segment.path / _OVER).exists():
            raise SystemExit(143)
        self.end()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:  # out of descriptors, say: those who wait are served when some are free again
                if self._over.wait(0.05):
                    return
                continue
            with self._lock:
                if self._connections >= _MAX_CONNECTIONS:
                    link.close()
                    continue
                self._connections += 1
                self._half_open[link.fileno()] = link
                # A crowd of silent strangers must not keep workers out: the oldest of them makes room.
                if len(self._half_open) > _MAX_HALF_OPEN:
                    _, oldest = self._half_open.popitem(last=False)
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._attend, args=(link,), daemon=True).start()
            except RuntimeError:  # the system grants no more threads
                self._forget(link, link.fileno())

    def _attend(self, link: socket.socket) -> None:
        number = link.fileno()
        try:
            stream = Stream(prepare(link, self._tls, is_host=True, timeout_s=HALF_OPEN_S))
            proof = admit(stream, self._token, self._welcome)
            with self._lock:
                self._half_open.pop(number, None)
            try:
                self._talk(stream, proof)
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, ManipleError):
                    raise  # the connection has broken
                if not isinstance(error, ManipleError) or isinstance(error, BadFrame):
                    self._tell_failure(proof, error)
                if not isinstance(error, ManipleError):
                    error = BadFrame(f"the host could not do what was asked: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    stream.send(refusal_of(error))
                stream.linger()
        except (OSError, ManipleError):
            pass  # of no account: strangers, cut connections, workers that end; members are noted by `Control`
        finally:
            self._forget(link, number)

    def _tell_failure(self, proof: Proof, error: Exception) -> None:
        """One line in the log on a connection that an error has ended; the traceback of a defect is in the event."""
        with self._lock:
            self._failures += 1
            if time.monotonic() < self._next_line:  # a peer that fails again and again must not fill the disk
                return
            count, self._failures = self._failures, 0
            self._next_line = time.monotonic() + _LINE_EVERY_S
        text = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        more = f" ({count - 1} more since the last line)" if count > 1 else ""
        say(f"a connection ({proof.role}) of {proof.worker[:32]!r} was ended: {text}{more}")
        trace = {} if isinstance(error, ManipleError) else {"traceback": traceback.format_exc()[-4000:]}
        self._events.write("connection failed", role=proof.role, error=text, count=count, **trace)

    def _forget(self, link: socket.socket, number: int) -> None:
        with self._lock:
            self._connections -= 1
            if self._half_open.get(number) is link:
                del self._half_open[number]
        link.close()

    def _talk(self, stream: Stream, proof: Proof) -> None:
        if not (proof.worker.isalnum() and proof.worker.isascii() and len(proof.worker) <= 32):
            raise BadFrame(f"{proof.worker!r} cannot name a worker.")
        if proof.role == "control":
            self._control.attend(stream, proof.worker, self._over.is_set)
            return
        if proof.role == "ask":
            self._control.answer(stream, proof.worker)
            return
        if proof.role == "feed":
            serve_feed(stream, self._segment.path, proof.worker, self._over.is_set, self._allowance.take)
            return
        if proof.role == "doctor":
            answer_doctor(stream, self._segment)
            return
        if proof.role == "watch":
            self._watched.attend(stream, lambda: self._is_told)
            return
        stream.set_timeout(NEVER_S)
        turn = self._turns.take(proof.worker, stream)
        try:
            self._serve(turn, proof.worker)
        except Left:
            self._turns.forget(proof.worker)
            raise
        finally:
            self._turns.end(proof.worker, turn)

    def _serve(self, turn: Turn, worker: str) -> None:
        Serving(
            turn,
            self._segment,
            worker,
            rank=lambda: self._members.rank(worker),
            stages=self._turns.stages,
            included=self._restored.has,
            recalled=self._restored.recalls,
            save=lambda path: save_as(self._segment, self._folder, path),
            allowance=self._allowance,
        ).serve()

    def _welcome(self, mac: bytes) -> Welcome:
        return Welcome(mac, self._lineage, self._restored.count, self._restored.saved)
