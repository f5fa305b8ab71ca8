"""The command `maniple`."""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import click

import maniple
from maniple.cli.change import change
from maniple.cli.compare import compare
from maniple.cli.doctor import check_devices, doctor, warn_early
from maniple.cli.export import export
from maniple.cli.host import host
from maniple.cli.job import job_from
from maniple.cli.join import join
from maniple.cli.plot import plot
from maniple.cli.record import record
from maniple.cli.settings import loss_settings, model_settings, restarts, settings, web_settings
from maniple.cli.status import status
from maniple.cli.stop import stop
from maniple.cli.submit import submit
from maniple.cli.watch import watch
from maniple.errors import ManipleError
from maniple.launch import Job, run_local
from maniple.place import CIRCLE_DEADLINE_S, CIRCLES
from maniple.session import Configured

# Options of maniple whose names many training scripts use as well: they are no sign of a mistake there.
_OFTEN_OF_SCRIPTS = {"seed", "name", "resume", "max_epochs", "max_batches", "model", "wire", "quiet", "keep", "every"}
_SCRIPT: dict[str, Any] = {"ignore_unknown_options": False, "allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(maniple.__version__, message="maniple %(version)s")
def cli() -> None:
    """Many workers, one model: speed up one training experiment by data parallelism.

    Add two lines to a training script (maniple.join and worker.share), let worker.sampler divide its data, and start
    it on several workers:

    \b
      maniple run -n 4 train.py --lr 0.1              on this machine
      maniple serve --listen 0.0.0.0:29400            a host alone, for workers of other machines
      maniple join HOST:29400 train.py --lr 0.1       one more worker, from anywhere, at any time
      maniple submit --slurm -n 8 train.py            workers as a job array of Slurm
      maniple watch runs/last                         who works, who waits, whether it pays
      maniple change runs/last alpha=0.3              other settings for a run that goes on
      maniple plot runs/one runs/two                  runs drawn on one clock; compare: as a table
      maniple export runs/last --to tensorboard       its rows for other programs
      maniple record runs/last                        where the time of a --model went
      maniple doctor                                  what would keep a run from working, and what to do
    """


@cli.command(cls=Configured, context_settings=_SCRIPT)
@click.option("-n", "--workers", type=int, help="Workers to start. Default: one per device, else 1.")
@click.option(
    "--devices",
    metavar="LIST",
    default="",
    help="A device for each worker, e.g. cuda:0,cuda:1 (worker.device).",
)
@click.option(
    "--hosts",
    metavar="LIST",
    default="",
    help="Start the workers on these machines, -n on each, by ssh; implies --listen 0.0.0.0:0.",
)
@restarts("Start a dead worker again, up to K times each.")
@loss_settings
@click.option("--listen", metavar="ADDRESS", help="Let workers elsewhere join: 0.0.0.0:29400, or a free port with :0.")
@click.option(
    "--feed",
    "feeds",
    multiple=True,
    metavar="SCRIPT",
    help="Start a producer of batches for worker.feed(); with arguments in quotes: 'produce.py --size 8'. Repeatable.",
)
@click.option("--producers", type=int, default=1, show_default=True, metavar="K", help="Copies of each --feed script.")
@click.option(
    "--circle",
    type=click.Choice(CIRCLES),
    help="What carries the rounds in which all workers meet. Default: shared on one machine, torch for --hosts.",
)
@click.option(
    "--circle-deadline",
    "circle_deadline_s",
    type=float,
    default=CIRCLE_DEADLINE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long a worker waits for the others in a round before it fails and names them.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Two runs make the same to the bit: fixed shares of the samples, seeds, torch's deterministic algorithms.",
)
@click.option("--bind/--no-bind", default=True, show_default=True, help="Give each worker cores of its own.")
@web_settings
@model_settings
@settings
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> None:
    """Run SCRIPT, or the loop for a --model, on several workers, of this machine or of --hosts.

    What follows SCRIPT is its own: {rank} and {world} in it become each worker's numbers. The run folder
    (runs/NAME) gets the events, the logs of each worker and the shared parameters.

    \b
      maniple run -n 2 train.py
      maniple run -n 4 --rule bsp train.py
      maniple run -n 4 --rule downpour --every 1 train.py --lr 0.05
      maniple run -n 2 --devices cuda:0,cuda:1 --maximum-rate 0.1 train.py
      maniple run -n 8 --restarts 3 train.py --shard data/part-{rank}.npz
      maniple run --resume runs/last                        as it was begun, where it was
      maniple run -n 4 --listen 0.0.0.0:29400 --tls train.py
      maniple run -n 2 --hosts node-1,node-2 train.py       2 workers on each, by ssh
      maniple run -n 4 --feed produce.py --producers 2 train.py
      maniple run -n 2 --model models/net.py:Net --rule easgd
      maniple run -n 4 --web train.py                       with a page for a browser
      maniple run session.yaml                              script, arguments and options from a file

    Each option is also a key of session files, of ./.maniple.yaml and ~/.config/maniple.yaml (maximum_rate: 0.1),
    and a variable (MANIPLE_MAXIMUM_RATE=0.1). The command line counts most, then variables, then files in this order.

    Exit codes: 0 done, 1 a worker or producer failed, 2 bad arguments, 3 the system refused, 4 other, 130 interrupted.
    """
    _hint_at_misplaced(options.get("script"), options.get("args", ()), click.get_current_context().command)
    _start(job_from(**options))


@cli.command(cls=Configured)
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1:0",
    show_default=True,
    help="Where to listen; port 0 is a free one. 0.0.0.0 lets other machines in.",
)
@click.option(
    "--from", "arrays", type=click.Path(path_type=Path), metavar="FILE", help="Begin with the arrays of a file."
)
@web_settings
@settings
@click.argument("session", required=False)
def serve(**options: Any) -> None:
    """Be a host alone: keep a center for workers that come and go, until Ctrl-C or SIGTERM.

    SESSION is a file with settings, as for `maniple run`; its script and workers are not for a host alone.

    The address is printed and written to host.json in the run folder, beside the token that workers need. If the
    host is killed, --resume goes on where it was: workers train on meanwhile, find it again, and nothing is lost.

    \b
      maniple serve                                         for workers of this machine
      maniple serve --listen 0.0.0.0:29400 --tls            for all
      maniple serve --resume runs/last                      after the host was killed
      maniple serve --from arrays.h5                        named arrays for maniple.Client
    """
    _start(job_from(**options))


def _hint_at_misplaced(script: str | None, args: tuple[str, ...], command: click.Command) -> None:
    """Say so if the arguments of a script hold options of maniple, which then went to the script."""
    known = {word for option in command.params if option.name not in _OFTEN_OF_SCRIPTS for word in option.opts}
    words = [arg.partition("=")[0] for arg in args]
    if found := [word for word in words if word.startswith("-") and word in known]:
        click.echo(
            f"maniple: {', '.join(found)} stands after the script, so it is an argument of the script and not of "
            "maniple, whose options come before it: "
            f"maniple {command.name} {found[0]} ... {script or 'SCRIPT'}",
            err=True,
        )


def _start(job: Job) -> NoReturn:
    job.check()
    check_devices(job)
    warn_early(job)
    sys.exit(run_local(job))


cli.add_command(change)
cli.add_command(compare)
cli.add_command(doctor)
cli.add_command(export)
cli.add_command(host)
cli.add_command(join)
cli.add_command(plot)
cli.add_command(record)
cli.add_command(submit)
cli.add_command(status)
cli.add_command(stop)
cli.add_command(watch)


def main() -> None:
    """Run the command."""
    told(lambda: cli(prog_name="maniple"))


def told(act: Callable[[], Any]) -> None:
    """Do something; every error of ours is one message and its exit code."""
    _open_streams()
    try:
        act()
    except ManipleError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}:
            raise
        where = error.filename or "a file, or the standard output,"
        _complain(f"{where} cannot be written: {error.strerror}. Make room, or choose another --runs.")
        sys.exit(3)
    finally:
        _flush_streams()


def _complain(text: str) -> None:
    with suppress(OSError):  # the exit code tells it even if standard error is full or gone
        click.echo(f"maniple: {text}", err=True)


def _open_streams() -> None:
    """Make sure that all three standard streams are open, and that any text can be printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file to be opened would get this number, and what prints would write into it, be it a lock or
            # the center. The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            setattr(sys, name, open(number, "w", errors="replace", closefd=False))
        elif isinstance(stream, TextIOWrapper):  # one "?" for each character that its encoding lacks
            stream.reconfigure(errors="replace")


def _flush_streams() -> None:
    """Write what is left. What cannot be written must not turn the exit code into Python's 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
