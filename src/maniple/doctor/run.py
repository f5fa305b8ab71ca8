"""A run folder: is its host alive, can its token be used, has it room, and what became of its workers?"""

import os
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from maniple.center.segment import is_guarded, segment_path
from maniple.doctor.case import Case
from maniple.doctor.finding import Finding, fine, grave, warning
from maniple.place import shared_memory
from maniple.record import Folder, Row, Tail
from maniple.record.events import parse_events

_LATELY_S = 3600.0
_LEAST_BYTES = 100_000_000


def look_at_folder(case: Case) -> Iterable[Finding]:
    """What run.json and host.json tell."""
    folder = _folder(case)
    described = folder.read()
    if not described.get("lineage"):
        fix = "Name runs/NAME or runs/last."
        yield grave(f"{folder.path} has no run.json with a lineage", limit="a run folder has one", fix=fix)
        return
    if _listens(folder) is None:
        fix = "Add --listen ADDRESS to `maniple run`, or start `maniple serve`."
        yield warning(f"{folder.path} has no host.json", limit="nobody elsewhere can join this run", fix=fix)
    script = described.get("asked", {}).get("script") or "a host alone"
    yield fine(f"{folder.path.name}: {script}, lineage {described['lineage']}")


def look_at_life(case: Case) -> Iterable[Finding]:
    """Whether the host lives: by the lock on its memory where it is of this machine, else by its address."""
    folder = _folder(case)
    described, known = folder.read(), _listens(folder)
    if not described.get("lineage"):
        return
    resume = f"`maniple serve --resume {case.host}` goes on with it, at the same address and with the same token."
    if described.get("ended"):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(described["ended"]))
        yield grave(f"the run ended at {when}", limit=f"exit code {described.get('exit_code')}", fix=resume)
        return
    node = (known or described).get("node")
    if node != os.uname().nodename:
        yield fine(f"its host is on {node}: only its address can tell whether it lives")
    elif _is_alive(described["lineage"], known):
        yield fine(f"its host is alive, process {known['pid']}" if known else "its host is alive")
    else:
        who = f"its host, process {known['pid']}, is dead" if known else "its host is dead"
        yield grave(who, limit="run.json tells of no end: it was killed", fix=resume)


def look_at_secret(case: Case) -> Iterable[Finding]:
    """The token's file: there, and readable by its owner alone."""
    folder = _folder(case)
    path = folder.path / "token"
    if _listens(folder) is None:
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
        fix = "Take it from the host's other copies, or remove the file and start the host anew."
        yield grave(f"{path} is empty", limit="a token has 64 digits", fix=fix)
    elif mode & 0o077:
        fix = f"`chmod 600 {path}`; if others may have read it, remove it and start the host anew, with a fresh one."
        yield warning(f"{path} has mode {mode:04o}", limit="whoever reads it may join; 0600 is its own", fix=fix)
    else:
        yield fine("the token can be read by its owner alone")


def look_at_models(case: Case) -> Iterable[Finding]:
    """The tables of parameters that the workers have shared, by their digests."""
    shared: dict[str, tuple[Row, list[int]]] = {}
    for rank, row in _rows(_folder(case), "share"):
        shared.setdefault(str(row.get("digest")), (row, []))[1].append(rank)
    for digest, (row, ranks) in shared.items():
        size = f"{row.get('parameters', 0):,} parameters, {row.get('bytes', 0) / 1e6:,.2f} MB"
        yield fine(f"worker {min(ranks)} and {len(set(ranks)) - 1} others shared digest {digest[:16]}, {size}")


def look_at_room(case: Case) -> Iterable[Finding]:
    """Room on the disk for the next snapshots."""
    folder = _folder(case)
    model = max((row.get("bytes", 0) for _, row in _rows(folder, "share")), default=0)
    need = max(_LEAST_BYTES, 2 * model)  # one is written beside those that are kept
    free = shutil.disk_usage(folder.path).free
    seen = f"{folder.path} has {free / 1e6:,.0f} MB free"
    if free < need:
        fix = "Make room: training goes on without snapshots, and loses more if the host dies."
        yield warning(seen, limit=f"the next snapshot and events need {need / 1e6:,.0f} MB", fix=fix)
    else:
        yield fine(seen)


def look_at_losses(case: Case) -> Iterable[Finding]:
    """Workers that were lost or failed lately."""
    folder = _folder(case)
    lost = [(row["worker"], row) for row in _events(folder.events("server"), "lost") if _is_recent(row)]
    failed = [(rank, row) for rank, row in _rows(folder, "failed") if _is_recent(row)]
    for rank, row in [*lost, *failed][-5:]:
        why = row.get("reason") or row.get("error") or "no reason is known"
        what = "was lost" if row["event"] == "lost" else "failed"
        fix = f"Its last lines, if it was started here: {folder.log(rank)}. Limits of memory and time kill silently."
        yield warning(f"worker {rank} {what} at {row['datestamp']}: {why}", limit="within the last hour", fix=fix)
    if not lost and not failed:
        yield fine("no worker was lost within the last hour")


def can_be_visited(run: Path) -> bool:
    """Its address and token can be read; where not, the checks of the folder tell why."""
    return (run / "host.json").is_file() and os.access(run / "token", os.R_OK)


def _folder(case: Case) -> Folder:
    assert case.run is not None
    return Folder(case.run.resolve())


def _listens(folder: Folder) -> dict[str, Any] | None:
    """What host.json says; None if there is none."""
    try:
        return msgspec.json.decode((folder.path / "host.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _is_alive(lineage: str, known: dict[str, Any] | None) -> bool:
    """By the lock that a host holds; where its memory is not to be seen (MANIPLE_SHM was another), by its process."""
    path = segment_path(shared_memory(), lineage)
    if path.exists() or known is None:
        return path.exists() and is_guarded(path)
    return Path(f"/proc/{known['pid']}").exists()


def _rows(folder: Folder, event: str) -> list[tuple[int, Row]]:
    return [(rank, row) for rank in folder.ranks() for row in _events(folder.events(rank), event)]


def _events(path: Path, event: str) -> list[Row]:
    """The rows of one kind; the many others, of exchanges, are not even decoded."""
    lines = [line for line in Tail(path).close() if event.encode() in line]
    return [row for row in parse_events(lines) if row["event"] == event]


def _is_recent(row: Row) -> bool:
    return time.time() - row["timestamp"] < _LATELY_S
