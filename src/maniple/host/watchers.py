"""Connections that do not train: `maniple watch`, `change` and `stop` from elsewhere, and `maniple doctor`."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any

import msgspec

from maniple.errors import BadFrame, InvalidArgument
from maniple.host.controller_requests import ControllerRequests
from maniple.host.snapshots import open_centers, save
from maniple.live_settings import check_changes
from maniple.memory.segment import Segment
from maniple.record import Events, RunFolder
from maniple.record.events import parse_events
from maniple.record.folder import versions
from maniple.text import read_end
from maniple.wire.auth import AUTH_TIMEOUT_S
from maniple.wire.frames import Stream
from maniple.wire.messages import (
    FILE_PART_BYTES,
    WATCHED_FILE,
    CommandDone,
    DoctorReply,
    DoctorRequest,
    Echo,
    FileList,
    FilePart,
    LineTest,
    ListFiles,
    ReadFile,
    WatcherCommand,
)

MAX_ECHO_BYTES = 8 << 20  # enough to measure the bandwidth of a fast network
_RANDOM = os.urandom(1 << 16)  # repeated: longer than the window of the compression of ssh and of most tunnels
_LAST_ROWS_BYTES = 1 << 18  # of a worker's rows: minutes of training
_WATCHER_TIMEOUT_S = 60.0  # an idle watcher reconnects when it needs the host again
_MAX_COMMAND_BYTES = 1 << 16
_MAX_NAME = 100  # characters of a name or a person in messages and events


class WatcherService:
    """Shows the run folder to watchers and carries out their commands."""

    def __init__(self, segment: Segment, folder: RunFolder, events: Events, requests: ControllerRequests) -> None:
        self._segment, self._folder, self._events, self._requests = segment, folder, events, requests

    def serve(self, stream: Stream, is_over: Callable[[], bool]) -> None:
        """Answer a watcher until it closes the connection. An error ends the connection."""
        stream.set_timeout(_WATCHER_TIMEOUT_S)
        while True:
            message, size = stream.receive()
            data = stream.receive_bytes(size, at_most=_MAX_COMMAND_BYTES)
            if isinstance(message, ListFiles):
                stream.send(FileList(is_over()), msgspec.json.encode(self._files()))
            elif isinstance(message, ReadFile):
                stream.send(FilePart(), self._read(message.name, message.offset))
            elif isinstance(message, WatcherCommand):
                stream.send(CommandDone(self._execute(message, data)))
            else:
                raise BadFrame(f"{type(message).__name__} is no message of a watcher.")

    def _files(self) -> list[tuple[str, int, int]]:
        files: list[tuple[str, int, int]] = []
        for path in [self._folder.path / "run.json", *sorted((self._folder.path / "events").glob("*.jsonl"))]:
            name = str(path.relative_to(self._folder.path))
            if WATCHED_FILE.fullmatch(name) and path.is_file() and not path.is_symlink():
                stat = path.stat()
                files.append((name, stat.st_size, stat.st_mtime_ns))
        return files

    def _read(self, name: str, offset: int) -> bytes:
        if not WATCHED_FILE.fullmatch(name) or not 0 <= offset < 1 << 62:
            raise InvalidArgument(f"{name[:_MAX_NAME]!r} is not shown. Ask for run.json or events/*.jsonl.")
        try:
            file = os.open(self._folder.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgument(f"{name!r} cannot be shown: {error.strerror}. Ask which files there are.") from None
        try:
            return os.pread(file, FILE_PART_BYTES, offset)
        finally:
            os.close(file)

    def _execute(self, command: WatcherCommand, data: bytearray) -> str:
        who = command.who[:_MAX_NAME]
        if command.what == "stop":
            self._folder.stop()
            self._events.write("ordered", order="stop", asked_by=who)
            return "the host is notified: it ends the workers, and saves the center when they have left"
        if command.what == "snapshot":
            return self._snapshot(who)
        if command.what == "change":
            return self._change(who, data)
        raise BadFrame(f"{command.what[:_MAX_NAME]!r} is no command of a watcher.")

    def _snapshot(self, who: str) -> str:
        begin = time.perf_counter()
        try:
            path = save(self._segment, self._folder)
        except (OSError, TypeError, ValueError) as error:
            self._events.write("unsaved", error=str(error), asked_by=who)
            raise InvalidArgument(f"no snapshot could be written: {error}. Training continues.") from error
        if path is None:
            raise InvalidArgument(
                "there is nothing to save: no worker shares a model yet. Ask again when training has begun."
            )
        self._events.write("snapshot", name=path.name, duration=time.perf_counter() - begin, asked_by=who)
        return path.name

    def _change(self, who: str, data: bytearray) -> str:
        try:
            settings = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"a command came with what is no JSON: {error}.") from None
        check_changes(settings, [center.note for center in open_centers(self._segment)])
        changes = self._requests.change(settings)
        self._events.write("changed", number=changes.number, settings=settings, asked_by=who)
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"change {changes.number}, {text}: the workers ({self._segment.live}) follow after their next heartbeat"


def incompressible(size: int) -> bytes:
    """Bytes that no tunnel sends faster than others."""
    return (_RANDOM * (size // len(_RANDOM) + 1))[:size]


def serve_doctor(stream: Stream, segment: Segment, folder: RunFolder) -> None:
    """Answer `maniple doctor` until it closes the connection or is silent for too long."""
    stream.set_timeout(AUTH_TIMEOUT_S)
    while True:
        message, size = stream.receive()
        data = stream.receive_bytes(size, at_most=MAX_ECHO_BYTES)
        if isinstance(message, DoctorRequest):
            about = {"versions": versions(), "centers": _describe_centers(segment), "step_s": _step_s(folder)}
            stream.send(DoctorReply(time.time(), platform.node(), segment.live), msgspec.json.encode(about))
        elif isinstance(message, Echo):
            stream.send(message, data)
        elif isinstance(message, LineTest):
            if not 0 <= message.reply_bytes <= MAX_ECHO_BYTES:
                raise BadFrame(f"{message.reply_bytes} bytes are asked for, where 0 to {MAX_ECHO_BYTES} may be.")
            stream.send(LineTest(), incompressible(message.reply_bytes))
        else:
            raise BadFrame(f"{type(message).__name__} is no message of a doctor.")


def _describe_centers(segment: Segment) -> list[dict[str, Any]]:
    return [
        {
            "name": center.name,
            "digest": center.layout.digest,
            "parameters": len(center.layout.entries),
            "bytes": center.layout.size_bytes,
        }
        for center in open_centers(segment)
    ]


def _step_s(folder: RunFolder) -> float | None:
    """The median over the workers of the seconds of a step, exchanges left out; None before there are any."""
    found: list[float] = []
    for path in (folder.path / "events").glob("worker-*.jsonl"):
        end = read_end(path, _LAST_ROWS_BYTES)
        lines = end.split(b"\n")[len(end) == _LAST_ROWS_BYTES :]  # the first one may be cut
        rows = [row for row in parse_events(lines) if row["event"] == "progress"]
        with suppress(KeyError, TypeError, IndexError):  # rows that maniple did not write
            first, last = rows[0], rows[-1]
            steps = last["step"] - first["step"]
            spent_s = sum(last.get(name, 0.0) - first.get(name, 0.0) for name in ("exchange", "others"))
            if steps > 0 and (seconds := last["elapsed"] - first["elapsed"] - spent_s) > 0:
                found.append(seconds / steps)
    return median(found) if found else None
