"""The command `maniple`."""

import sys
from pathlib import Path
from typing import Any

import click

import maniple
from maniple.errors import ManipleError
from maniple.launch import Job, run_local
from maniple.pace import Every, RateLimit
from maniple.place import DEFAULT_SEED
from maniple.rules import RULES, parse_rule


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(maniple.__version__, message="maniple %(version)s")
def cli() -> None:
    """Many workers, one model: speed up one training experiment by data parallelism.

    Add two lines to a training script (maniple.join and worker.share), then start it on several workers:

      maniple run -n 4 train.py --lr 0.1
    """


@cli.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-n", "--workers", type=int, help="Workers to start. Default: one per device, else 1.")
@click.option(
    "--rule",
    metavar="RULE",
    help=f"What an exchange does: {', '.join(RULES)}; with settings: easgd:alpha=0.5.",
)
@click.option("--every", type=int, metavar="STEPS", help="Exchange every so many steps.")
@click.option("--maximum-rate", type=float, metavar="SHARE", help="Spend at most this share of wall time in exchanges.")
@click.option(
    "--devices",
    metavar="LIST",
    default="",
    help="A device for each worker, e.g. cuda:0,cuda:1 (worker.device).",
)
@click.option(
    "--restarts",
    type=int,
    default=0,
    show_default=True,
    metavar="K",
    help="Start a dead worker again, up to K times each.",
)
@click.option("--name", help="The run's name. Default: script and time.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where run folders are made.",
)
@click.option(
    "--seed",
    type=int,
    default=DEFAULT_SEED,
    show_default=True,
    help="The run's seed; each worker's own derives from it.",
)
@click.option("--bind/--no-bind", default=True, show_default=True, help="Give each worker cores of its own.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> None:
    """Run SCRIPT on several workers of this machine.

    What follows SCRIPT is its own: {rank} and {world} in it become each worker's numbers. The run folder
    (runs/NAME) gets the events, the logs of each worker and, at the end, the shared parameters.

    \b
      maniple run -n 2 train.py
      maniple run -n 4 --rule downpour --every 1 train.py --lr 0.05
      maniple run -n 2 --devices cuda:0,cuda:1 --maximum-rate 0.1 train.py
      maniple run -n 8 --restarts 3 train.py --shard data/part-{rank}.npz

    Exit codes: 0 done, 1 a worker failed, 2 bad arguments, 3 the system refused, 4 other, 130 interrupted.
    """
    sys.exit(run_local(_job(**options)))


def _job(*, workers: int | None, every: int | None, maximum_rate: float | None, devices: str, **rest: Any) -> Job:
    given = tuple(filter(None, (device.strip() for device in devices.split(","))))
    if every is not None and maximum_rate is not None:
        raise click.UsageError("--every and --maximum-rate are two paces; give one of them.")
    pace = None
    if every is not None:
        pace = f"every:{Every(every).n}"
    elif maximum_rate is not None:
        pace = f"rate:{RateLimit(maximum_rate).maximum_rate}"
    if rest["rule"] is not None:
        parse_rule(rest["rule"])
    return Job(workers=len(given) or 1 if workers is None else workers, pace=pace, devices=given, **rest)


def main() -> None:
    """Run the command; every error of ours is one message and its exit code."""
    try:
        cli(prog_name="maniple")
    except ManipleError as error:
        click.echo(f"maniple: {error}", err=True)
        sys.exit(error.exit_code)
