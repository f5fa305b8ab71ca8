"""Classes of the user: FILE.py:CLASS names one, and NAME=VALUE is an argument of it."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from maniple.errors import InvalidArgument


def parse_class(spec: str, option: str = "--controller") -> tuple[Path, str]:
    """The file and the name of a class given as FILE.py:CLASS; `option` is for the error."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise InvalidArgument(f"{option} {spec} names no class. Write FILE.py:CLASS, e.g. {_EXAMPLES[option]}.")
    if not Path(path).is_file():
        raise InvalidArgument(f"{option} {spec}: there is no file {path!r} in {Path.cwd()}. Check the path.")
    return Path(path), name


def load_file(path: Path) -> ModuleType:
    """Import a file as a module. It can import from its own folder, as a script can."""
    sys.path.insert(0, str(path.parent.resolve()))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def parse_arguments(args: Sequence[str], option: str = "--controller-arg") -> dict[str, Any]:
    """Keyword arguments from NAME=VALUE; a VALUE that is JSON (a number, true, a list) is decoded."""
    settings: dict[str, Any] = {}
    for arg in args:
        name, equals, value = arg.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidArgument(f"{option} {arg} is no argument. Write NAME=VALUE, e.g. {_EXAMPLES[option]}.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


_EXAMPLES = {
    "--controller": "lstm_controller.py:Early",
    "--controller-arg": "patience=5",
    "--model": "models/net.py:Net",
    "--model-arg": "lr=0.1",
    "maniple change": "alpha=0.3",
}
