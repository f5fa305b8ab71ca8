"""The command `maniple`."""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

import click

import maniple
from maniple.cli.command import CommandGroups
from maniple.cli.control import change, status, stop, watch
from maniple.cli.doctor_command import doctor
from maniple.cli.reports import compare, export, plot, record
from maniple.cli.run_command import host, join, run, serve
from maniple.cli.submit import submit
from maniple.errors import ManipleError


@click.group(cls=CommandGroups, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(maniple.__version__, message="maniple %(version)s")
def cli() -> None:
    """Train one model with many workers that need not wait for each other.

    Add two lines to a training script, maniple.join and worker.share; let worker.sampler divide the data, and start
    the script on several workers:

    \b
      maniple run -n 4 train.py --lr 0.1        on this machine
      maniple run -n 2 --hosts a,b train.py     on other machines, by ssh
      maniple submit --slurm -n 8 train.py      in a batch queue
      maniple watch runs/last                   see workers, speed and loss live

    `maniple COMMAND --help` explains a command and shows examples.
    """


cli.headings = {
    "Run": ["run", "serve", "join", "submit"],
    "Watch and control": ["watch", "status", "change", "stop"],
    "Analyse": ["plot", "compare", "record", "export"],
    "Troubleshoot": ["doctor"],
}
for command in (change, compare, doctor, export, host, join, plot, record, run, serve, status, stop, submit, watch):
    cli.add_command(command)


def main() -> None:
    """Run the command."""
    exit_on_error(lambda: cli(prog_name="maniple"))


def exit_on_error(action: Callable[[], Any]) -> None:
    """Call `action`. An error of maniple's becomes one message on standard error and its exit code."""
    _open_streams()
    try:
        action()
    except ManipleError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}:
            raise
        where = error.filename or "a file, or standard output,"
        _print_error(f"{where} cannot be written: {error.strerror}. Make room, or choose another --runs.")
        sys.exit(3)
    finally:
        _flush_streams()


def _print_error(text: str) -> None:
    with suppress(OSError):  # standard error may be full or closed; the exit code remains
        click.echo(f"maniple: {text}", err=True)


def _open_streams() -> None:
    """Make sure that all standard streams are open and can print any text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file to be opened would get this number, and prints would go into it, be it a lock or the center.
            # A new descriptor gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed when Python started
            setattr(sys, name, open(number, "w", errors="replace", closefd=False))
        elif isinstance(stream, TextIOWrapper):  # print "?" for characters that its encoding lacks
            stream.reconfigure(errors="replace")


def _flush_streams() -> None:
    """Flush standard output and error. A failure here must not turn the exit code into Python's 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
