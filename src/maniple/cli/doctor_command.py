"""The command `maniple doctor`, and the checks that other commands make before they start."""

import re
import sys
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from maniple.cli.command import PATH, reaches_host, seconds_option
from maniple.cli.make_job import listed
from maniple.doctor import (
    CHECKS,
    GRAVE,
    OK,
    WAIT_S,
    WARNING,
    Case,
    Finding,
    SlurmCase,
    check_case,
    chosen,
    examine,
    glance,
)
from maniple.doctor.hosts import answer
from maniple.doctor.machine import check_gpus
from maniple.errors import InvalidArgument
from maniple.job import Job, RayResources
from maniple.record.folder import json_line
from maniple.settings.files import SUFFIXES
from maniple.text import count

# A number without a unit is MB; K, M, B (G) and T count parameters, of 4 bytes each.
_MB_OF_UNITS = {"KB": 1e-3, "MB": 1.0, "GB": 1e3, "TB": 1e6, "K": 4e-3, "M": 4.0, "B": 4e3, "G": 4e3, "T": 4e6}
_COLOURS = {OK: "green", WARNING: "yellow", GRAVE: "red"}


class ModelSize(click.ParamType[float]):
    """A size in MB, from MB (500), a number of parameters of 4 bytes (120M), or a unit of bytes (2GB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the option's text."""
        found = re.fullmatch(r"([\d.]+)\s*([KMGBT]?|[KMGT]B)", str(value).strip().upper())
        try:
            number, unit = float(found[1]), found[2]  # pyright: ignore[reportOptionalSubscript] - a TypeError
        except (TypeError, ValueError):
            self.fail(
                f"{value!r} is no size of a model: a number of MB, of parameters with K, M or B, or of bytes with KB, "
                "MB or GB. Write --model-size 120M for 120 million parameters, or --model-size 480MB.",
                param,
                ctx,
            )
        return number * (_MB_OF_UNITS[unit] if unit else 1.0)


@click.command(short_help="Check machines, hosts and queues before a run.")
@click.option(
    "-n",
    "--workers",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Workers on this machine, or on each host.",
)
@click.option("--devices", metavar="LIST", default="", help="Devices of the workers: cuda:0,cuda:1.")
@click.option(
    "--model-size",
    type=ModelSize(),
    default=0.0,
    metavar="SIZE",
    help="Size of the model: in MB, or 120M or 1.3B parameters, or with a unit: 2GB.",
)
@click.option(
    "--step-time",
    "step_s",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Time of one step, to suggest a rule for the line to HOST.",
)
@click.option("--runs", type=PATH, default=Path("runs"), metavar="FOLDER", help="Folder for run folders.")
@reaches_host
@click.option("--hosts", metavar="LIST", default="", help="Check these machines by ssh, as for `maniple run --hosts`.")
@click.option(
    "--script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Check that --hosts have the same file.",
)
@click.option("--ray", is_flag=True, help="Check that a Ray cluster can run the workers.")
@click.option("--ray-address", metavar="HOST:PORT", default="auto", show_default=True, help="Address of the cluster.")
@click.option("--slurm", is_flag=True, help="Check that Slurm can run the workers.")
@click.option("--cpus-per-worker", type=click.IntRange(1), default=1, metavar="C", help="CPU cores of each worker.")
@click.option("--gpus-per-worker", type=click.IntRange(0), default=0, metavar="G", help="GPUs of each worker.")
@click.option("--partition", metavar="NAME", help="Partition of the jobs.")
@click.option("--mem", metavar="SIZE", help="Memory of each worker, e.g. 4G.")
@click.option("--walltime", metavar="TIME", help="Time limit of each job, e.g. 3:00:00.")
@seconds_option("--timeout", "wait_s", WAIT_S, "Longest wait for each answer.")
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--peer", is_flag=True, hidden=True, help="Answer the doctor that calls this by ssh (--hosts).")
@click.argument("host", required=False)
@click.pass_context
def doctor(context: click.Context, /, *, is_json: bool, peer: bool, **options: Any) -> None:
    """Check what would keep a run from working, and say what to do.

    Without arguments it checks this machine. HOST is HOST:PORT, a run folder, or a session file whose settings are
    checked.

    \b
      maniple doctor -n 4 --devices cuda:0,cuda:1 --model-size 500
      maniple doctor --token-file token node-07:29400   can a worker join from here? how fast is the line?
      maniple doctor runs/last                          is its host alive?
      maniple doctor --hosts node-1,node-2 --script train.py
      maniple doctor --slurm --partition gpu --gpus-per-worker 1
      maniple doctor session.yaml                       what this file would run

    Exit codes: 0 nothing grave, 1 something grave, 2 bad arguments.
    """
    if peer:
        answer()
        return
    if str(options["host"] or "").endswith(SUFFIXES):
        options |= _session_options(context, options.pop("host"))
    case = _case(**options)
    check_case(case)
    found = examine(case, chosen(case))
    click.echo(json_line([asdict(one) for one in found]) if is_json else _lines(found))
    sys.exit(1 if any(one.level == GRAVE for one in found) else 0)


def _session_options(context: click.Context, file: str) -> dict[str, Any]:
    """What `maniple submit`, or else `maniple run`, take from a session file. The command line takes precedence."""
    settings = _resolved(context, "submit", file)
    if any(settings[queue] or context.params[queue] for queue in ("slurm", "ray")):
        settings["workers"] = settings["instances"]
    else:
        settings = _resolved(context, "run", file)
    given = {name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    return {name: settings[name] for name in context.params if settings.get(name) is not None and name not in given}


def _resolved(context: click.Context, name: str, file: str) -> dict[str, Any]:
    command = cast(click.Group, context.find_root().command).commands[name]
    with command.make_context(name, [file], parent=context.parent) as other:
        return other.params


def _case(
    *, slurm: bool, ray: bool, ray_address: str, hosts: str, devices: str, model_size: float, **rest: Any
) -> Case:
    names = ("partition", "cpus_per_worker", "gpus_per_worker", "mem", "walltime")
    wanted = SlurmCase(*(rest.pop(name) for name in names))
    if wanted != SlurmCase() and not slurm and not ray:
        raise click.UsageError("--partition, --cpus-per-worker and so on are asked of a queue; add --slurm, or --ray.")
    room = RayResources(ray_address, wanted.cpus, wanted.gpus)
    return Case(
        devices=listed(devices), hosts=listed(hosts), model_mb=model_size, slurm=wanted if slurm else None,
        ray=room if ray else None, **rest,
    )  # fmt: skip


def warn_early(job: Job, *, is_elsewhere: bool = False) -> None:
    """Print the warnings of the quick checks, which take a few milliseconds, before a job starts."""
    if job.quiet or job.is_json:
        return
    case = Case(workers=max(1, job.workers_per_node), runs=job.runs)
    left_out: set[str] = set()
    if job.listen is None or not job.listen.address.is_wildcard:  # its name is not used
        left_out |= {"name"}
    if is_elsewhere or job.hosts or job.script is None:  # no workers on this machine
        left_out |= {"cores", "threads"}
    for finding in glance(case, (check for check in CHECKS if check.name not in left_out)):
        print_warning(str(finding))


def check_devices(job: Job) -> None:
    """Raise InvalidArgument if torch does not see the GPUs of --devices; training on a CPU might go unnoticed.

    Importing torch takes seconds, so it is done only for GPUs of this machine.
    """
    if job.hosts or not any(device.startswith("cuda") for device in job.devices):
        return
    if find_spec("torch") is not None:  # else `worker.device` is for another framework
        for found in check_gpus(Case(devices=job.devices)):
            if found.level == GRAVE:
                raise InvalidArgument(str(found))


def print_warning(text: str) -> None:
    click.echo(f"{click.style('maniple: warning:', fg='yellow')} {text}", err=True)


def _lines(found: list[Finding]) -> str:
    lines = [f"{click.style(f'{one.level:8}', fg=_COLOURS[one.level])} {one.check}: {one}" for one in found]
    counts = Counter(one.level for one in found)
    return "\n".join([*lines, f"{counts[GRAVE]} grave, {count(counts[WARNING], 'warning')}, {counts[OK]} fine"])
