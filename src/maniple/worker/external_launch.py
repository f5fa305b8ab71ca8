"""External workers, which torchrun, srun or mpirun has started: worker 0 starts a host for them, the others find it.

The host is a separate process, `maniple host`, tied to the launcher: it outlives worker 0 where the launcher restarts
all workers. They find it by the run folder, whose name is the same for all workers of a launch.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from maniple.clock import Deadline, clock
from maniple.connection.find_host import wait_for_answer
from maniple.environment import JOIN_DEADLINE_S, Environment, override_environment
from maniple.environment.other_launchers import Launch, as_external, find_launch, is_elastic
from maniple.errors import HostAway, InvalidArgument, ManipleError, WaitedTooLong, WorkerFailed, say
from maniple.memory.segment import has_live_host, is_owned
from maniple.record import RunFolder
from maniple.wire.address import HOST_FILE, HostFile
from maniple.wire.messages import JoinReply
from maniple.worker.heartbeat_sender import HeartbeatSender

_SAVE_TIMEOUT_S = 600.0  # for a host that was asked to end: writing a large center to a slow disk takes minutes
_REACH_TIMEOUT_S = 5.0  # a machine that does not accept a connection within it is gone
_LOG_LINES = 20  # of the host's log, in an error message
_POLL_S, _MAX_POLL_S = 0.05, 1.0  # many workers may look at one shared file system
_JOIN_SLICE_S = 1.0  # of the time to join, after which the worker checks whether the host is alive
_started: list["subprocess.Popen[bytes]"] = []  # hosts; never waited for, since one may outlive this process


def join_launch(environment: Environment) -> Environment:
    """The environment of an external worker in the run that worker 0 hosts."""
    launch = find_launch(environment)
    folder = _host(environment, launch) if environment.rank == 0 else _await_host(environment, launch)
    return override_environment(_with_host(environment, folder))


def join_launch_if_any(environment: Environment) -> Environment:
    """The environment of a worker that an elastic launcher has started alone: in the run of its launch, if any."""
    external = as_external(environment)
    return join_launch(external) if _runs_since_start(find_launch(external)) else environment


def join_host(heartbeats: HeartbeatSender, environment: Environment) -> JoinReply:
    """The host's join reply to an external worker on its machine. Raises WorkerFailed if the host has ended."""
    assert environment.run is not None and environment.segment is not None
    deadline = Deadline(JOIN_DEADLINE_S, slice_s=10 * _JOIN_SLICE_S)
    while True:
        try:
            return heartbeats.join(_JOIN_SLICE_S)
        except HostAway as error:
            if has_live_host(environment.segment) and not deadline.is_over():
                continue
            raise WorkerFailed(
                f"the host of {environment.run} cannot be used: {error}. {_log_tail(environment.run)}"
            ) from None


def await_host_end(environment: Environment, *, has_failed: bool, is_signalled: Callable[[], bool]) -> None:
    """Worker 0 has finished: wait until its host has saved the center and ended.

    The launcher may kill the host when the last worker has ended, so worker 0 stays while others train. If it has
    failed, or a signal asks it to exit, the host ends too, except where the launcher restarts all workers.
    """
    if (host := _process(environment)) is None:
        return
    poll = select.poll()
    poll.register(host, select.POLLIN)
    deadline = None
    while not poll.poll(_POLL_S * 1000):
        if deadline is None and (has_failed or is_signalled()):
            if is_elastic():
                break
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(host, signal.SIGTERM)
            deadline = clock.monotonic() + _SAVE_TIMEOUT_S
        if deadline is not None and clock.monotonic() > deadline:
            break
    os.close(host)


def has_center(folder: Path) -> bool:
    """The run can be continued: there is a snapshot, or its shared memory still exists."""
    host = HostFile.read(folder / HOST_FILE)
    memory = Path(host.segment) if host is not None and host.is_here else None
    is_in_memory = memory is not None and is_owned(memory) and (memory / "members").exists()
    return is_in_memory or any(folder.glob("center/snapshot-*"))


def _host(environment: Environment, launch: Launch) -> Path:
    """The run folder of the host that serves this launch; the host is started if there is none."""
    if _earlier_runs(environment, launch):
        folder = _await_starting(launch)
        if folder is not None and not wait_for_answer(folder, _REACH_TIMEOUT_S):
            folder = None  # it was on a machine that is lost, which leaves no trace in the folder
    else:
        folder = _served_run(launch)
    folder = folder or _start(environment, launch)
    again = f" (restart {environment.restarts})" if environment.restarts else ""
    say(
        f"{environment.launcher} has started {environment.world} workers{again}; worker 0 hosts them, run folder "
        f"{os.path.relpath(folder)}"
    )
    return folder


def _start(environment: Environment, launch: Launch) -> Path:
    try:
        tie = os.pidfd_open(launch.process)
    except ProcessLookupError:
        raise WorkerFailed(
            f"{environment.launcher}, process {launch.process}, has ended without ending this worker. Start it again."
        ) from None
    command = [sys.executable, "-m", "maniple.cli", "host", *_host_arguments(environment, launch), str(tie), *sys.argv]
    with tempfile.TemporaryFile() as output:  # until there is a run folder
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[tie], start_new_session=True
            )
        finally:
            os.close(tie)
        folder = _await_start(process, launch, output)
    _started.append(process)
    return folder


def _await_start(process: "subprocess.Popen[bytes]", launch: Launch, output: IO[bytes]) -> Path:
    """The run folder of the new host. If it fails, the other workers, which wait for it, find the folder of a failed
    run."""
    deadline = Deadline(JOIN_DEADLINE_S)
    while (folder := _served_run(launch, is_here=True)) is None:
        exit_code = process.poll()
        if exit_code is None and not deadline.is_over():
            clock.sleep(_POLL_S)
            continue
        how = (
            f"has not begun within {JOIN_DEADLINE_S:g} s" if exit_code is None else f"ended with exit code {exit_code}"
        )
        process.kill()
        process.wait()
        output.seek(0)
        text = output.read()
        if launch.resume is None:
            with suppress(ManipleError, OSError):
                failed = RunFolder.create(launch.runs, _new_name(launch))
                failed.log("host").write_bytes(text)
                failed.describe(started=launch.started, ended=clock.time(), exit_code=WorkerFailed.exit_code)
        raise WorkerFailed(
            f"the host that worker 0 has started for all workers {how}. Run folders are made in {launch.runs} "
            f"(MANIPLE_RUNS). {_tail(text)}"
        )
    return folder


def _host_arguments(environment: Environment, launch: Launch) -> list[str]:
    """The arguments of `maniple host`: for a new run, or to continue one."""
    run = launch.resume
    # The previous host of this launch was killed or cut off, or has ended because all workers seemed to be done.
    run = next(filter(has_center, reversed(_earlier_runs(environment, launch))), run)
    begin = ["--runs", str(launch.runs), "--name", _new_name(launch)] if run is None else ["--resume", str(run)]
    where = "127.0.0.1:0" if environment.local_world == environment.world else "0.0.0.0:0"
    return [*begin, environment.launcher, str(environment.world), where]


def _await_host(environment: Environment, launch: Launch) -> Path:
    deadline, pause_s = Deadline(environment.host_deadline_s, slice_s=2 * _MAX_POLL_S), _POLL_S
    while (folder := _served_run(launch)) is None:
        _check_host_ended(environment, launch)
        if deadline.is_over():
            where = launch.resume or launch.runs / launch.name
            raise WaitedTooLong(
                f"worker {environment.rank} of {environment.world} has waited {environment.host_deadline_s:g} s for "
                "the host that worker 0 starts: "
                f"there is none in {where}. Look at what worker 0 has printed. All workers must see that "
                "folder: on several machines it must lie on a file system that they share (MANIPLE_RUNS); else start "
                "`maniple serve`, and set MANIPLE_ADDRESS for all workers. If worker 0 calls maniple.join() later, "
                "raise MANIPLE_HOST_DEADLINE; synchronous rules need no host: MANIPLE_CENTER=none."
            )
        clock.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _MAX_POLL_S)
    return folder


def _check_host_ended(environment: Environment, launch: Launch) -> None:
    """Raise WorkerFailed if the host of this launch has ended, unless the launcher may restart all workers."""
    newest = next(reversed(_folders(launch)), None)
    if newest is None or is_elastic() or launch.resume is not None:
        return
    about = RunFolder(newest).read()
    if isinstance(about.get("ended"), float) and about["ended"] > launch.started:
        raise WorkerFailed(
            f"the host of {newest} has ended with exit code {about.get('exit_code')}, before worker "
            f"{environment.rank} joined. {_log_tail(newest)}"
        )


def _with_host(environment: Environment, path: Path) -> Environment:
    """The environment of a worker of the host in the run folder `path`, on this machine or another."""
    try:
        host = msgspec.json.decode((path / HOST_FILE).read_bytes(), type=HostFile)
        token = (path / "token").read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename} cannot be read: {error.strerror}. All workers must run as the same user."
        ) from None
    return environment.replace(
        run=path,
        segment=Path(host.segment),
        address=str(host.nearest),
        token=token,
        certificate=Path(host.certificate) if host.certificate else None,
        host_file=path / HOST_FILE,
    )


def _process(environment: Environment) -> int | None:
    """A pidfd of the host's process; None if it has ended."""
    assert environment.run is not None and environment.segment is not None
    if (host := HostFile.read(environment.run / HOST_FILE)) is None:
        return None
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(host.pid)
        if has_live_host(environment.segment):  # else another process may have its pid by now
            return descriptor
        os.close(descriptor)
    return None


def _log_tail(run: Path) -> str:
    log = RunFolder(run).log("host")
    return _tail(log.read_bytes() if log.exists() else b"")


def _tail(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()[-_LOG_LINES:]
    return "It said:\n" + "\n".join(f"    {line}" for line in lines)


def _await_starting(launch: Launch) -> Path | None:
    """The run whose host the previous worker 0 has started, once that has begun to serve; None if there is none."""
    deadline = Deadline(JOIN_DEADLINE_S)
    while (folder := _served_run(launch)) is None:
        newest = next(reversed(_folders(launch)), None)
        is_starting = (
            newest is not None and not (newest / HOST_FILE).exists() and not RunFolder(newest).read().get("ended")
        )
        if not is_starting or deadline.is_over():
            return None
        clock.sleep(_POLL_S)
    return folder


def _served_run(launch: Launch, *, is_here: bool = False) -> Path | None:
    """The run folder whose host serves this launch, with `is_here` on this machine; None if there is none yet."""
    candidates = _folders(launch) if launch.resume is None else [launch.resume]
    for path in reversed(candidates):
        host = HostFile.read(path / HOST_FILE)
        is_over = RunFolder(path).read().get("ended") is not None
        if host is None or is_over or not host.segment:
            continue
        if has_live_host(Path(host.segment)) if host.is_here else not is_here:
            return path.resolve()
    return None


def _earlier_runs(environment: Environment, launch: Launch) -> list[Path]:
    """The runs that this launch may have begun, from the oldest to the newest, if its workers were restarted.

    torchrun counts restarts after a failure, but not those because machines have joined or left.
    """
    if environment.restarts:
        return _folders(launch)
    return _runs_since_start(launch) if is_elastic() else []


def _runs_since_start(launch: Launch) -> list[Path]:
    """The runs that have begun since the launcher has, so they belong to no other launch."""
    return [run for run in _folders(launch) if RunFolder(run).read().get("started", 0.0) > launch.started]


def _folders(launch: Launch) -> list[Path]:
    """The run folders with the launch's name, from the oldest to the newest."""
    pattern = re.compile(re.escape(launch.name) + r"(?:\.(\d+))?")
    names = [path.name for path in launch.runs.iterdir()] if launch.runs.is_dir() else []
    found = {int(match[1] or 1): launch.runs / match[0] for name in names if (match := pattern.fullmatch(name))}
    return [found[number] for number in sorted(found)]


def _new_name(launch: Launch) -> str:
    """The launch's name, or `name.2` and so on if earlier launches had the same."""
    count = len(_folders(launch))
    return launch.name if count == 0 else f"{launch.name}.{count + 1}"
