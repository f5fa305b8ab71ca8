"""The command `maniple host`: the host of workers that another launcher has started. Their worker 0 calls it."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from maniple.cli.job import job_from
from maniple.cli.settings import loss_settings, settings
from maniple.launch import run_local
from maniple.launch.guests import Guests
from maniple.place.launch import asked_pace
from maniple.session import Configured


@click.command("host", cls=Configured, hidden=True, context_settings={"allow_interspersed_args": False})
@click.option("--listen", metavar="ADDRESS", help="Where to listen instead of at WHERE.")
@loss_settings
@settings
@click.argument("launcher")
@click.argument("workers", type=int)
@click.argument("where")
@click.argument("tie", type=int)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def host(
    *, launcher: str, workers: int, where: str, tie: int, program: tuple[str, ...], listen: str | None, **options: Any
) -> None:
    """Be the host of WORKERS workers that LAUNCHER has started, until they have left or it has ended.

    It is started by worker 0 where torchrun, srun or mpirun runs a script; TIE is a descriptor of the launcher's
    process, WHERE the address to listen on, and PROGRAM what the workers run.
    """
    with suppress(OSError):  # launchers bind worker 0 to its cores, and these are not the host's
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    job = job_from(listen=listen or where, **options)
    guests = Guests(launcher, workers, tie, program)
    sys.exit(run_local(replace(job, pace=job.pace or asked_pace(), guests=guests)))
