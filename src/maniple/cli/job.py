"""From the options of a command to the job that they ask for."""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from maniple.errors import InvalidArgument
from maniple.launch import Job, Listen
from maniple.pace import Every, RateLimit, parse_pace
from maniple.place import Limits
from maniple.rules import parse_rule
from maniple.spec import split
from maniple.wire.address import Address
from maniple.worker.asked import check_rule_and_pace

_OF_MODEL = ("model", "model_args", "snapshot_epochs")


def job_from(
    *,
    every: int | None,
    maximum_rate: float | None,
    listen: str | None,
    tls: bool,
    certificate: Path | None,
    key: Path | None,
    workers: int | None = None,
    devices: str = "",
    hosts: str = "",
    web: bool = False,
    web_listen: str | None = None,
    **rest: Any,
) -> Job:
    """The job that the options of a command ask for."""
    if "script" in rest:
        rest["script"] = _program(rest["script"], rest["model"], rest["args"])
    else:  # a host alone
        rest |= {name: Job.__dataclass_fields__[name].default for name in _OF_MODEL if name in rest}
    limits = Limits(**{part.name: rest.pop(part.name) for part in fields(Limits)})
    given, nodes = listed(devices), listed(hosts) if "script" in rest else ()
    if nodes:
        listen = listen or "0.0.0.0:0"
    if every is not None and maximum_rate is not None:
        raise click.UsageError("--every and --maximum-rate are two paces; give one of them.")
    pace = None
    if every is not None and every < 1:
        raise InvalidArgument(f"--every {every} is no pace: exchanges come every 1 step or more. Write --every 10.")
    if every is not None:
        pace = f"every:{Every(every).n}"
    elif maximum_rate is not None:
        pace = f"rate:{RateLimit(maximum_rate).maximum_rate}"
    if rest["rule"] is not None:
        rule = parse_rule(rest["rule"])
        if pace is not None:
            check_rule_and_pace(rule, parse_pace(pace))
    if listen is None and (tls or certificate or key):
        raise click.UsageError("--tls, --certificate and --key are for connections; add --listen ADDRESS.")
    where = None if listen is None else Listen(Address.parse(listen, default_port=0), tls, certificate, key)
    page = Address.parse(web_listen or "127.0.0.1:0", default_port=0) if web or web_listen else None
    count = 0 if "script" not in rest else len(given) or 1 if workers is None else workers
    count *= max(1, len(nodes))
    return Job(workers=count, pace=pace, devices=given, hosts=nodes, listen=where, limits=limits, web=page, **rest)


def _program(script: Path | None, model: str | None, args: tuple[str, ...]) -> Path:
    """The file that the workers run: a script, or that of a model's class."""
    if model is None:
        if script is None:
            raise click.UsageError("Missing argument 'SCRIPT'. Name a script, or a class by --model FILE.py:CLASS.")
        return script
    if script is not None or args:
        raise InvalidArgument(
            f"--model {model} is trained by maniple's own loop, but there is also {str(script or shlex.join(args))!r} "
            "to run. Leave one of them out; settings of the class are given by --model-arg NAME=VALUE."
        )
    return split(model, "--model")[0]


def listed(text: str) -> tuple[str, ...]:
    """The words of a LIST, as an option has it: a,b."""
    return tuple(filter(None, (word.strip() for word in text.split(","))))
