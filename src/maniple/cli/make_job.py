"""From the options of a command to a job, also to one that repeats the job of an earlier run (`--resume`)."""

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from maniple.errors import InvalidArgument
from maniple.host.listener import Listen
from maniple.job import Job
from maniple.launch.resume import repeated_options
from maniple.pace import Every, RateLimit, parse_pace
from maniple.replica.sharing import check_rule_and_pace, check_wire
from maniple.rules import parse_rule, with_overlap
from maniple.settings.options import LaunchOptions, Limits, take
from maniple.user_class import parse_class
from maniple.wire.address import Address

_OF_MODEL = ("model", "model_args", "snapshot_epochs")


def job_from(**options: Any) -> Job:
    """The job that the options of a command ask for. Without `script` among them it is a host without workers."""
    starts_workers = "script" in options
    if starts_workers and options.get("resume") is not None and options["script"] is None and options["model"] is None:
        repeated = repeated_options(options["resume"])
        options = {"devices": "", "hosts": ""} | options
        if any(options.get(name) for name in ("workers", "devices", "hosts")):
            del repeated["workers"]
        options |= {name: value for name, value in repeated.items() if name in options and not _is_given(name)}
    if starts_workers:
        options["script"] = _program(options["script"], options["model"], options["args"])
    else:
        options = {name: value for name, value in options.items() if name not in _OF_MODEL}
    launch = LaunchOptions(**take(options, LaunchOptions))
    limits = Limits(**take(options, Limits))
    devices, hosts = listed(launch.devices), listed(launch.hosts) if starts_workers else ()
    workers = (len(devices) or 1 if launch.workers is None else launch.workers) if starts_workers else 0
    pace = _pace(launch)
    if options["rule"] is not None:
        rule = parse_rule(options["rule"])
        if pace is not None:
            check_rule_and_pace(rule, parse_pace(pace))
        if options["overlap"]:
            rule = with_overlap(rule)
        if options["wire"] is not None:
            check_wire(rule, options["wire"])
        if hosts and rule.has_peers:
            raise InvalidArgument(
                f"--rule {options['rule']} exchanges through shared memory, but --hosts starts workers on other "
                "machines. Leave --hosts out, or choose a rule with a center: --rule easgd."
            )
    return Job(
        workers=workers * max(1, len(hosts)),
        pace=pace,
        devices=devices,
        hosts=hosts,
        listen=_listen(launch, "0.0.0.0:0" if hosts else None),
        web=_web_address(launch),
        limits=limits,
        **options,
    )


def _pace(launch: LaunchOptions) -> str | None:
    if launch.every is not None and launch.maximum_rate is not None:
        raise click.UsageError("--every and --maximum-rate are two paces; give one of them.")
    if launch.every is not None:
        if launch.every < 1:
            raise InvalidArgument(
                f"--every {launch.every} is no pace: exchanges come every 1 step or more. Write --every 10."
            )
        return f"every:{Every(launch.every).n}"
    return None if launch.maximum_rate is None else f"rate:{RateLimit(launch.maximum_rate).maximum_rate}"


def _listen(launch: LaunchOptions, default: str | None) -> Listen | None:
    if (address := launch.listen or default) is not None:
        return Listen(Address.parse(address, default_port=0), launch.tls, launch.certificate, launch.key)
    if launch.tls or launch.certificate or launch.key:
        raise click.UsageError("--tls, --certificate and --key are for connections; add --listen ADDRESS.")
    return None


def _web_address(launch: LaunchOptions) -> Address | None:
    if not (launch.web or launch.web_listen):
        return None
    return Address.parse(launch.web_listen or "127.0.0.1:0", default_port=0)


def _is_given(name: str) -> bool:
    """The option has a value from the command line, a file or a variable."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) not in {None, ParameterSource.DEFAULT}


def _program(script: Path | None, model: str | None, args: tuple[str, ...]) -> Path:
    """The file that the workers run: a script, or the one with a model's class."""
    if model is None:
        if script is None:
            raise click.UsageError(
                "Missing argument 'SCRIPT'. Name a script, a class by --model FILE.py:CLASS, or --resume RUN."
            )
        return script
    if script is not None or args:
        raise InvalidArgument(
            f"--model {model} is trained by maniple's own loop, but there is also {str(script or shlex.join(args))!r} "
            "to run. Leave one of them out; settings of the class are given by --model-arg NAME=VALUE."
        )
    return parse_class(model, "--model")[0]


def listed(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list."""
    return tuple(filter(None, (word.strip() for word in text.split(","))))
