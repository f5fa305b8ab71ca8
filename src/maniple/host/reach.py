"""How to reach a host that is given by its address or by its run folder."""

import time
from pathlib import Path

from maniple.errors import InvalidArgument
from maniple.place import Place
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
