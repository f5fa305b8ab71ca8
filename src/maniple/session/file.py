"""A file of settings: YAML, one mapping, each value kept as it was written, with the line it stands in.

Values stay text, as on the command line: `name: 007` is the name 007, and not the number 7.
"""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maniple.errors import InvalidArgument

if TYPE_CHECKING:
    from yaml import MappingNode, Node

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Setting:
    """One value that does not come from the command line."""

    value: str | tuple[str, ...]
    origin: str  # session.yaml:3, or MANIPLE_WORKERS
    folder: Path | None = None  # where relative paths begin; None: where the command was called
    is_general: bool = False  # for all runs, not for one


class Untrusted(Exception):
    """A file that nobody has named may have been put there by somebody else."""


def read_settings(path: Path, *, is_general: bool = False, is_found: bool = False) -> dict[str, Setting]:
    """The settings of a file, in its own words and order.

    `is_found`: nobody has named it, it lies in the working folder. Untrusted if others could have written it.
    """
    settings: dict[str, Setting] = {}
    root = _parse(path, is_found=is_found)
    for key_node, node in root.value if root is not None else []:
        key, origin = str(key_node.value).replace("-", "_"), f"{path}:{key_node.start_mark.line + 1}"
        if key in settings:
            raise InvalidArgument(f"{origin}: {key} stands in {settings[key].origin} already. Keep one of them.")
        settings[key] = Setting(_value(node, key, origin), origin, path.parent, is_general)
    return settings


def _check_owner(about: os.stat_result) -> None:
    if about.st_uid not in {os.getuid(), 0}:
        raise Untrusted(
            f"it belongs to user {about.st_uid}, and this process is of user {os.getuid()}. Remove it, or own it"
        )
    if about.st_mode & 0o022:
        mode = stat.S_IMODE(about.st_mode)
        raise Untrusted(f"others can write it (mode {mode:04o}). If it is yours, `chmod go-w` makes it count")


def _parse(path: Path, *, is_found: bool) -> MappingNode | None:
    import yaml

    try:
        with path.open("rb") as file:
            if is_found:  # what was opened is checked: another file may have that name a moment later
                _check_owner(os.fstat(file.fileno()))
            data = file.read()
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except OSError as error:
        raise InvalidArgument(_unreadable(path, error)) from None
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
        return root
    raise InvalidArgument(f"{path} has no keys. Write `key: value` lines, e.g. `workers: 4`.")


def _value(node: Node, key: str, origin: str) -> str | tuple[str, ...]:
    from yaml import SequenceNode

    if isinstance(node, SequenceNode):
        return tuple(_text(item, key, origin) for item in node.value)
    return _text(node, key, origin)


def _text(node: Node, key: str, origin: str) -> str:
    from yaml import ScalarNode

    if not isinstance(node, ScalarNode):
        raise InvalidArgument(
            f"{origin}: {key} holds more than a value or a list of values. Write `{key}: VALUE`, or `{key}: [A, B]`."
        )
    if node.tag.endswith(":null"):
        raise InvalidArgument(f"{origin}: {key} has no value. Give it one, or leave the key out.")
    return str(node.value)


def _unreadable(path: Path, error: OSError) -> str:
    if path.exists():
        return f"the file {str(path)!r} cannot be read: {error.strerror}. Check its kind and permissions."
    beside = [other.name for other in path.parent.glob("*") if other.name.endswith(SUFFIXES)]
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"Did you mean {str(path.parent / near[0])!r}?" if near else "Check the path."
    return f"there is no session file {str(path)!r} in {Path.cwd()}. {hint}"
