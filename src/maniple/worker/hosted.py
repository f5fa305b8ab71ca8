"""The host of guests: workers that torchrun, srun or mpirun has started find it, and worker 0 starts it before.

It is a process of its own, `maniple host`, and belongs to the launcher: it outlives worker 0 where all workers are
started again. They find it by the run folder, whose name is the same for all of them.
"""

import os
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

from maniple.center.locks import Patience
from maniple.center.segment import is_guarded
from maniple.errors import HostAway, InvalidArgument, ManipleError, WaitedTooLong, WorkerFailed, say
from maniple.place import JOIN_DEADLINE_S, Place, settle
from maniple.place.launch import Launch, as_guest, find_launch, is_elastic
from maniple.record import Folder
from maniple.wire.messages import Joined
from maniple.wire.posted import FILE, Posted
from maniple.worker import runs
from maniple.worker.control import Control

_SAVING_S = 600.0  # for a host that was told to end: a large center takes its time to be written
_LAST_LINES = 20
_LONGEST_LOOK_S = 1.0
_PART_S = 1.0  # of the time to join, after which one looks whether the host is alive


def find_host(place: Place) -> Place:
    """The place of a guest in the run that worker 0 hosts."""
    launch = find_launch(place)
    folder = _host_here(place, launch) if place.rank == 0 else _await_host(place, launch)
    return settle(_seen_from(place, folder))


def left_of_many(place: Place) -> Place:
    """The place of a worker whom an elastic launcher has started alone: in the run of its launch, if there is one."""
    guest = as_guest(place)
    return find_host(guest) if runs.of_launch(find_launch(guest)) else place


def joined(control: Control, place: Place) -> Joined:
    """What the host tells a guest of its machine that joins. WorkerFailed if it has ended meanwhile."""
    assert place.run is not None and place.segment is not None
    patience = Patience(JOIN_DEADLINE_S, slice_s=10 * _PART_S)
    while True:
        try:
            return control.join(_PART_S)
        except HostAway as error:
            if is_guarded(place.segment) and not patience.is_over():
                continue
            raise WorkerFailed(f"the host of {place.run} cannot be used: {error}. {_last_words(place.run)}") from None


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
    while not poll.poll(runs.LOOK_S * 1000):
        if deadline is None and (has_failed or is_told()):
            if is_elastic():
                break
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(host, signal.SIGTERM)
            deadline = time.monotonic() + _SAVING_S
        if deadline is not None and time.monotonic() > deadline:
            break
    os.close(host)


def _host_here(place: Place, launch: Launch) -> Path:
    """The run folder of the host that serves this launch: there is one already, or it is started now."""
    is_again = bool(runs.before(place, launch))
    folder = runs.begun(launch) if is_again else runs.living(launch)
    if folder is None or (is_again and not runs.answers(folder)):
        folder = _start(place, launch)
    again = f" (restart {place.restarts})" if place.restarts else ""
    say(
        f"{place.launcher} has started {place.world} workers{again}; worker 0 hosts them, run folder "
        f"{os.path.relpath(folder)}"
    )
    return folder


def _start(place: Place, launch: Launch) -> Path:
    try:
        tie = os.pidfd_open(launch.process)
    except ProcessLookupError:
        raise WorkerFailed(
            f"{place.launcher}, process {launch.process}, has ended, and this worker was not told to. Start it again."
        ) from None
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
    folder = runs.living(launch, is_here=True)
    assert folder is not None
    return folder


_started: list["subprocess.Popen[bytes]"] = []  # who is not asked about any more: it may live longer than this process


def _await_start(process: "subprocess.Popen[bytes]", launch: Launch, said: IO[bytes]) -> None:
    patience = Patience(JOIN_DEADLINE_S)
    while runs.living(launch, is_here=True) is None:
        exit_code = process.poll()
        if exit_code is None and not patience.is_over():
            time.sleep(runs.LOOK_S)
            continue
        how = (
            f"has not begun within {JOIN_DEADLINE_S:g} s" if exit_code is None else f"ended with exit code {exit_code}"
        )
        process.kill()
        process.wait()
        said.seek(0)
        words = said.read()
        _note_failure(launch, words)
        raise WorkerFailed(
            f"the host that worker 0 has started for all workers {how}. Run folders are made in {launch.runs} "
            f"(MANIPLE_RUNS). {_last(words)}"
        )


def _note_failure(launch: Launch, words: bytes) -> None:
    """Let the other workers know, who wait: the run has ended before it began."""
    if launch.resume is None:
        with suppress(ManipleError, OSError):
            folder = Folder.create(launch.runs, runs.fresh(launch))
            folder.log("host").write_bytes(words)
            folder.describe(started=launch.started, ended=time.time(), exit_code=WorkerFailed.exit_code)


def _last_words(run: Path) -> str:
    log = Folder(run).log("host")
    return _last(log.read_bytes() if log.exists() else b"")


def _last(said: bytes) -> str:
    words = said.decode(errors="replace")
    return "It said:\n" + "\n".join(f"    {line}" for line in words.splitlines()[-_LAST_LINES:])


def _words(place: Place, launch: Launch) -> list[str]:
    """How the host is to begin: anew, or going on with a run."""
    run = launch.resume
    # Their predecessors' host was killed or cut off, or has ended because all seemed to be done.
    run = next(filter(runs.has_center, reversed(runs.before(place, launch))), run)
    begin = ["--runs", str(launch.runs), "--name", runs.fresh(launch)] if run is None else ["--resume", str(run)]
    where = "127.0.0.1:0" if place.local_world == place.world else "0.0.0.0:0"
    return [*begin, place.launcher, str(place.world), where]


def _await_host(place: Place, launch: Launch) -> Path:
    patience, pause_s = Patience(place.host_deadline_s, slice_s=2 * _LONGEST_LOOK_S), runs.LOOK_S
    while (folder := runs.living(launch)) is None:
        _mind_end(place, launch)
        if patience.is_over():
            where = launch.resume or launch.runs / launch.name
            raise WaitedTooLong(
                f"worker {place.rank} of {place.world} has waited {place.host_deadline_s:g} s for the host that worker "
                f"0 starts: there is none in {where}. Look at what worker 0 has printed. All workers must see that "
                "folder: on several machines it must lie on a file system that they share (MANIPLE_RUNS); else start "
                "`maniple serve`, and set MANIPLE_ADDRESS for all workers. If worker 0 calls maniple.join() later, "
                "raise MANIPLE_HOST_DEADLINE; rules of the circle need no host: MANIPLE_CENTER=none."
            )
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_LOOK_S)  # many may look at one file system
    return folder


def _mind_end(place: Place, launch: Launch) -> None:
    """Raise WorkerFailed if the host of this launch has ended already; where all are started again may be another."""
    newest = next(reversed(runs.folders(launch)), None)
    if newest is None or is_elastic() or launch.resume is not None:
        return
    about = Folder(newest).read()
    if isinstance(about.get("ended"), float) and about["ended"] > launch.started:
        raise WorkerFailed(
            f"the host of {newest} has ended with exit code {about.get('exit_code')}, before worker {place.rank} came. "
            f"{_last_words(newest)}"
        )


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
        host_file=path / FILE,
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
