"""The command `maniple join`: one more worker for a host that runs already."""

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from maniple.errors import InvalidArgument
from maniple.place import Place, joining
from maniple.wire.address import Address


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A copy of the run's file `token`. Default: MANIPLE_TOKEN_FILE or MANIPLE_TOKEN of the environment.",
)
@click.option(
    "--certificate", type=click.Path(path_type=Path), metavar="FILE", help="The host's certificate, if it encrypts."
)
@click.option("--device", help="The device of this worker, e.g. cuda:0 (worker.device).")
@click.argument("host")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def join(
    *,
    host: str,
    script: Path,
    args: tuple[str, ...],
    token_file: Path | None,
    certificate: Path | None,
    device: str | None,
) -> None:
    """Join a running host with one more worker, from anywhere, at any time.

    HOST is HOST:PORT, or a run folder that can be seen from here, which also has the token.

    \b
      maniple join runs/last train.py --lr 0.1
      maniple join --token-file token node-07:29400 train.py --lr 0.1
    """
    if not script.is_file():
        raise InvalidArgument(f"there is no script {str(script)!r} in {Path.cwd()}. Check the path.")
    place = _reach(host, token_file, certificate).told(device=device)
    os.execve(sys.executable, [sys.executable, str(script), *args], joining(place))


def _reach(host: str, token_file: Path | None, certificate: Path | None) -> Place:
    """How to reach a host given by its address or by its run folder."""
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
