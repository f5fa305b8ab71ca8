"""The keys that files may have: the options of the commands, a script, and words of older systems."""

import difflib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from maniple.errors import InvalidArgument
from maniple.place import personal_settings, setting_variable
from maniple.session.file import Setting

OF_SESSION = ("script", "args", "sync_start")  # for one run: no keys of a general file
_NOW = {"sync_rule": "rule", "avg_freq": "every"}  # what older systems call it, and we


# What `.maniple.yaml` of the working folder may set. Nobody has named that file, and it may come with somebody else's
# project, so it says how to train: it does not run code, let others in, or use other machines or folders. Keys that are
# not listed here are refused there.
OF_FOLDER = frozenset({
    "allocation", "bind", "circle_deadline", "controller_arg", "cpus_per_worker", "deterministic", "devices",
    "dry_run", "every", "gpus_per_worker", "host_deadline", "instances", "json", "keep", "leave_early", "max_batches",
    "max_epochs", "max_simultaneous", "maximum_rate", "mem", "min_workers", "model_arg", "name", "partition",
    "patience", "producers", "quiet", "restarts", "rule", "seed", "snapshot", "snapshot_epochs", "snapshot_every",
    "strict", "tls", "total_duration", "validate_every", "walltime", "wire", "workers",
})  # fmt: skip


def check_found(settings: dict[str, Setting]) -> None:
    """Raise InvalidArgument for a key that only a file may have which somebody has named."""
    for key, setting in settings.items():
        is_off = key == "tls" and str(setting.value).lower() not in {"true", "yes", "on", "1", "t", "y"}
        if key not in OF_FOLDER or is_off:
            what = "would turn encryption off" if is_off else "runs code, opens connections or uses other places"
            raise InvalidArgument(
                f"{setting.origin}: {key} {what}, and this file counts only because it lies in the working folder. "
                f"Give --{key.replace('_', '-')} on the command line or by {setting_variable(key)}, or write it to a "
                f"session file (`maniple run session.yaml`) or to {personal_settings()}."
            )


def option_keys(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their keys: `--snapshot-every` is `snapshot_every`."""
    keys: dict[str, click.Option] = {}
    for option in command.params:
        long = next((name for name in option.opts if name.startswith("--")), None)
        if isinstance(option, click.Option) and long and not option.is_eager:
            keys[long.removeprefix("--").replace("-", "_")] = option
    return keys


def check_keys(settings: dict[str, Setting], options: Iterable[str]) -> None:
    """Raise InvalidArgument for a key that means nothing."""
    known = [*options, *OF_SESSION, *_NOW]
    for key, setting in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys are {', '.join(known)}."
            raise InvalidArgument(f"{setting.origin}: there is no setting {key!r}. {hint}")
        if setting.is_general and key in OF_SESSION:
            raise InvalidArgument(
                f"{setting.origin}: {key} is of one run, and this file is for all. Move it to a session file, "
                "which is run by `maniple run session.yaml`."
            )


def translate(settings: dict[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """The settings with today's keys, and a line about each that was translated."""
    now: dict[str, Setting] = {}
    notes: list[str] = []
    for key, setting in settings.items():
        if (new := _NOW.get(key, key)) != key:
            if new in settings:
                raise InvalidArgument(
                    f"{setting.origin}: {key} is another word for {new}, which stands in {settings[new].origin}. "
                    "Keep one of them."
                )
            notes.append(f"{setting.origin}: {key} is read as {new}: {shown(setting.value)}")
        now[new] = setting
    if "avg_freq" in settings and _is_bsp(now.get("rule")) and now["every"].value != "1":
        _average_parameters(now, notes)
    return now, notes


def _is_bsp(rule: Setting | None) -> bool:
    return rule is not None and str(rule.value).partition(":")[0].strip().lower() == "bsp"


def _average_parameters(now: dict[str, Setting], notes: list[str]) -> None:
    """What BSP with an avg_freq above 1 is in older systems: parameters are averaged, every so many steps."""
    every, rule = now.pop("every"), now["rule"]
    options = str(rule.value).partition(":")[2]
    meant = f"bsp:average=parameters,every={every.value},{options}" if options else f"localsgd:k={every.value}"
    now["rule"] = replace(rule, value=meant)
    notes[:] = [note for note in notes if not note.startswith((f"{every.origin}: ", f"{rule.origin}: "))]
    notes.append(
        f"{every.origin}: BSP with avg_freq {every.value} averages parameters every {every.value} steps: it is read as "
        f"rule: {meant}"
    )


def convert(context: click.Context, key: str, option: click.Option, setting: Setting) -> Any:
    """The value as the command line would give it; raises InvalidArgument if it cannot be one."""
    try:
        return option.type_cast_value(context, _as_typed(key, option, setting))
    except click.BadParameter as error:
        raise InvalidArgument(
            f"{setting.origin}: {key} cannot be {shown(setting.value)!r}: {error.message.rstrip('.')}. "
            f"Write {_form(key, option)}, or leave it out."
        ) from None


def _as_typed(key: str, option: click.Option, setting: Setting) -> str | tuple[str, ...]:
    """The words as they would stand on the command line."""
    value = setting.value
    if setting.folder is not None and _is_path(option):
        words = tuple(_anchored(word, option, setting) for word in ((value,) if isinstance(value, str) else value))
        value = words[0] if isinstance(value, str) else words
    if option.multiple or option.nargs != 1:
        return (value,) if isinstance(value, str) else value
    if isinstance(value, str):
        return value
    if option.metavar == "LIST":
        return ",".join(value)
    raise InvalidArgument(f"{setting.origin}: {key} is a list of {len(value)} values, but takes one. Keep one of them.")


def is_command(option: click.Option) -> bool:
    """It takes a script, perhaps with arguments behind it."""
    return option.metavar == "SCRIPT"


def _is_path(option: click.Option) -> bool:
    return isinstance(option.type, click.Path) or (option.metavar or "").startswith("FILE") or is_command(option)


def _anchored(text: str, option: click.Option, setting: Setting) -> str:
    path, space, rest = text.partition(" ") if is_command(option) else (text, "", "")
    return f"{anchored(path, setting)}{space}{rest}"


def anchored(path: str, setting: Setting) -> Path:
    """Paths in a file begin at the file's folder, or at `~`."""
    try:
        return Path(setting.folder or "", Path(path).expanduser())
    except RuntimeError as error:
        raise InvalidArgument(f"{setting.origin}: {path!r} is no path: {error} Write it out.") from None


def _form(key: str, option: click.Option) -> str:
    if option.is_flag:
        return "true or false"
    return f"what --{key.replace('_', '-')} takes ({option.metavar or option.type.name.upper()})"


def shown(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else ", ".join(value)
