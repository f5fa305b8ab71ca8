"""How to reach a host that is given by its address or by its run folder."""

import os
from pathlib import Path
from typing import Any

import msgspec

from maniple.errors import InvalidArgument
from maniple.place import Place
from maniple.wire.address import Address


def reach(host: str, token_file: Path | None, certificate: Path | None) -> Place:
    """The place of one who wants to join it; the token is left open if neither a file nor a run folder tells it."""
    folder = Path(host)
    try:
        token = None if token_file is None else token_file.read_text().strip()
        if not folder.is_dir():
            return Place(address=str(Address.parse(host)), token=token, certificate=certificate)
        known: dict[str, Any] = msgspec.json.decode((folder / "host.json").read_bytes())
        token = token or (folder / "token").read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename} cannot be read: {error.strerror}. Give HOST:PORT, or the folder of a run that listens."
        ) from None
    is_here = known["node"] == os.uname().nodename and known["unix"] and Path(known["unix"][5:]).exists()
    certificate = certificate or (Path(known["certificate"]) if known["certificate"] else None)
    return Place(address=known["unix"] if is_here else known["address"], token=token, certificate=certificate)
