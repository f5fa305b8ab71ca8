"""The command `maniple join`: one more worker for a host that runs already."""

import os
import sys
from pathlib import Path

import click

from maniple.errors import InvalidArgument
from maniple.host.reach import check_token, reach, with_token
from maniple.place import JOIN_DEADLINE_S, joining, queue_task


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
@click.option(
    "--task",
    is_flag=True,
    help="Be a task of a job array of Slurm: its number is the rank. `maniple submit --slurm` writes that.",
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=JOIN_DEADLINE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a host that is away, or has not begun in its run folder.",
)
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
    task: bool,
    wait_s: float,
) -> None:
    """Join a running host with one more worker, from anywhere, at any time.

    HOST is HOST:PORT, or a run folder that can be seen from here, which also has the token; a host that is started
    again elsewhere is found there too. SCRIPT may be `-m MODULE`, as for Python.

    \b
      maniple join runs/last train.py --lr 0.1
      maniple join --token-file token node-07:29400 train.py --lr 0.1
    """
    if str(script) != "-m" and not script.is_file():
        raise InvalidArgument(f"there is no script {str(script)!r} in {Path.cwd()}. Check the path.")
    place = reach(host, token_file, certificate, wait_s).told(device=device, join_deadline_s=wait_s)
    if task:
        rank, world, restarts = queue_task()
        place = place.told(rank=rank, world=world, restarts=restarts, is_queued=True)
    check_token(with_token(place))
    os.execve(sys.executable, [sys.executable, str(script), *args], joining(place))
