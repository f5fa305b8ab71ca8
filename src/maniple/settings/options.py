"""The settings: each is declared once, as a field of a dataclass, with all that is derived from it.

From a field made by `setting()` follow the option of each command and its help, the keys of settings files, the
environment variables, the range check, `asked` in run.json, what `--resume` takes from there, and what a host sends to
workers that join. Adding an option is one field here and the code that reads it.

    SharedSettings   for every process of a run; `Job` and `Environment` inherit from it
    Limits           when the controller stops the run; the field `limits` of SharedSettings
    RunSettings      for the launcher only; `Job` inherits from it
    LaunchOptions    options that become something else in a `Job`: a pace, a listener, a number of workers
    QueueResources   options of `maniple submit`
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from maniple.errors import BadFrame, InvalidArgument, require_printable
from maniple.rules import RULES
from maniple.wire.codecs import CODECS

WORKERS, RULE, DATA, STOPPING = "Workers", "Rule and pace", "Data and model", "Stopping"
SNAPSHOTS, NETWORK, QUEUE, OUTPUT = "Snapshots and resume", "Network", "Queue", "Output"
GROUPS = (QUEUE, WORKERS, RULE, DATA, STOPPING, SNAPSHOTS, NETWORK, OUTPUT)  # in the order of --help

ALL = "run serve submit host"  # the commands that take settings; `host` serves the workers of another launcher
STARTS = "run submit"  # those that start a program

DEFAULT_SEED = 1
HOST_DEADLINE_S = 600.0  # a host that is started again by hand or by a queue is usually back within minutes
COLLECTIVES_DEADLINE_S = 600.0  # longer than a slow checkpoint or evaluation of one worker
ENGINES = ("shared", "torch", "mpi")
KEEP = 3  # one that is being written may be cut short, one may hold a diverged center, one is left

Resume = Literal["", "recorded", "repeated", "kept"]
Readers = Literal["run", "external", "any"]


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have, and one to suggest."""

    low: float
    suggestion: str
    high: float = float("inf")
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.excludes_low else self.low <= value) and (
            value <= self.high and abs(value) < float("inf")
        )

    def __str__(self) -> str:
        low = f"{self.low:g}"
        if self.high < float("inf"):
            return f"{low} to {self.high:g}"
        return f"above {low}" if self.excludes_low else f"{low} or more"


NATURAL = Range(0, "3")
SECONDS = Range(0, "600", excludes_low=True)
LIMIT = Range(0, "100", high=1e15)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting.

    Attributes:
        name: the field, and click's name of the parameter.
        key: its name in settings files. The option is `--key` with dashes, the variable MANIPLE_KEY.
        hint: its annotation, such as `int | None`.
        commands: those that have the option, each with what differs there (`default`, `help`).
        leads: the help of its group begins with it.
        folder: `.maniple.yaml` of the working folder may set it. The user did not name that file, and it may come with
            another person's project: it must not run code, let others in, or use other machines or folders.
        resume: what `--resume` does with the value in run.json. "recorded": nothing by itself; "repeated": takes it
            where no script is named; "kept": always takes it, and files for all runs do not change it.
        joins: the host sends it to workers that join.
        readers: which processes read its variable. "run": those of a run; "external": also external workers;
            "any": also a script that runs alone.
        variable: of an `Environment`, MANIPLE_ and the name without its unit, unless it is given.
        fallback: a variable of torchrun that counts where this one is not set.
        unset: a value for which no variable is written; None, False, "" and () never are.
    """

    name: str = ""
    key: str = ""
    hint: Any = str
    default: Any = None
    help: str = ""
    group: str = OUTPUT
    commands: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leads: bool = False
    short: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    negatable: bool = False
    shows_default: bool = False
    range: Range | None = None
    folder: bool = False
    resume: Resume = ""
    joins: bool = False
    readers: Readers = "run"
    variable: str = ""
    fallback: str = ""
    unset: Any = None

    @property
    def kind(self) -> type:
        """The type of one value: `int` for `int | None`, `str` for `tuple[str, ...]`."""
        hint = self.hint
        if isinstance(hint, UnionType):
            hint = next(part for part in get_args(hint) if part is not NoneType)
        return get_args(hint)[0] if get_args(hint) else hint

    @property
    def flag(self) -> str:
        """The long option."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def record_key(self) -> str:
        """Its key in `asked` of run.json: the name without a unit."""
        return without_unit(self.name)

    def check(self, value: Any) -> None:
        """Raise InvalidArgument for a value that is out of range, or holds a control character."""
        for text in value if self.multiple else (value,):
            if isinstance(text, str):
                require_printable(self.flag, text)
        if self.range is not None and value is not None and value not in self.range:
            raise InvalidArgument(
                f"{self.flag} {value:g} is out of range ({self.range}). Write {self.flag} {self.range.suggestion}, or "
                "leave it out."
            )


def setting(
    default: Any,
    help: str = "",
    commands: str | dict[str, Mapping[str, Any]] = "",
    *,
    key: str = "",
    **properties: Any,
) -> Any:
    """A field that is a setting; `key` is the field's name without its unit unless it is given."""
    by_command = commands if isinstance(commands, dict) else {name: {} for name in commands.split()}
    declared = {"help": help, "commands": by_command, "key": key, **properties}
    return field(default=default, metadata={"setting": declared})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the controller lets workers validate and stop; 0 is never."""

    max_batches: int = setting(
        0, "Stop after N batches, counted over all workers.", ALL, metavar="N", group=STOPPING,
        range=LIMIT, folder=True, resume="repeated", readers="any", unset=0,
    )  # fmt: skip
    max_epochs: int = setting(
        0, "Stop after N epochs of worker.sampler.", ALL, metavar="N", group=STOPPING,
        range=LIMIT, folder=True, resume="repeated", joins=True, readers="any", unset=0,
    )  # fmt: skip
    total_duration: float = setting(
        0.0, "Stop after this much training, counted from the first step of any worker.", ALL, metavar="SECONDS",
        group=STOPPING, range=LIMIT, folder=True, resume="repeated", readers="any", unset=0,
    )  # fmt: skip
    validate_every: int = setting(
        0, 'Answer "validate" to one worker after every N batches, counted over all workers.', ALL, metavar="N",
        group=STOPPING, range=LIMIT, folder=True, resume="repeated", readers="any", unset=0,
    )  # fmt: skip
    patience: int = setting(
        0, "Early stopping: stop after K validations in a row without improvement.", ALL, metavar="K",
        group=STOPPING, range=LIMIT, folder=True, resume="repeated", readers="any", unset=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What every process of a run needs to know. The launcher passes it on by environment variables."""

    rule: str | None = setting(
        None, f"What an exchange does: {', '.join(RULES)}. Parameters follow a colon: easgd:alpha=0.5. Default: bsp "
        "for torch models on the CPU if all workers are on this machine, else easgd.", ALL,
        metavar="RULE", group=RULE, leads=True, folder=True, resume="kept", joins=True, readers="external",
    )  # fmt: skip
    default_rule: str | None = setting(None, resume="kept", joins=True)  # where no rule is named
    pace: str | None = setting(None, resume="kept", joins=True, readers="external")  # of --every or --maximum-rate
    overlap: bool = setting(
        False, "Exchange in the background while training continues: for rules of the center, localsgd and diloco; bsp "
        "then sends gradients during the backward pass.", ALL, group=RULE, folder=True, resume="kept", joins=True,
        readers="external",
    )  # fmt: skip
    seed: int | None = setting(
        None, f"Seed of the run; the seed of each worker derives from it. Default: {DEFAULT_SEED}, or that of the "
        "resumed run.", ALL, metavar="N", group=DATA, range=Range(0, "1"), folder=True, resume="kept", joins=True,
        readers="any",
    )  # fmt: skip
    deterministic: bool = setting(
        False, "Make two runs equal to the bit: fixed shards, fixed seeds, deterministic algorithms of torch.", "run",
        group=DATA, folder=True, resume="repeated", readers="any",
    )  # fmt: skip
    limits: Limits = Limits()
    controller: str | None = setting(
        None, "Your own controller, a subclass of maniple.Controller.", ALL, metavar="FILE.py:CLASS", group=STOPPING,
        resume="recorded",
    )  # fmt: skip
    controller_args: tuple[str, ...] = setting(
        (), "Keyword argument for the controller. Repeatable.", ALL, key="controller_arg", multiple=True,
        metavar="NAME=VALUE", group=STOPPING, folder=True, resume="recorded",
    )  # fmt: skip
    wire: str | None = setting(
        None, "Compression of what is sent over the network; int4 and topk are for rules that send changes, not for "
        "asynchronous easgd and asgd. Default: float32.", ALL,
        choices=tuple(CODECS), group=NETWORK, folder=True, resume="kept", joins=True, readers="external",
    )  # fmt: skip
    collectives: str | None = setting(
        None, "How synchronous workers communicate. Default: shared (memory) on one machine, torch with --hosts.",
        "run", choices=ENGINES, group=NETWORK, resume="repeated", readers="any",
    )  # fmt: skip
    collectives_deadline_s: float = setting(
        COLLECTIVES_DEADLINE_S, "A worker that has waited this long in a collective fails, and names the missing ones.",
        "run", metavar="SECONDS", group=NETWORK, range=SECONDS, folder=True, readers="any", shows_default=True,
    )  # fmt: skip
    host_deadline_s: float = setting(
        HOST_DEADLINE_S, "A remote worker trains on for this long without its host, then saves its replica and fails.",
        ALL, metavar="SECONDS", group=NETWORK, range=SECONDS, folder=True, joins=True, readers="any",
        shows_default=True,
    )  # fmt: skip
    max_memory_mb: float = setting(
        0.0, "Shared memory that remote workers and clients may fill. Default: 90 % of what is free.", ALL,
        metavar="MB", group=NETWORK, range=Range(0, "8000"), unset=0,
    )  # fmt: skip


Shared = TypeVar("Shared", bound=SharedSettings)


@dataclass(frozen=True, kw_only=True)
class RunSettings(SharedSettings):
    """What only the launcher of a run needs to know, in addition."""

    target: str | None = setting(
        None, "Value to reach: show when the center, or else the mean of the workers, first does.", ALL,
        metavar="NAME=NUMBER", group=STOPPING, folder=True, resume="repeated",
    )  # fmt: skip
    stop_at_target: bool = setting(
        False, "Stop all workers once the --target is reached.", ALL, group=STOPPING, folder=True, resume="recorded"
    )
    baseline: str | None = setting(
        None, "What the speed-up is measured over: first run one worker alone for SECONDS, or take a RUN with "
        "one worker.", "run", metavar="SECONDS|RUN", group=OUTPUT, resume="recorded",
    )  # fmt: skip
    restarts: int = setting(
        0, "Restart a worker that died, up to K times each.",
        {"run": {}, "submit": {"help": "With --ray: place a lost worker again, up to K times each. Slurm requeues "
         "lost tasks by itself."}},
        metavar="K", group=WORKERS, range=NATURAL, folder=True, resume="repeated", shows_default=True,
    )  # fmt: skip
    min_workers: int = setting(
        1, "When a worker is killed by a signal, the others continue while at least N are left.", "run submit host",
        metavar="N", group=WORKERS, range=Range(1, "1"), folder=True, resume="repeated", shows_default=True,
    )  # fmt: skip
    strict: bool = setting(
        False, "End the run when any worker dies, also by a signal.", "run submit host", group=WORKERS, folder=True,
        resume="repeated",
    )  # fmt: skip
    bind: bool = setting(
        True, "Give each worker its own CPU cores.", "run", group=WORKERS, negatable=True, folder=True,
        shows_default=True,
    )  # fmt: skip
    feeds: tuple[str, ...] = setting(
        (), "Start a producer of batches for worker.feed(), with arguments in quotes: 'produce.py --size 8'. "
        "Repeatable.", "run", key="feed", multiple=True, metavar="SCRIPT", group=DATA, resume="repeated",
    )  # fmt: skip
    producers: int = setting(
        1, "Copies of each --feed script.", "run", metavar="K", group=DATA, folder=True, resume="repeated",
        shows_default=True,
    )  # fmt: skip
    model: str | None = setting(
        None, "Train this class with maniple's own loop, instead of running a SCRIPT.", STARTS,
        metavar="FILE.py:CLASS", group=DATA, resume="recorded",
    )  # fmt: skip
    model_args: tuple[str, ...] = setting(
        (), "Entry of the model's config. Repeatable.", STARTS, key="model_arg", multiple=True, metavar="NAME=VALUE",
        group=DATA, folder=True, resume="recorded",
    )  # fmt: skip
    arrays: Path | None = setting(
        None, "Begin with the named arrays in this file.", "serve", key="from", metavar="FILE", group=DATA
    )
    resume: Path | None = setting(
        None, "Continue this run in its own folder, after its host has ended or was killed.", ALL, metavar="RUN",
        group=SNAPSHOTS,
    )  # fmt: skip
    snapshot: str | None = setting(
        None, "With --resume: the snapshot to continue from. Default: the newest.", ALL,
        metavar="NUMBER|best|epoch-N", group=SNAPSHOTS, folder=True,
    )  # fmt: skip
    snapshot_every_s: float = setting(
        300.0, "Save the center this often during training; 0: only at the end.", ALL, metavar="SECONDS",
        group=SNAPSHOTS, range=Range(0, "300"), folder=True, resume="repeated", shows_default=True,
    )  # fmt: skip
    snapshot_epochs: int | None = setting(
        None, "Keep a snapshot after every K epochs of the model, with optimizer and record. Default: as its class "
        "says.", STARTS, metavar="K", group=SNAPSHOTS, range=Range(0, "5"), folder=True, resume="recorded",
    )  # fmt: skip
    keep: int = setting(
        KEEP, "Keep the newest K snapshots.", ALL, metavar="K", group=SNAPSHOTS, range=Range(1, "3"), folder=True,
        shows_default=True,
    )  # fmt: skip
    name: str | None = setting(
        None, "Name of the run. Default: script and time.", ALL, metavar="NAME", group=OUTPUT, folder=True
    )
    runs: Path = setting(
        Path("runs"), "Folder for run folders.", ALL, metavar="FOLDER", group=OUTPUT, shows_default=True
    )
    quiet: bool = setting(False, "Print errors only.", ALL, short="-q", group=OUTPUT, folder=True)
    is_json: bool = setting(False, "Print events as lines of JSON.", ALL, key="json", group=OUTPUT, folder=True)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options that `job_from` turns into other fields of a job."""

    workers: int | None = setting(
        None, "Number of workers, on each machine. Default: one per device, else 1.", "run", short="-n", metavar="N",
        group=WORKERS, folder=True,
    )  # fmt: skip
    devices: str = setting(
        "", "Device of each worker, e.g. cuda:0,cuda:1; it becomes worker.device.", "run", metavar="LIST",
        group=WORKERS, folder=True,
    )  # fmt: skip
    hosts: str = setting(
        "", "Start the workers on these machines, by ssh. Implies --listen 0.0.0.0:0.", "run", metavar="LIST",
        group=WORKERS,
    )  # fmt: skip
    every: int | None = setting(
        None,
        "Exchange every N steps. Without --rule, by easgd.",
        ALL,
        metavar="N",
        group=RULE,
        folder=True,
        resume="kept",
    )
    maximum_rate: float | None = setting(
        None, "Spend at most this share of the time on exchanges: 0.5 / workers is a good start. Without --rule, by "
        "easgd.", ALL,
        metavar="SHARE", group=RULE, folder=True, resume="kept",
    )  # fmt: skip
    listen: str | None = setting(
        None, "Let remote workers join: 0.0.0.0:29400, or port 0 for a free one.",
        {"run": {},
         "serve": {"help": "Address to listen on; port 0 is a free one, and 0.0.0.0 lets other machines in.",
                   "default": "127.0.0.1:0", "shows_default": True},
         "submit": {"help": "Address the host listens on; all nodes must reach it.",
                    "default": "0.0.0.0:0", "shows_default": True},
         "host": {"help": "Address to listen on instead of WHERE."}},
        metavar="ADDRESS", group=NETWORK,
    )  # fmt: skip
    tls: bool = setting(
        False, "Encrypt connections, with a certificate made for the run.", ALL, group=NETWORK, folder=True
    )
    certificate: Path | None = setting(None, "Encrypt with this certificate (PEM).", ALL, metavar="FILE", group=NETWORK)
    key: Path | None = setting(None, "Private key of the certificate (PEM).", ALL, metavar="FILE", group=NETWORK)
    web: bool = setting(False, "Serve a web page of the run (extra `watch`).", "run serve", group=OUTPUT)
    web_listen: str | None = setting(
        None, "Address of the web page. Default: a free port of 127.0.0.1; 0.0.0.0 lets other machines in.",
        "run serve", metavar="ADDRESS", group=OUTPUT,
    )  # fmt: skip


@dataclass(frozen=True)
class QueueResources:
    """What `maniple submit` asks of a batch queue."""

    instances: int = setting(
        MISSING, "Number of workers: tasks of a Slurm job array, or actors of Ray.", "submit", short="-n",
        metavar="N", group=WORKERS, range=Range(1, "2"), folder=True,
    )  # fmt: skip
    max_simultaneous: int = setting(
        0, "Run at most K workers at a time. Default: no limit.", "submit", metavar="K", group=WORKERS,
        range=NATURAL, folder=True,
    )  # fmt: skip
    allocation: str | None = setting(
        None, "Account to charge (sbatch --account).", "submit", metavar="NAME", group=QUEUE, folder=True
    )
    partition: str | None = setting(None, "Partition of all jobs.", "submit", metavar="NAME", group=QUEUE, folder=True)
    walltime: str | None = setting(
        None, "Time limit of each job, e.g. 3:00:00. Default: that of the partition.", "submit", metavar="TIME",
        group=QUEUE, folder=True,
    )  # fmt: skip
    gpus_per_worker: int = setting(
        0, "GPUs of each worker.", "submit", metavar="G", group=QUEUE, range=NATURAL, folder=True, shows_default=True
    )
    cpus_per_worker: int = setting(
        1, "CPU cores of each worker.", "submit", metavar="C", group=QUEUE, range=Range(1, "2"), folder=True,
        shows_default=True,
    )  # fmt: skip
    mem: str | None = setting(
        None, "Memory of each worker, e.g. 16G.", "submit", metavar="SIZE", group=QUEUE, folder=True
    )
    leave_early_s: int = setting(
        60, "A worker makes its last exchange and leaves this long before its time limit.", "submit",
        metavar="SECONDS", group=QUEUE, range=NATURAL, folder=True, shows_default=True,
    )  # fmt: skip
    sbatch: tuple[str, ...] = setting(
        (), "Pass an option to sbatch for the workers: --sbatch --qos=high. Repeatable.", "submit", multiple=True,
        metavar="OPTION", group=QUEUE,
    )  # fmt: skip
    host_sbatch: tuple[str, ...] = setting(
        (), "The same for the job of --host-job. Repeatable.", "submit", multiple=True, metavar="OPTION", group=QUEUE
    )


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """Options of `maniple submit` that choose a queue and what is submitted."""

    slurm: bool = setting(False, "Submit to Slurm.", "submit", group=QUEUE)
    ray: bool = setting(False, "Let a Ray cluster place the workers.", "submit", group=QUEUE)
    ray_address: str = setting(
        "auto", "Address of the Ray cluster; auto: the one of this machine.", "submit", metavar="HOST:PORT",
        group=QUEUE, shows_default=True,
    )  # fmt: skip
    host_job: bool = setting(
        False, "Submit the host as a job too and return at once. Default: the host runs here.", "submit", group=QUEUE
    )
    dry_run: bool = setting(False, "Print the job scripts and submit nothing.", "submit", group=QUEUE, folder=True)


# The variables MANIPLE_CERTIFICATE and MANIPLE_KEY hold what a worker knows of its host, not these options.
_OTHER_MEANING = {"certificate", "key"}


def option_variable(key: str) -> str:
    """The environment variable that sets an option."""
    return f"MANIPLE_OPTION_{key.upper()}" if key in _OTHER_MEANING else f"MANIPLE_{key.upper()}"


@cache
def settings_of(declared_in: type) -> tuple[Setting, ...]:
    """The settings that a dataclass declares, in order; those of a nested one (`limits`) at its place."""
    hints = get_type_hints(declared_in)
    found: list[Setting] = []
    for one in fields(declared_in):
        if is_dataclass(hints[one.name]):
            found += settings_of(hints[one.name])
        elif (declared := one.metadata.get("setting")) is not None:
            default = None if one.default is MISSING else one.default
            key = declared["key"] or without_unit(one.name)
            variable = declared.get("variable", f"MANIPLE_{without_unit(one.name).upper()}")
            known = {"name": one.name, "key": key, "hint": hints[one.name], "default": default, "variable": variable}
            found.append(Setting(**declared | known))
    return tuple(found)


@cache
def all_settings() -> dict[str, Setting]:
    """The settings of all commands by their keys, in the order of the help."""
    classes = (QueueOptions, QueueResources, LaunchOptions, RunSettings)
    found = [one for declared_in in classes for one in settings_of(declared_in) if one.commands]
    return {one.key: one for one in sorted(found, key=lambda one: (GROUPS.index(one.group), not one.leads))}


def check_settings(values: Any) -> None:
    """Raise InvalidArgument for a value of a dataclass, or of one nested in it, that its setting does not allow."""
    for one in settings_of(type(values)):
        one.check(value_of(values, one.name))


def value_of(values: Any, name: str) -> Any:
    """A setting's value in an object that has it, or has it among its limits."""
    return getattr(values, name) if hasattr(values, name) else getattr(values.limits, name)


def recorded_settings(values: Any) -> dict[str, Any]:
    """The settings that run.json keeps. Files are absolute, since `--resume` may be called elsewhere."""
    record: dict[str, Any] = {}
    for one in settings_of(type(values)):
        if one.resume:
            value = value_of(values, one.name)
            if value and (one.metavar or "").startswith("FILE"):  # FILE.py:CLASS too
                value = str(Path(value).resolve())
            record[one.record_key] = list(value) if isinstance(value, tuple) else value
    return record


def is_bsp_excluded(pace: object) -> bool:
    """Bsp cannot be the default: with a pace, workers exchange values."""
    return pace is not None


def joining_settings(values: Any) -> dict[str, Any]:
    """The settings that a host sends to a worker that joins."""
    return {one.name: value_of(values, one.name) for one in settings_of(SharedSettings) if one.joins}


def with_joining_settings(values: Shared, received: Mapping[str, Any]) -> Shared:
    """`values` with the settings that the host has sent; raises BadFrame for one of the wrong type."""
    accepted: dict[str, Any] = {}
    for one in settings_of(SharedSettings):
        if one.joins and one.name in received:
            try:
                accepted[one.name] = msgspec.convert(received[one.name], one.hint)
            except msgspec.ValidationError as error:
                raise BadFrame(f"the host sent {one.name}={received[one.name]!r}: {error}. Is it as new?") from None
    return replace(values, limits=replace(values.limits, **take(accepted, Limits)), **accepted)


def take(values: dict[str, Any], declared_in: type) -> dict[str, Any]:
    """The values that a dataclass declares, removed from `values`."""
    return {part.name: values.pop(part.name) for part in fields(declared_in) if part.name in values}


def without_unit(name: str) -> str:
    """A field's name without the unit at its end: `host_deadline_s` is host_deadline."""
    return name.removesuffix("_s").removesuffix("_mb")
