"""A watched run: its folder, or a mirror of the folder of a run elsewhere, and commands to its host.

A mirror is a local copy of run.json and the rows, read like the folder of a local run. Rows are only ever appended, so
only the new end of each file is requested; run.json is fetched whole whenever it was written.
"""

import json
import os
import pwd
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import Deadline
from maniple.connection.find_host import HostStatus, find_host, locate_to_watch
from maniple.connection.link import Endpoint, Link, check_reply
from maniple.environment import Environment
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError
from maniple.record import RunFolder
from maniple.record.events import writer
from maniple.record.folder import write_whole
from maniple.wire.auth import authenticate
from maniple.wire.frames import Stalled, Stream, connect
from maniple.wire.messages import (
    FILE_PART_BYTES,
    WATCHED_FILE,
    CommandDone,
    FileList,
    FilePart,
    ListFiles,
    ReadFile,
    WatcherCommand,
)

DEADLINE_S = 5.0  # of one refresh: a viewer waits for it
SAVING_S = 900.0  # of a snapshot: a large center takes minutes on a slow disk
TIMEOUT_S = 60.0  # of other commands
_CONNECT_S = _GREETING_S = 2.0  # for viewers, who try again
_COMMAND_CONNECT_S = 5.0  # for commands, which are sent once
_PIPELINED = 16  # requests sent before the first reply is read
_MAX_LIST_BYTES = 4 << 20
_RUN = "run.json"

FileEntry = tuple[str, int, int]  # name, bytes, modification time


class WatchedRun(ExitStack):
    """A run that is watched, by its folder or by the address of its host. Use it in a `with` block.

    Attributes:
        name: name of the run, or address of its host.
        folder: its rows; `refresh` fetches new ones of a run elsewhere.
    """

    def __init__(self, host: str, token_file: Path | None = None, certificate: Path | None = None) -> None:
        super().__init__()
        self.name = host
        self._locate: Callable[[], Environment] = lambda: locate_to_watch(host, token_file, certificate)
        self._mirror: Mirror | None = None
        run = Path(host)
        if run.is_dir():
            if not (run / "run.json").exists():
                raise InvalidArgument(f"{run} is not a run folder: it has no run.json. Give runs/NAME or runs/last.")
            self.folder, self.name = RunFolder(run.resolve()), run.resolve().name
            return
        if ":" not in host:
            raise InvalidArgument(
                f"{host} is neither a run folder nor HOST:PORT. Give runs/NAME, runs/last or HOST:PORT."
            )
        environment = self._locate()
        path = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="maniple-watch-")))
        self._mirror, self.folder = Mirror(environment, path), RunFolder(path)
        self.callback(self._mirror.close)
        try:  # reach the host once: a wrong address or token is an error now; later it may be away for a while
            self.refresh()
            if self._mirror.is_away:
                raise HostAway(
                    f"no host answers at {host}: {self._mirror.away}. Check the address, or give the run folder."
                )
        except BaseException:
            self.close()
            raise

    def refresh(self) -> None:
        """Fetch new rows of a run elsewhere."""
        if self._mirror is not None:
            self._mirror.refresh()

    @property
    def is_elsewhere(self) -> bool:
        """True if its folder is a mirror."""
        return self._mirror is not None

    @property
    def is_over(self) -> bool:
        """True once a host elsewhere has ended the run. The end of a run whose folder is here is in its rows."""
        return self._mirror is not None and self._mirror.is_over

    def find_host(self) -> HostStatus:
        """Whether the host is alive. Finding out may take some seconds."""
        if self._mirror is None:
            return find_host(self.folder.path)
        if self._mirror.is_over:
            return HostStatus("has ended the run", has_ended=True)
        if self._mirror.is_away:
            return HostStatus(f"does not answer: {self._mirror.away}")
        return HostStatus(f"is alive, listening on {self.name}", is_alive=True)

    def steering(self) -> "Steering":
        """Commands to its host; raises ManipleError if there is none to reach."""
        return Steering(self._locate())


class Mirror:
    """A copy of run.json and the rows of the run at `environment`, in `folder`.

    Attributes:
        away: why the host cannot be reached; "" while it can be.
        is_over: the run has ended and the copy is complete.
    """

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.folder = folder
        self.away = "not tried yet"
        self.is_over = False
        self._link = Link(Endpoint.of(environment), "watch", connect_s=_CONNECT_S, auth_s=_GREETING_S)
        self._written = 0  # modification time, over there, of the run.json here

    @property
    def is_away(self) -> bool:
        """True if the last attempt to reach the host failed."""
        return bool(self.away)

    def refresh(self, deadline_s: float = DEADLINE_S) -> None:
        """Fetch what is new, for at most `deadline_s`; the rest is left to the next call.

        A host that is away sets `away`, and a later call tries again. A wrong token raises NotAdmitted.
        """
        if self.is_over:
            return
        deadline = Deadline(deadline_s, slice_s=deadline_s)
        try:
            stream = self._link.stream()
            self._clear_other_run()
            reply, files = self._list_files(deadline)
            is_complete = self._fetch(stream, files, deadline)
            self.away, self.is_over = "", reply.is_over and is_complete
        except Stalled:
            self._give_up(f"no answer within {deadline_s:g} s")
        except OSError as error:
            self._give_up(str(error) or type(error).__name__)
        except ManipleError as error:
            self._give_up(str(error))
            raise
        if self.is_over:
            self._link.drop("the run has ended")

    def close(self) -> None:
        """Close the connection; the copy stays."""
        self._link.drop("the viewer has closed it")

    def _give_up(self, reason: str) -> None:
        self._link.drop(reason)
        self.away = reason

    def _clear_other_run(self) -> None:
        """Empty the folder if it holds another run."""
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        before = RunFolder(self.folder).read().get("lineage")
        if before is not None and before != self._link.lineage:
            for path in (self.folder / "events").glob("*.jsonl"):
                path.unlink()
            (self.folder / _RUN).unlink()
            self._written = 0

    def _list_files(self, deadline: Deadline) -> tuple[FileList, list[FileEntry]]:
        reply, data = self._link.request(
            ListFiles(), reply=FileList, max_reply_bytes=_MAX_LIST_BYTES, deadline=deadline
        )
        try:
            files = msgspec.json.decode(data, type=list[FileEntry])
        except msgspec.MsgspecError as error:
            raise BadFrame(f"the host sent a list of files that cannot be read: {error}.") from None
        for name, _, _ in files:
            if not WATCHED_FILE.fullmatch(name):  # it would become a path here
                raise BadFrame(f"the host lists {name!r}, which is not a file of a run.")
        return reply, files

    def _fetch(self, stream: Stream, files: list[FileEntry], deadline: Deadline) -> bool:
        """Fetch what is missing here; returns whether that was all."""
        for name, size, written in files:
            if name == _RUN and written != self._written:
                write_whole(self.folder / _RUN, self._read_whole(stream, name, size, deadline))
                self._written = written
        missing = [(name, size) for name, size, _ in files if name != _RUN]
        for name, size in missing:
            if self._local_size(name) > size:  # the copy cannot be its beginning
                (self.folder / name).unlink()
        while missing := [(name, size) for name, size in missing if self._local_size(name) < size]:
            # Of each writer the oldest file, since readers follow a file only once the one before it is complete.
            oldest = list({writer(name): name for name, _ in reversed(missing)}.values())
            for first in range(0, len(oldest), _PIPELINED):
                if deadline.is_over():
                    return False
                self._append(stream, oldest[first : first + _PIPELINED], deadline)
        return True

    def _append(self, stream: Stream, names: list[str], deadline: Deadline) -> None:
        """Append the next piece of each file; it may reach beyond the size in the list."""
        wanted = [(name, self._local_size(name)) for name in names]
        for name, piece in zip(names, self._read(stream, wanted, deadline), strict=True):
            if not piece:
                raise BadFrame(f"the host's {name} is shorter now than it was a moment ago.")
            with (self.folder / name).open("ab") as file:
                file.write(piece)

    def _local_size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def _read_whole(self, stream: Stream, name: str, size: int, deadline: Deadline) -> bytes:
        data = b""
        while len(data) < size and (piece := self._read(stream, [(name, len(data))], deadline)[0]):
            data += piece
        return data

    def _read(self, stream: Stream, wanted: list[tuple[str, int]], deadline: Deadline) -> list[bytes]:
        """One piece of each of these files, from the given offset on."""
        for name, offset in wanted:
            stream.send(ReadFile(name, offset))
        pieces: list[bytes] = []
        for _ in wanted:
            reply, size = stream.receive(deadline=deadline)
            check_reply(reply, FilePart)
            pieces.append(bytes(stream.receive_bytes(size, at_most=FILE_PART_BYTES, deadline=deadline)))
        return pieces


class Steering:
    """Commands to the host at `environment`, each over its own connection. Raises HostAway if it does not answer."""

    def __init__(self, environment: Environment, *, who: str | None = None) -> None:
        self._endpoint = Endpoint.of(environment)
        self._who = who or _user_at_node()

    def stop(self) -> str:
        """End the run as `maniple stop` does, without waiting for it; returns the host's reply."""
        return self._send("stop", TIMEOUT_S)

    def snapshot(self, timeout_s: float = SAVING_S) -> str:
        """Write a snapshot now; returns its name."""
        return self._send("snapshot", timeout_s)

    def change(self, settings: dict[str, Any]) -> str:
        """Change settings of the rule or the pace during training; returns the host's reply.

        Raises InvalidArgument if the workers' rule has no such setting or does not allow the value.
        """
        try:
            data = json.dumps(settings, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{settings} cannot be sent: {error}. Give finite numbers, strings, true, false or null."
            ) from None
        return self._send("change", TIMEOUT_S, data)

    def _send(self, command: str, timeout_s: float, data: bytes = b"") -> str:
        endpoint, address = self._endpoint, self._endpoint.current_address
        try:
            with closing(
                connect(address, timeout_s=_COMMAND_CONNECT_S, handshake_s=_COMMAND_CONNECT_S, tls=endpoint.tls)
            ) as stream:
                authenticate(stream, endpoint.token, "watch", endpoint.worker, timeout_s=_COMMAND_CONNECT_S)
                stream.set_timeout(timeout_s)
                stream.send(WatcherCommand(command, self._who), data)
                deadline = Deadline(timeout_s, slice_s=timeout_s)
                reply = check_reply(stream.receive_message(deadline=deadline), CommandDone)
        except ManipleError:
            raise
        except OSError as error:
            raise HostAway(
                f"the host at {address} did not answer the command {command!r}: {error}. It may be away or have ended: "
                "check with `maniple status RUN` and try again."
            ) from error
        return reply.text


def _user_at_node() -> str:
    """USER@NODE, for the record of who gave a command."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}"
