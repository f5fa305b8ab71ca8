"""Loading: the controller that was asked for, from the user's own file."""

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from maniple.controller.controller import Controller
from maniple.errors import InvalidArgument
from maniple.spec import arguments, load_file, split
from maniple.wire.plain import plain


def load(spec: str | None, args: Sequence[str] = ()) -> Controller:
    """The controller that FILE.py:CLASS names, made with the arguments NAME=VALUE; the default one for None."""
    if spec is None:
        return Controller()
    path, name = split(spec)
    settings = arguments(args)
    module = load_file(path)
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
