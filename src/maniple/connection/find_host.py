"""Finding the host of a run, from its run folder or its address, and whether it is alive."""

import json
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maniple.clock import Deadline
from maniple.connection.link import Endpoint, Link
from maniple.environment import Environment, read_environment, shared_memory
from maniple.errors import HostAway, InvalidArgument
from maniple.memory.segment import check_owner, has_live_host, segment_path
from maniple.memory.shm import read_owned
from maniple.record import RunFolder
from maniple.record.folder import SUBMITTED
from maniple.text import short
from maniple.wire.address import HOST_FILE, Address, HostFile

_ANSWER_S = 3.0  # to connect; a killed host on another machine may also seem alive for a moment
_POLL_S = 0.1


@dataclass(frozen=True)
class HostStatus:
    """What is known of a host. `description` continues a sentence that begins with "the host"."""

    description: str
    is_alive: bool = False
    has_ended: bool = False  # regularly, after it saved the center
    is_dead: bool = False  # certainly, since it was on this machine
    is_assumed: bool = False  # `is_alive` is a guess: it is on another machine and listens to no one else


def find_host(run: Path) -> HostStatus:
    """Determine whether the host of the run in folder `run` is alive, and where."""
    about = _read_run(run)
    if about.get("exit_code") is not None:
        return HostStatus(f"has ended with exit code {about['exit_code']}", has_ended=True)
    host, lineage, node = HostFile.read(run / HOST_FILE), about.get("lineage"), about.get("node")
    if lineage is None:
        return HostStatus("has not started yet")
    is_here = (host.node if host else node) == os.uname().nodename
    segment = segment_path(shared_memory(), str(lineage))
    try:
        with suppress(FileNotFoundError):
            check_owner(segment)
    except InvalidArgument as error:
        if host is None:  # else its address decides
            return HostStatus(f"cannot be looked for: {error}")
    # The lock on its memory also shows a host that has stopped listening and is saving the center.
    is_alive = is_here and has_live_host(segment)
    if host is not None:
        where = f"on {host.node} (pid {host.pid}), listening on {host.address}"
        is_alive = is_alive or host.answers(_ANSWER_S)
    else:
        where = f"on {node}, and accepts no connections from other machines"
    is_assumed = not is_alive and host is None and not is_here and not about.get("ended")  # its rows will show
    if is_alive or is_assumed:
        verdict = "cannot be checked from here: it is" if is_assumed else "is alive"
        return HostStatus(f"{verdict} {where}", is_alive=True, is_assumed=is_assumed)
    if about.get("ended"):
        return HostStatus("is away: the center is saved, and `--resume` continues with it", has_ended=True)
    description = f"{'is dead' if is_here else 'does not answer'}: it was {where}"
    return HostStatus(f"{description}. To continue: {resume_command(run)}", is_dead=is_here)


def resume_command(run: Path) -> str:
    """The command that continues a run, as its folder describes it."""
    folder = RunFolder(run)
    settings: dict[str, Any] = folder.read().get("asked") or {}
    if (launcher := settings.get("launcher", "maniple")) != "maniple":
        return f"MANIPLE_RESUME={short(run)} in the environment of {launcher}"
    script, model = settings.get("script"), settings.get("model")
    if not script and not model:
        return f"maniple serve --resume {short(run)}"
    queue = "ray" if settings.get("ray") else None
    if folder.is_submitted:
        try:
            queue = json.loads((run / SUBMITTED).read_bytes()).get("queue", "slurm")
        except (OSError, ValueError, AttributeError):
            queue = "QUEUE"  # the file is damaged: the user knows the queue
    if queue is None:
        return f"maniple run --resume {short(run)}"
    program = f"--model {model}" if model else shlex.join([str(script), *settings.get("args", ())])
    return f"maniple submit --{queue} -n {settings.get('workers')} --resume {short(run)} {program}"


def check_no_live_host(run: Path) -> None:
    """Raise InvalidArgument if the host of a run is alive on another machine. (On this one, its memory is locked.)"""
    deadline = Deadline(_ANSWER_S)
    while (host := HostFile.read(run / HOST_FILE)) is not None and not host.is_here and host.answers(_ANSWER_S):
        if deadline.is_over():
            raise InvalidArgument(
                f"the run {run} is active: its host answers on {host.address}, and a second one would make a second "
                "center. Stop it first with `maniple stop`. If another program answers there, remove "
                f"{run / HOST_FILE}."
            )
        time.sleep(_POLL_S)


def wait_for_answer(run: Path, timeout_s: float, *, connect_s: float = 1.0) -> bool:
    """Whether the host of a run on another machine answers within `timeout_s`. True without one.

    A machine may fail without a trace in the run folder.
    """
    deadline = Deadline(timeout_s, slice_s=connect_s + _POLL_S)
    while (host := HostFile.read(run / HOST_FILE)) is not None and not host.is_here:
        if host.answers(connect_s):
            return True
        if deadline.is_over():
            return False
        time.sleep(_POLL_S)
    return True


def locate_host(host: str, token_file: Path | None, certificate: Path | None, wait_s: float = 0.0) -> Environment:
    """The environment of a worker that joins `host`: HOST:PORT, or the folder of a run that listens.

    The token stays None if neither a file nor a run folder provides it. The host of a submitted run that has not
    started yet is waited for.
    """
    folder = Path(host)
    try:
        token = None if token_file is None else token_file.read_text().strip()
        if not folder.is_dir():
            return Environment(address=str(Address.parse(host)), token=token, certificate=certificate)
        found = _wait_for_host_file(folder, wait_s)
        token = token or (folder / "token").read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename} cannot be read: {error.strerror}. Give HOST:PORT, or the folder of a run that listens."
        ) from None
    certificate = certificate or (Path(found.certificate) if found.certificate else None)
    host_file = (folder / HOST_FILE).resolve()
    return Environment(address=str(found.nearest), token=token, certificate=certificate, host_file=host_file)


def locate_to_watch(host: str, token_file: Path | None = None, certificate: Path | None = None) -> Environment:
    """The environment of a process that watches or steers a run, including a local one that does not listen."""
    folder = Path(host)
    if folder.is_dir():
        about = RunFolder(folder).read()
        segment = segment_path(shared_memory(), str(about.get("lineage")))
        with suppress(FileNotFoundError):  # no memory on this machine, or removed just now
            if about.get("exit_code") is None:
                check_owner(segment)
            found = HostFile.read(segment / HOST_FILE)
            if found is not None and has_live_host(segment):
                token = read_owned(segment / "token").decode().strip()
                return Environment(address=str(found.nearest), token=token, host_file=segment / HOST_FILE)
        _check_reachable(folder)
    return with_token(locate_host(host, token_file, certificate))


def with_token(environment: Environment) -> Environment:
    """Fill in a missing token and certificate from the environment variables."""
    variables = read_environment(address=environment.address)
    return environment.replace(
        token=environment.token or variables.token, certificate=environment.certificate or variables.certificate
    )


def check_token(environment: Environment) -> None:
    """Raise what a worker would raise on joining: no token, or one that the host refuses. A host may be away."""
    link = Link(Endpoint.of(environment), "watch")
    with suppress(HostAway):  # a worker waits for it
        link.stream()
    link.drop()


def _read_run(folder: Path) -> dict[str, Any]:
    about = RunFolder(folder).read()
    if not about:
        raise InvalidArgument(f"{folder} is no run folder: it has no run.json. Give runs/NAME, runs/last or HOST:PORT.")
    return about


def _check_reachable(folder: Path) -> None:
    """Raise InvalidArgument if the run in `folder` has no host that can be reached from here."""
    about = _read_run(folder)
    if about.get("exit_code") is not None:
        raise InvalidArgument(
            f"the run {folder} has ended with exit code {about['exit_code']}, and has no host any more. Give an "
            "active run, or continue this one with --resume."
        )
    if not (folder / HOST_FILE).exists() and not RunFolder(folder).is_submitted:
        raise InvalidArgument(
            f"the host of {folder} cannot be reached from here: it is or was on {about.get('node')}, and accepts no "
            "connections from other machines. Run this command there, as the same user, or start runs with --listen."
        )


def _wait_for_host_file(folder: Path, wait_s: float) -> HostFile:
    path, deadline = folder / HOST_FILE, Deadline(wait_s)
    while (host := HostFile.read(path)) is None:
        if not RunFolder(folder).is_submitted:
            path.read_bytes()  # raises OSError with the reason, if it cannot be read at all
            raise InvalidArgument(f"{path} is not the file of a host. Give HOST:PORT, or the folder of a run.")
        if deadline.is_over():
            raise InvalidArgument(
                f"the host of {folder} has not started within {wait_s:g} s. See `maniple status {folder}`, or wait "
                "longer with --wait."
            )
        time.sleep(_POLL_S)
    return host
