"""The host of guests: workers that torchrun, srun or mpirun has started find it, and worker 0 starts it before.

It is a process of its own, `maniple host`, and belongs to the launcher: it outlives worker 0 where all workers are
started again. They find it by the run folder, whose name is the same for all of them.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from maniple.center.segment import is_guarded
from maniple.errors import InvalidArgument, WaitedTooLong, WorkerFailed
from maniple.place import Place, settle
from maniple.place.launch import Launch, find_launch, is_elastic
from maniple.record import Folder
from maniple.wire.posted import FILE, Posted
from maniple.worker.seat import JOIN_S

_LOOK_S = 0.05
_SAVING_S = 600.0  # for a host that was told to end: a large center takes its time to be written
_LAST_LINES = 20


def find_host(place: Place) -> Place:
    """The place of a guest in the run that worker 0 hosts."""
    launch = find_launch(place)
    folder = _host_here(place, launch) if place.rank == 0 else _await_host(place, launch)
    return settle(_seen_from(place, folder))


def await_end(place: Place, *, has_failed: bool, is_told: Callable[[], bool]) -> None:
    """Worker 0 has come to its end: wait until its host has saved the center and ended.

    The launcher may kill what is left when the last worker has ended, so this one stays while others train. If it has
    failed, or is told to end, the host ends too; but not where the launcher starts all workers again.
    """
    if (host := _process(place)) is None:
        return
    poll = select.poll()
    poll.register(host, select.POLLIN)
    deadline = None
    while not poll.poll(_LOOK_S * 1000):
        if deadline is None and (has_failed or is_told()):
            if is_elastic():
                break
            signal.pidfd_send_signal(host, signal.SIGTERM)
            deadline = time.monotonic() + _SAVING_S
        if deadline is not None and time.monotonic() > deadline:
            break
    os.close(host)


def _host_here(place: Place, launch: Launch) -> Path:
    """The run folder of the host that serves this launch: there is one already, or it is started now."""
    if (folder := _living(launch)) is None:
        folder = _start(place, launch)
    shown = os.path.relpath(folder)
    again = f", for the {place.restarts + 1}. time" if place.restarts else ""
    print(
        f"maniple: {place.launcher} has started {place.world} workers{again}; worker 0 hosts them, run folder {shown}",
        file=sys.stderr,
        flush=True,
    )
    return folder


def _start(place: Place, launch: Launch) -> Path:
    tie = os.pidfd_open(launch.process)
    with tempfile.TemporaryFile() as said:  # until it has a folder
        command = [sys.executable, "-m", "maniple.cli", "host", *_words(place, launch), str(tie), *sys.argv]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[tie], start_new_session=True
            )
        finally:
            os.close(tie)
        _await_start(process, launch, said)
    _started.append(process)
    folder = _living(launch)
    assert folder is not None
    return folder


_started: list["subprocess.Popen[bytes]"] = []  # who is not asked about any more: it may live longer than this process


def _await_start(process: "subprocess.Popen[bytes]", launch: Launch, said: IO[bytes]) -> None:
    deadline = time.monotonic() + JOIN_S
    while _living(launch) is None:
        exit_code = process.poll()
        if exit_code is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            continue
        how = f"has not begun within {JOIN_S:g} s" if exit_code is None else f"ended with exit code {exit_code}"
        process.kill()
        process.wait()
        said.seek(0)
        words = said.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise WorkerFailed(
            f"the host that worker 0 has started for all workers {how}. Run folders are made in {launch.runs} "
            "(MANIPLE_RUNS). It said:\n" + "\n".join(f"    {line}" for line in words)
        )


def _words(place: Place, launch: Launch) -> list[str]:
    """How the host is to begin: anew, or going on with a run."""
    run = launch.resume
    if place.restarts:  # its predecessor was killed, or has ended because all seemed to be done
        run = next((folder for folder in reversed(_folders(launch)) if any(folder.glob("center/snapshot-*"))), run)
    if run is not None:
        begin = ["--resume", str(run)]
    else:
        begin = ["--runs", str(launch.runs), "--name", _fresh(launch)]
    where = "127.0.0.1:0" if place.local_world == place.world else "0.0.0.0:0"
    return [*begin, place.launcher, str(place.world), where]


def _fresh(launch: Launch) -> str:
    """The launch's name, or `name.2` and so on if runs of earlier launches had the same."""
    count = len(_folders(launch))
    return launch.name if count == 0 else f"{launch.name}.{count + 1}"


def _folders(launch: Launch) -> list[Path]:
    """The folders of all runs of that name, from the oldest to the newest."""
    pattern = re.compile(re.escape(launch.name) + r"(?:\.(\d+))?")
    names = [path.name for path in launch.runs.iterdir()] if launch.runs.is_dir() else []
    found = {int(match[1] or 1): launch.runs / match[0] for name in names if (match := pattern.fullmatch(name))}
    return [found[number] for number in sorted(found)]


def _living(launch: Launch) -> Path | None:
    """The folder of the run whose host serves this launch; None if there is no such host yet."""
    candidates = _folders(launch) if launch.resume is None else [launch.resume]
    for path in reversed(candidates):
        host = Posted.read(path / FILE)
        if host is not None and Folder(path).read().get("ended") is None:
            if not host.is_here or is_guarded(Path(host.segment)):
                return path.resolve()
    return None


def _await_host(place: Place, launch: Launch) -> Path:
    deadline = time.monotonic() + place.host_deadline_s
    while (folder := _living(launch)) is None:
        if time.monotonic() > deadline:
            where = launch.resume or launch.runs / launch.name
            raise WaitedTooLong(
                f"worker {place.rank} of {place.world} has not found the host that worker 0 starts, within "
                f"{place.host_deadline_s:g} s: there is none in {where}. Look at what worker 0 has printed. All workers "
                "must see that folder: on several machines it must lie on a file system that they share (MANIPLE_RUNS); "
                "else start `maniple serve`, and tell all workers its MANIPLE_ADDRESS. Raise MANIPLE_HOST_DEADLINE if "
                "worker 0 calls maniple.join() later."
            )
        time.sleep(_LOOK_S)
    return folder


def _seen_from(place: Place, path: Path) -> Place:
    """How a worker reaches the host of the run folder `path`: by its memory, or over the network."""
    try:
        host = msgspec.json.decode((path / FILE).read_bytes(), type=Posted)
        token = (path / "token").read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename} cannot be read: {error.strerror}. All workers must run as the same user."
        ) from None
    return place.told(
        run=path,
        segment=Path(host.segment),
        address=str(host.nearest),
        token=token,
        certificate=Path(host.certificate) if host.certificate else None,
    )


def _process(place: Place) -> int | None:
    """The host's process, as a descriptor; None if it has ended."""
    assert place.run is not None and place.segment is not None
    if (host := Posted.read(place.run / FILE)) is None:
        return None
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(host.pid)
        if is_guarded(place.segment):  # else another process may have that number by now
            return descriptor
        os.close(descriptor)
    return None
