"""Checks of a run folder: its host, its token, disk space, and workers that were lost."""

import os
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from maniple.clock import clock
from maniple.doctor.checks import Case, Checks, Finding, fine, grave, warning
from maniple.environment import shared_memory
from maniple.errors import InvalidArgument
from maniple.memory.segment import check_owner, has_live_host, segment_path
from maniple.record import Row, RunFolder
from maniple.record.events import parse_events, parts
from maniple.record.rows import MAX_ROW_BYTES
from maniple.text import count
from maniple.wire.address import HOST_FILE, HostFile

checks = Checks("run")
_LATELY_S = 3600.0
_LEAST_BYTES = 100_000_000
_BLOCK = 1 << 24


@checks("run folder")
def check_folder(case: Case) -> Iterable[Finding]:
    """What run.json and host.json tell."""
    folder = _folder(case)
    described = folder.read()
    if folder.is_submitted and not described.get("lineage"):
        fix = f"`maniple status {case.host}` tells how far it is."
        yield warning(f"the host of {folder.path} has not begun", limit="it waits in a queue", fix=fix)
        return
    if not described.get("lineage"):
        fix = "Name runs/NAME or runs/last."
        yield grave(f"{folder.path} has no run.json with a lineage", limit="a run folder has one", fix=fix)
        return
    script = described.get("asked", {}).get("script") or "a host alone"
    yield fine(f"{folder.path.name}: {script}, lineage {described['lineage']}")
    if _posted(folder) is None:
        yield fine("it has no host.json: workers elsewhere cannot join; `maniple run --listen ADDRESS` lets them")


@checks("host process")
def check_host_process(case: Case) -> Iterable[Finding]:
    """Whether the host lives: by the lock on its memory where it is of this machine, else by its address."""
    folder = _folder(case)
    described, posted = folder.read(), _posted(folder)
    if not described.get("lineage"):
        return
    resume = f"`maniple run --resume {case.host} SCRIPT` resumes it."
    if posted is not None:
        resume = f"`maniple serve --resume {case.host}` resumes it, at the same address and with the same token."
    if described.get("ended"):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(described["ended"]))
        how = described.get("end") or f"exit code {described.get('exit_code')}"
        yield grave(f"the run ended at {when}", limit=how, fix=resume)
        return
    node = posted.node if posted else described.get("node")
    memory = _memory(described["lineage"], posted)
    if node != os.uname().nodename:
        yield fine(f"its host is on {node}: only its address can tell whether it lives")
    elif wrong := _not_own(memory):
        yield grave(wrong, limit="its owner can change all values", fix="Do not resume this run as this user.")
    elif memory.exists() and has_live_host(memory):
        yield fine(f"its host is alive, process {posted.pid}" if posted else "its host is alive")
    else:
        who = f"its host, process {posted.pid}, is dead" if posted else "its host is dead"
        if not posted:
            resume += " If it lives with another MANIPLE_SHM than this shell's, set that here."
        yield grave(who, limit="run.json has no end of the run: it was killed", fix=resume)


@checks("token file")
def check_token_file(case: Case) -> Iterable[Finding]:
    """The token's file: there, and readable by its owner alone."""
    folder = _folder(case)
    path = folder.path / "token"
    if _posted(folder) is None:
        return
    try:
        state = path.stat()
        is_empty = not path.read_text().strip()
    except OSError as error:
        fix = "Let its owner copy it for you; if it is gone, end the host, and `maniple serve --resume` makes one."
        yield grave(f"{path} cannot be read: {error.strerror}", limit="workers need the token", fix=fix)
        return
    mode = stat.S_IMODE(state.st_mode)
    if is_empty:
        fix = "Take it from the host's other copies, or remove the file and restart the host."
        yield grave(f"{path} is empty", limit="a token has 64 digits", fix=fix)
    elif mode & 0o077:
        fix = f"`chmod 600 {path}`; if others may have read it, remove it and restart the host, which creates another."
        yield warning(
            f"{path} has mode {mode:04o}", limit="anyone who can read it may join; the mode should be 0600", fix=fix
        )
    else:
        yield fine("the token can be read by its owner alone")


@checks("models")
def check_models(case: Case) -> Iterable[Finding]:
    """The tables of parameters that the workers have shared, by their digests."""
    shared: dict[str, tuple[Row, list[int]]] = {}
    for rank, row in case.once("shared", _shared):
        shared.setdefault(str(row.get("digest")), (row, []))[1].append(rank)
    for digest, (row, ranks) in shared.items():
        size = f"{row.get('parameters', 0):,} parameters, {row.get('bytes', 0) / 1e6:,.2f} MB"
        who = f"{count(len(set(ranks)), 'worker')}, first worker {ranks[0]}"
        yield fine(f"{who}, shared digest {digest[:16]}, {size}")


@checks("room")
def check_disk_space(case: Case) -> Iterable[Finding]:
    """Room on the disk for the next snapshots."""
    folder = _folder(case)
    model = max((row.get("bytes", 0) for _, row in case.once("shared", _shared)), default=0)
    need = max(_LEAST_BYTES, 2 * model)  # one is written beside those that are kept
    free = shutil.disk_usage(folder.path).free
    seen = f"{folder.path} has {free / 1e6:,.0f} MB free"
    if free < need:
        fix = "Make room: training continues without snapshots, and loses more if the host dies."
        yield warning(seen, limit=f"the next snapshot and events need {need / 1e6:,.0f} MB", fix=fix)
    else:
        yield fine(seen)


@checks("losses")
def check_losses(case: Case) -> Iterable[Finding]:
    """Workers that were lost or failed lately."""
    folder = _folder(case)
    lost = [(row.get("worker", 0), row) for row in _events(folder.events("server"), "lost") if _is_recent(row)]
    failed = [(rank, row) for rank, row in _rows(folder, "failed") if _is_recent(row)]
    for rank, row in [*lost, *failed][-5:]:
        why = row.get("reason") or row.get("error") or "no reason is known"
        what = "was lost" if row["event"] == "lost" else "failed"
        fix = f"Its last lines, if it was started here: {folder.log(rank)}. Limits of memory and time kill silently."
        yield warning(f"worker {rank} {what} at {row.get('datestamp')}: {why}", limit="within the last hour", fix=fix)
    if not lost and not failed:
        yield fine("no worker was lost within the last hour")


def can_be_visited(run: Path) -> bool:
    """Its address and token can be read; where not, the checks of the folder tell why."""
    return (run / HOST_FILE).is_file() and os.access(run / "token", os.R_OK)


def _folder(case: Case) -> RunFolder:
    assert case.run is not None
    return RunFolder(case.run.resolve())


def _posted(folder: RunFolder) -> HostFile | None:
    return HostFile.read(folder.path / HOST_FILE)


def _memory(lineage: str, posted: HostFile | None) -> Path:
    """The run's memory, where its host says, or where it would be made from here."""
    return Path(posted.segment) if posted and posted.segment else segment_path(shared_memory(), lineage)


def _not_own(memory: Path) -> str:
    try:
        check_owner(memory)
    except InvalidArgument as error:
        return str(error)
    except OSError:
        pass
    return ""


def _shared(case: Case) -> list[tuple[int, Row]]:
    return _rows(_folder(case), "share")


def _rows(folder: RunFolder, event: str) -> list[tuple[int, Row]]:
    return [(rank, row) for rank in folder.ranks() for row in _events(folder.events(rank), event)]


def _events(path: Path, event: str) -> list[Row]:
    """The rows of one kind. A long run has gigabytes of others, which are neither kept nor even split into lines."""
    lines: list[bytes] = []
    for part in parts(path):
        with suppress(FileNotFoundError), part.open("rb") as file:
            while block := file.read(_BLOCK) + file.readline(MAX_ROW_BYTES):
                lines += _lines_with(f'"event":"{event}"'.encode(), block)
    return [row for row in parse_events(lines) if row["event"] == event]


def _lines_with(mark: bytes, block: bytes) -> Iterable[bytes]:
    at = block.find(mark)
    while at >= 0:
        begin, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
        yield block[begin : end if end >= 0 else None]
        at = block.find(mark, at + 1)


def _is_recent(row: Row) -> bool:
    return clock.time() - row["timestamp"] < _LATELY_S
