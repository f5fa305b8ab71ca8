"""The mirror: what tells of a run on another machine, brought into a folder here and kept up to date.

From there all is as with a run of this machine. Rows are only ever appended, so that of each file the new end is asked
for; run.json is taken whole whenever it was written.
"""

import time
from pathlib import Path

import msgspec

from maniple.center.link import Door, Link, checked
from maniple.errors import BadFrame, ManipleError
from maniple.place import Place
from maniple.record import Folder
from maniple.record.events import writer
from maniple.record.folder import write_whole
from maniple.wire.stream import Stalled, Stream
from maniple.wire.watching import NAME, PIECE_BYTES, Files, Found, Piece, Read

DEADLINE_S = 5.0
_CONNECT_S = _GREETING_S = 2.0
_UNDER_WAY = 16  # questions asked before the first answer is read
_MAX_LIST_BYTES = 4 << 20
_RUN = "run.json"

Listed = list[tuple[str, int, int]]  # name, bytes, when it was written


class Mirror:
    """A copy of run.json and the rows of the run of `place`, in `folder`.

    Attributes:
        away: why the host cannot be reached; "" while it can.
        is_over: the run has ended, and all that its host could tell is here.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self.folder = folder
        self.away = "no try was made yet"
        self.is_over = False
        self._link = Link(Door.of(place), "watch", connect_s=_CONNECT_S, greeting_s=_GREETING_S)
        self._written = 0  # when the run.json here was written there

    @property
    def is_away(self) -> bool:
        """The host could not be reached the last time."""
        return bool(self.away)

    def refresh(self, deadline_s: float = DEADLINE_S) -> None:
        """Bring the folder up to date, as far as that is done within `deadline_s`; the rest comes the next time.

        A host that is away is no error: `away` tells, and a later call finds it again. A wrong token is one.
        """
        if self.is_over:
            return
        deadline = time.monotonic() + deadline_s
        try:
            stream = self._link.stream()
            self._settle()
            found, listed = self._listed(stream, deadline)
            is_whole = self._take_new(stream, listed, deadline)
            self.away, self.is_over = "", found.is_over and is_whole
        except Stalled:
            self._give_up(f"the host has not answered within {deadline_s:g} s")
        except OSError as error:
            self._give_up(str(error) or type(error).__name__)
        except ManipleError as error:
            self._give_up(str(error))
            raise
        if self.is_over:
            self._link.drop("the run has ended")

    def close(self) -> None:
        """Watch no more; what was brought stays."""
        self._link.drop("nobody watches any more")

    def _give_up(self, reason: str) -> None:
        self._link.drop(reason)
        self.away = reason

    def _settle(self) -> None:
        """Begin with an empty folder, if what is there tells of another run."""
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        before = Folder(self.folder).read().get("lineage")
        if before is not None and before != self._link.lineage:
            for path in (self.folder / "events").glob("*.jsonl"):
                path.unlink()
            (self.folder / _RUN).unlink()
            self._written = 0

    def _listed(self, stream: Stream, deadline: float) -> tuple[Found, Listed]:
        stream.set_timeout(max(0.001, deadline - time.monotonic()))
        stream.send(Files())
        found, size = stream.receive(deadline=deadline)
        if not isinstance(found := checked(found), Found):
            raise BadFrame("the host was asked for its files, and said something else.")
        told = stream.receive_bytes(size, at_most=_MAX_LIST_BYTES, deadline=deadline)
        try:
            listed = msgspec.json.decode(told, type=Listed)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"the host lists its files in words that cannot be read: {error}.") from None
        for name, _, _ in listed:
            if not NAME.fullmatch(name):  # it would become a file here
                raise BadFrame(f"the host shows {name!r}, which does not tell of a run.")
        return found, listed

    def _take_new(self, stream: Stream, listed: Listed, deadline: float) -> bool:
        """Take what is not here yet; True if that was all."""
        for name, size, written in listed:
            if name == _RUN and written != self._written:
                write_whole(self.folder / _RUN, self._whole(stream, name, size, deadline))
                self._written = written
        waiting = [(name, size) for name, size, _ in listed if name != _RUN]
        for name, size in waiting:
            if self._there(name) > size:  # that cannot be its beginning
                (self.folder / name).unlink()
        while waiting := [(name, size) for name, size in waiting if self._there(name) < size]:
            # Of each writer the oldest file: none may be followed before it is whole.
            oldest = list({writer(name): (name, size) for name, size in reversed(waiting)}.values())
            for first in range(0, len(oldest), _UNDER_WAY):
                if time.monotonic() > deadline:
                    return False
                self._append(stream, oldest[first : first + _UNDER_WAY], deadline)
        return True

    def _append(self, stream: Stream, rows: list[tuple[str, int]], deadline: float) -> None:
        """Take the next piece of each of these files; it may reach beyond the size that was told."""
        wanted = [(name, self._there(name)) for name, _ in rows]
        for (name, _), piece in zip(wanted, self._pieces(stream, wanted, deadline), strict=True):
            if not piece:
                raise BadFrame(f"the host's {name} is shorter now than it was a moment ago.")
            with (self.folder / name).open("ab") as file:
                file.write(piece)

    def _there(self, name: str) -> int:
        """How many bytes of a file are here."""
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def _whole(self, stream: Stream, name: str, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size and (piece := self._pieces(stream, [(name, len(data))], deadline)[0]):
            data += piece
        return data

    def _pieces(self, stream: Stream, wanted: list[tuple[str, int]], deadline: float) -> list[bytes]:
        for name, offset in wanted:
            stream.send(Read(name, offset))
        pieces: list[bytes] = []
        for _ in wanted:
            answer, size = stream.receive(deadline=deadline)
            if not isinstance(checked(answer), Piece):
                raise BadFrame("the host was asked for rows, and said something else.")
            pieces.append(bytes(stream.receive_bytes(size, at_most=PIECE_BYTES, deadline=deadline)))
        return pieces
