"""The command `maniple doctor`: what would keep a run from working, and what to do."""

import sys
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from maniple.cli.job import listed
from maniple.doctor import CHECKS, GRAVE, OK, WAIT_S, WARNING, Case, Finding, Slurm, check_case, chosen, examine, glance
from maniple.doctor.libraries import look_at_devices
from maniple.errors import InvalidArgument
from maniple.launch import Job
from maniple.launch.board import count
from maniple.launch.room import Room
from maniple.record.folder import json_line
from maniple.session.file import SUFFIXES

_COLOURS = {OK: "green", WARNING: "yellow", GRAVE: "red"}


@click.command()
@click.option(
    "-n", "--workers", type=int, default=1, show_default=True, help="Workers on this machine, or on each host."
)
@click.option("--devices", metavar="LIST", default="", help="The devices they are to use: cuda:0,cuda:1.")
@click.option("--model-size", type=float, default=0.0, metavar="MB", help="The size of the model, in megabytes.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are made.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.option(
    "--hosts", metavar="LIST", default="", help="Look at these machines, by ssh, as `maniple run --hosts` would."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The same on --hosts?",
)
@click.option("--ray", is_flag=True, help="Look at a Ray cluster, and whether it can give what workers need.")
@click.option("--ray-address", metavar="HOST:PORT", default="auto", show_default=True, help="As for `maniple submit`.")
@click.option("--slurm", is_flag=True, help="Look at Slurm, and whether it can give what workers need:")
@click.option("--cpus-per-worker", type=click.IntRange(1), default=1, metavar="C", help="so many cores,")
@click.option("--gpus-per-worker", type=click.IntRange(0), default=0, metavar="G", help="so many GPUs,")
@click.option("--partition", help="in this partition,")
@click.option("--mem", metavar="SIZE", help="with so much memory (4G),")
@click.option("--walltime", metavar="TIME", help="for so long (3:00:00).")
@click.option(
    "--timeout",
    "wait_s",
    type=float,
    default=WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="The longest wait for each answer.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
@click.argument("host", required=False)
@click.pass_context
def doctor(context: click.Context, /, *, is_json: bool, **options: Any) -> None:
    """Look for what would keep a run from working, and say what to do.

    Without arguments, at this machine. HOST is HOST:PORT, a run folder, or a session file: then what that asks for.

    \b
      maniple doctor -n 4 --devices cuda:0,cuda:1 --model-size 500
      maniple doctor --token-file token node-07:29400      would a worker from here be let in?
      maniple doctor runs/last                             does its host live, and can it be reached?
      maniple doctor --hosts node-1,node-2 --script train.py
      maniple doctor --slurm --partition gpu --gpus-per-worker 1 --walltime 3:00:00
      maniple doctor session.yaml                          what is to be run or submitted with this file

    Exit codes: 0 nothing grave, 1 something grave, 2 bad arguments.
    """
    if str(options["host"] or "").endswith(SUFFIXES):
        options |= _of_session(context, options.pop("host"))
    case = _case(**options)
    check_case(case)
    found = examine(case, chosen(case))
    click.echo(json_line([asdict(one) for one in found]) if is_json else _lines(found))
    sys.exit(1 if any(one.level == GRAVE for one in found) else 0)


def _of_session(context: click.Context, file: str) -> dict[str, Any]:
    """What `maniple submit`, or else `maniple run`, would take from a session file; what is typed counts more."""
    asked = _settled(context, "submit", file)
    if any(asked[queue] or context.params[queue] for queue in ("slurm", "ray")):
        asked["workers"] = asked["instances"]
    else:
        asked = _settled(context, "run", file)
    given = {name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    return {name: asked[name] for name in context.params if asked.get(name) is not None and name not in given}


def _settled(context: click.Context, name: str, file: str) -> dict[str, Any]:
    command = cast(click.Group, context.find_root().command).commands[name]
    with command.make_context(name, [file], parent=context.parent) as other:
        return other.params


def _case(
    *, slurm: bool, ray: bool, ray_address: str, hosts: str, devices: str, model_size: float, **rest: Any
) -> Case:
    asked = ("partition", "cpus_per_worker", "gpus_per_worker", "mem", "walltime")
    wanted = Slurm(*(rest.pop(name) for name in asked))
    if wanted != Slurm() and not slurm and not ray:
        raise click.UsageError("--partition, --cpus-per-worker and so on are asked of a queue; add --slurm, or --ray.")
    room = Room(ray_address, wanted.cpus, wanted.gpus)
    return Case(
        devices=listed(devices), hosts=listed(hosts), model_mb=model_size, slurm=wanted if slurm else None,
        ray=room if ray else None, **rest,
    )  # fmt: skip


def warn_early(job: Job, *, is_elsewhere: bool = False) -> None:
    """What a launcher tells before it begins. It takes a few milliseconds, and keeps nothing from being started."""
    if job.quiet or job.is_json:
        return
    case = Case(workers=max(1, job.workers_per_node), runs=job.runs)
    left_out: set[str] = set()
    if job.listen is None or not job.listen.address.is_everywhere:  # nobody is told it
        left_out |= {"name"}
    if is_elsewhere or job.hosts or job.script is None:  # the workers are
        left_out |= {"cores", "threads"}
    for finding in glance(case, (check for check in CHECKS if check.name not in left_out)):
        tell_warning(str(finding))


def check_devices(job: Job) -> None:
    """Raise InvalidArgument if torch does not see the GPUs that --devices names: training on a CPU would go unnoticed.

    Asking torch takes seconds, so only those wait who ask for a GPU of this machine.
    """
    if job.hosts or not any(device.startswith("cuda") for device in job.devices):
        return
    if find_spec("torch") is not None:  # else `worker.device` is for another framework, which knows better
        for found in look_at_devices(Case(devices=job.devices)):
            if found.level == GRAVE:
                raise InvalidArgument(str(found))


def tell_warning(text: str) -> None:
    """Warn of something, and go on."""
    click.echo(f"{click.style('maniple: warning:', fg='yellow')} {text}", err=True)


def _lines(found: list[Finding]) -> str:
    lines = [f"{click.style(f'{one.level:8}', fg=_COLOURS[one.level])} {one.check}: {one}" for one in found]
    counts = Counter(one.level for one in found)
    return "\n".join([*lines, f"{counts[GRAVE]} grave, {count(counts[WARNING], 'warning')}, {counts[OK]} fine"])
