"""Settings files: YAML, one mapping from keys to values, each kept with its line number.

Values stay text, as on the command line: `name: 007` is the name 007, not the number 7.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from maniple.errors import InvalidArgument, require_printable
from maniple.settings.options import all_settings, option_variable

if TYPE_CHECKING:
    from yaml import Node

SUFFIXES = (".yaml", ".yml")
FOLDER_FILE = Path(".maniple.yaml")  # counts because it lies in the working folder
SESSION_KEYS = ("script", "args", "sync_start")  # of one run, so not for a file for all runs
_OLD_KEYS = {"sync_rule": "rule", "avg_freq": "every"}  # of Platoon and Theano-MPI
_TRUE = {"true", "yes", "on", "1", "t", "y"}


@dataclass(frozen=True)
class SourcedValue:
    """A value from a file or a variable, and its origin."""

    value: str | tuple[str, ...]
    origin: str  # session.yaml:3, or MANIPLE_WORKERS
    folder: Path | None = None  # relative paths begin here; None: at the working folder
    is_general: bool = False  # for all runs, not for one

    def __str__(self) -> str:
        return self.value if isinstance(self.value, str) else ", ".join(self.value)


def read_file(
    path: Path, keys: Collection[str], personal: Path, *, is_general: bool = False
) -> tuple[dict[str, SourcedValue], list[str]]:
    """The settings of a file, and notes for the user about keys that were translated or a file that is ignored.

    Args:
        path: the file. FOLDER_FILE is ignored if others could have written it, and may set only harmless keys.
        keys: those that any command knows.
        personal: where settings go that FOLDER_FILE may not have.
        is_general: the file is for all runs.
    """
    is_folder_file = is_general and path == FOLDER_FILE
    try:
        with path.open("rb") as file:
            # The owner of the open file: another one may have its name a moment later.
            if is_folder_file and (reason := _why_untrusted(os.fstat(file.fileno()))):
                return {}, [f"{path} is ignored: {reason}."]
            data = file.read()
    except OSError as error:
        raise InvalidArgument(_unreadable(path, error)) from None
    values: dict[str, SourcedValue] = {}
    for key_node, node in _parse(path, data):
        key, origin = str(key_node.value).replace("-", "_"), f"{path}:{key_node.start_mark.line + 1}"
        if key in values:
            raise InvalidArgument(f"{origin}: {key} is set in {values[key].origin} already. Keep one of them.")
        values[key] = SourcedValue(_value(node, key, origin), origin, path.parent, is_general)
    _check_keys(values, [*keys, *SESSION_KEYS, *_OLD_KEYS])
    for key, one in values.items():
        for text in (one.value,) if isinstance(one.value, str) else one.value:
            if key != "args":  # these belong to the script
                require_printable(f"{one.origin}: {key}", text)
    values, notes = _translate(values)
    if is_folder_file:
        _check_harmless(values, personal)
    return values, notes


def _parse(path: Path, data: bytes) -> list[tuple[Node, Node]]:
    import yaml

    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        why = ", ".join(filter(None, (error.context, error.problem)))
        raise InvalidArgument(f"{path}{line} is no YAML: {why}. Write `key: value` lines.") from None
    except RecursionError:
        raise InvalidArgument(f"{path} is nested too deeply. Write `key: value` lines.") from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise InvalidArgument(f"{path} is no YAML: {why}. Write `key: value` lines, in UTF-8.") from None
    if root is None or isinstance(root, yaml.MappingNode):
        return [] if root is None else root.value
    raise InvalidArgument(f"{path} has no keys. Write `key: value` lines, e.g. `workers: 4`.")


def _why_untrusted(about: os.stat_result) -> str:
    """Why another user may have written the file; "" if none can."""
    if about.st_uid not in {os.getuid(), 0}:
        return f"it belongs to user {about.st_uid}, and this process runs as user {os.getuid()}. Remove it, or own it"
    if about.st_mode & 0o022:
        mode = stat.S_IMODE(about.st_mode)
        return f"others can write it (mode {mode:04o}). If it is yours, run `chmod go-w` on it"
    return ""


def _unreadable(path: Path, error: OSError) -> str:
    if path.exists():
        return f"the file {str(path)!r} cannot be read: {error.strerror}. Check its kind and permissions."
    beside = [other.name for other in path.parent.glob("*") if other.name.endswith(SUFFIXES)]
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"Did you mean {str(path.parent / near[0])!r}?" if near else "Check the path."
    return f"there is no session file {str(path)!r} in {Path.cwd()}. {hint}"


def _value(node: Node, key: str, origin: str) -> str | tuple[str, ...]:
    from yaml import ScalarNode, SequenceNode

    nodes: list[Node] = node.value if isinstance(node, SequenceNode) else [node]
    for one in nodes:
        if not isinstance(one, ScalarNode):
            raise InvalidArgument(
                f"{origin}: {key} holds more than a value or a list of values. Write `{key}: VALUE`, or "
                f"`{key}: [A, B]`."
            )
        if one.tag.endswith(":null"):
            raise InvalidArgument(f"{origin}: {key} has no value. Give it one, or leave the key out.")
    values = tuple(str(one.value) for one in nodes)
    return values if isinstance(node, SequenceNode) else values[0]


def _check_keys(values: dict[str, SourcedValue], known: list[str]) -> None:
    for key, one in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys are {', '.join(known)}."
            raise InvalidArgument(f"{one.origin}: there is no setting {key!r}. {hint}")
        if one.is_general and key in SESSION_KEYS:
            raise InvalidArgument(
                f"{one.origin}: {key} belongs to one run, and this file is for all runs. Move it to a session file, "
                "and start that by `maniple run session.yaml`."
            )


def _check_harmless(values: dict[str, SourcedValue], personal: Path) -> None:
    """Raise InvalidArgument for a key that only a file may have which the user has named."""
    for key, one in values.items():
        turns_tls_off = key == "tls" and str(one.value).lower() not in _TRUE
        if turns_tls_off or not (key in all_settings() and all_settings()[key].folder):
            what = "would turn encryption off" if turns_tls_off else "runs code, opens connections or uses other places"
            raise InvalidArgument(
                f"{one.origin}: {key} {what}, and this file counts only because it lies in the working folder. "
                f"Give --{key.replace('_', '-')} on the command line or by {option_variable(key)}, or write it to a "
                f"session file (`maniple run session.yaml`) or to {personal}."
            )


def _translate(values: dict[str, SourcedValue]) -> tuple[dict[str, SourcedValue], list[str]]:
    """The values with today's keys, and a note about each key that was translated."""
    translated: dict[str, SourcedValue] = {}
    notes: dict[str, str] = {}
    for key, one in values.items():
        if (new := _OLD_KEYS.get(key, key)) != key:
            if new in values:
                raise InvalidArgument(
                    f"{one.origin}: {key} is another word for {new}, which is set in {values[new].origin}. "
                    "Keep one of them."
                )
            notes[new] = f"{one.origin}: {key} is read as {new}: {one}"
        translated[new] = one
    rule = translated.get("rule")
    if "avg_freq" in values and rule is not None and str(values["avg_freq"]) != "1":
        name, _, options = str(rule).partition(":")
        if name.strip().lower() == "bsp":  # averaged parameters there, not gradients
            every = translated.pop("every")
            meant = f"bsp:average=parameters,every={every},{options}" if options else f"localsgd:k={every}"
            translated["rule"] = replace(rule, value=meant)
            notes = {
                "every": f"{every.origin}: BSP with avg_freq {every} averages parameters every {every} steps: it is "
                f"read as rule: {meant}"
            }
    return translated, list(notes.values())
