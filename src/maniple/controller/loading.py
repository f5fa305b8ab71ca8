"""Loading: the controller that was asked for, from the user's own file."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from maniple.controller.controller import Controller
from maniple.errors import InvalidArgument
from maniple.wire.plain import plain


def load(spec: str | None, args: Sequence[str] = ()) -> Controller:
    """The controller that FILE.py:CLASS names, made with the arguments NAME=VALUE; the default one for None."""
    if spec is None:
        return Controller()
    path, name = split(spec)
    settings = arguments(args)
    sys.path.insert(0, str(path.parent.resolve()))  # its own imports, as if it were run
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    kind = getattr(module, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Controller)):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Controller) and value is not Controller
        ]
        hint = f"It has {', '.join(there)}." if there else "Derive it: class Mine(maniple.Controller)."
        raise InvalidArgument(f"--controller {spec}: {path} has no class {name} derived from Controller. {hint}")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise InvalidArgument(
            f"--controller {spec}: {name} cannot be made with {settings or 'no arguments'}: {error}. "
            "Give its arguments by --controller-arg NAME=VALUE."
        ) from None
    controller = kind(**settings)
    try:
        msgspec.json.decode(msgspec.json.encode(controller.state, enc_hook=plain), type=dict[str, Any])
    except (TypeError, ValueError) as error:  # msgspec's own errors too
        raise InvalidArgument(
            f"--controller {spec}: `state` of {name} must be a dict that JSON knows, and is not: {error}."
        ) from None
    return controller


def split(spec: str) -> tuple[Path, str]:
    """FILE.py and CLASS of FILE.py:CLASS."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise InvalidArgument(
            f"--controller {spec} names no class. Write FILE.py:CLASS, e.g. lstm_controller.py:Early."
        )
    if not Path(path).is_file():
        raise InvalidArgument(f"--controller {spec}: there is no file {path!r} in {Path.cwd()}. Check the path.")
    return Path(path), name


def arguments(args: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as keyword arguments; a VALUE that is JSON (a number, true, a list) is taken as such."""
    settings: dict[str, Any] = {}
    for arg in args:
        name, equals, value = arg.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidArgument(f"--controller-arg {arg} is no argument. Write NAME=VALUE, e.g. patience=5.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
