"""From the options of a command to the job that they ask for."""

import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from maniple.errors import InvalidArgument
from maniple.launch import Job, Listen
from maniple.pace import Every, RateLimit, parse_pace
from maniple.place import Limits
from maniple.record import Folder
from maniple.rules import parse_rule
from maniple.spec import split
from maniple.wire.address import Address
from maniple.worker.asked import check_rule_and_pace

_OF_MODEL = ("model", "model_args", "snapshot_epochs")
# Of a run that goes on without a script being named: its options, and what run.json calls them.
_REPEATED = {"snapshot_every_s": "snapshot_every"} | {
    name: name for name in ("restarts", "min_workers", "strict", "circle", "deterministic", "producers")
}


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
    if rest.get("resume") is not None and "script" in rest and rest["script"] is None and rest["model"] is None:
        again = _begun_with(rest["resume"])
        rest |= {name: value for name, value in again.items() if name in rest and not _is_given(name)}
        workers = again["workers"] if workers is None and not devices and not hosts else workers
        devices, hosts = devices or again["devices"], hosts or again["hosts"]
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


def _begun_with(run: Path) -> dict[str, Any]:
    """What a run was begun with, as options: its script or model, and how many workers of what kind."""
    about = Folder(run.resolve()).read()
    asked: dict[str, Any] = about.get("asked") or {}
    if (reason := no_program(run, about, asked)) is not None:
        raise InvalidArgument(
            f"--resume {run} names no script to run: it {reason}. Name the script after it, or another run: runs/NAME."
        )
    again: dict[str, Any] = {name: asked[key] for name, key in _REPEATED.items() if key in asked}
    again |= {"workers": asked["workers"] // max(1, len(asked["hosts"])), "feeds": tuple(asked.get("feeds", ()))}
    again |= {name: ",".join(asked[name]) for name in ("devices", "hosts")}
    if asked.get("model"):
        again["model"] = asked["model"]
    else:
        again |= {"script": Path(asked["script"]), "args": tuple(asked["args"])}
    if about.get("exit_code") != 0:  # else it may be a limit that has ended it
        again |= {part.name: asked[part.name] for part in fields(Limits) if part.name in asked}
    return again


def no_program(run: Path, about: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """Why a run tells of nothing that could be started again; None if it does."""
    launcher = asked.get("launcher", "maniple")
    if about.get("lineage") is None:
        return "is no run folder, as it has no run.json with a lineage"
    if (run / "run.json").stat().st_uid != os.getuid():
        return "belongs to another user, whose script is not started unless it is named"
    if asked.get("script") is None:
        return "was a host alone, which `maniple serve --resume` continues"
    if launcher != "maniple":
        return f"had workers that {launcher} has started, which starts them again with MANIPLE_RESUME"
    return "had workers on a Ray cluster, for which there is `maniple submit --ray`" if asked.get("ray") else None


def _is_given(name: str) -> bool:
    """Somebody has given the option a value, on the command line, in a file or by a variable."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) not in {None, ParameterSource.DEFAULT}


def _program(script: Path | None, model: str | None, args: tuple[str, ...]) -> Path:
    """The file that the workers run: a script, or that of a model's class."""
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
    return split(model, "--model")[0]


def listed(text: str) -> tuple[str, ...]:
    """The words of a LIST, as an option has it: a,b."""
    return tuple(filter(None, (word.strip() for word in text.split(","))))
