"""How to reach a host that is given by its address or by its run folder."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from maniple.center.link import Door, Link
from maniple.center.locks import read_own
from maniple.center.segment import check_own, is_guarded, segment_path
from maniple.errors import HostAway, InvalidArgument
from maniple.place import Place, find, shared_memory
from maniple.record import Folder
from maniple.wire.address import Address
from maniple.wire.posted import FILE, Posted


def reach(host: str, token_file: Path | None, certificate: Path | None, wait_s: float = 0.0) -> Place:
    """The place of one who wants to join it; the token is left open if neither a file nor a run folder tells it.

    In the folder of a run that was submitted to a queue, a host that has not begun yet is waited for.
    """
    folder = Path(host)
    try:
        token = None if token_file is None else token_file.read_text().strip()
        if not folder.is_dir():
            return Place(address=str(Address.parse(host)), token=token, certificate=certificate)
        posted = _await_posted(folder, wait_s)
        token = token or (folder / "token").read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename} cannot be read: {error.strerror}. Give HOST:PORT, or the folder of a run that listens."
        ) from None
    certificate = certificate or (Path(posted.certificate) if posted.certificate else None)
    return Place(address=str(posted.nearest), token=token, certificate=certificate, host_file=(folder / FILE).resolve())


def reach_to_watch(host: str, token_file: Path | None = None, certificate: Path | None = None) -> Place:
    """The place of one who wants to watch a run or to steer it, also one of this machine that listens to no other."""
    folder = Path(host)
    if folder.is_dir():
        about = Folder(folder).read()
        segment = segment_path(shared_memory(), str(about.get("lineage")))
        with suppress(FileNotFoundError):  # it has no memory here, or has ended just now
            if about.get("exit_code") is None:
                check_own(segment)
            posted = Posted.read(segment / FILE)
            if posted is not None and is_guarded(segment):
                token = read_own(segment / "token").decode().strip()
                return Place(address=str(posted.nearest), token=token, host_file=segment / FILE)
        _mind_absence(folder, about)
    return with_token(reach(host, token_file, certificate))


def with_token(place: Place) -> Place:
    """A place with the token and the certificate of the environment, where no others were given."""
    told = find(address=place.address)
    return place.told(token=place.token or told.token, certificate=place.certificate or told.certificate)


def check_token(place: Place) -> None:
    """Raise the error that a worker would meet: no token, or one that the host refuses. One that is away is let be."""
    link = Link(Door.of(place), "watch")
    with suppress(HostAway):  # the worker waits for it
        link.stream()
    link.drop()


def _mind_absence(folder: Path, about: dict[str, Any]) -> None:
    """Raise InvalidArgument if the run in `folder` has no host that could be reached from here."""
    if not about:
        raise InvalidArgument(f"{folder} is no run folder: it has no run.json. Give runs/NAME, runs/last or HOST:PORT.")
    if about.get("exit_code") is not None:
        raise InvalidArgument(
            f"the run {folder} has ended with exit code {about['exit_code']}: nobody is there any more. Give one that "
            "goes on, or begin it again with --resume."
        )
    if about.get("asked", {}).get("center") == "mpi":
        raise InvalidArgument(
            f"the run {folder} has no host: its workers hold the center together (MANIPLE_CENTER=mpi), and nobody "
            "takes orders. Change settings in the script, or unset MANIPLE_CENTER, so that worker 0 is the host."
        )
    if not (folder / FILE).exists() and not Folder(folder).is_submitted:
        raise InvalidArgument(
            f"the host of {folder} cannot be reached from here: it is or was on {about.get('node')}, and listens to no "
            "other machine. Call this there, as the same user, or start runs with --listen."
        )


def _await_posted(folder: Path, wait_s: float) -> Posted:
    path, deadline = folder / FILE, time.monotonic() + wait_s
    while (posted := Posted.read(path)) is None:
        if not Folder(folder).is_submitted:
            path.read_bytes()  # tells why it cannot be read
            raise InvalidArgument(f"{path} is not what a host posts. Give HOST:PORT, or the folder of a run.")
        if time.monotonic() >= deadline:
            raise InvalidArgument(
                f"the host of {folder} has not begun (waited {wait_s:g} s). Look at `maniple status {folder}`, or wait "
                "longer with --wait."
            )
        time.sleep(0.2)
    return posted
