"""Environment variables: how the settings of a dataclass are written to them and read back, and a few others."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from maniple.errors import InvalidArgument
from maniple.settings.options import Limits, Readers, Setting, SharedSettings, settings_of, take, value_of

_READERS = ("any", "external", "run")  # each kind of process also reads the variables of the kinds before it


def variables_for(values: Any) -> dict[str, str]:
    """The variables from which a process reads `values`, an Environment."""
    written: dict[str, str] = {}
    for one in settings_of(type(values)):
        value = value_of(values, one.name)
        if not (value is None or value is False or value in ("", (), one.unset)):
            text = "1" if value is True else json.dumps(value) if value.__class__ is tuple else str(value)
            written[one.variable] = text
    return written


def read_fields(declared_in: type, env: Mapping[str, str], reader: Readers = "run") -> dict[str, Any]:
    """The fields of a dataclass whose variables are set, as keyword arguments. An empty variable is not set."""
    found: dict[str, Any] = {}
    for one in settings_of(declared_in):
        name = next((name for name in (one.variable, one.fallback) if env.get(name)), None)
        if name is not None and _READERS.index(one.readers) <= _READERS.index(reader):
            found[one.name] = _parse(name, env[name], one)
    if issubclass(declared_in, SharedSettings):
        found["limits"] = Limits(**take(found, Limits))
    return found


def _parse(name: str, text: str, setting: Setting) -> Any:
    kind = setting.kind
    if kind is bool:
        return text.strip().lower() not in {"", "0", "no", "false", "off"}
    if setting.word and text == setting.word:
        return text
    if kind is int or kind is float:
        return _number(name, text, kind)
    if setting.choices:
        return check_choice(name, text, setting.choices)
    return tuple(json.loads(text)) if get_origin(setting.hint) is tuple else kind(text)


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """The whole number in a variable; `default` if it is not set."""
    return int(_number(name, env[name], int)) if env.get(name) else default


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidArgument(f"{name}={text!r} is not {what}. Unset it, or set it to one.") from None


def check_choice(name: str, text: str, choices: Sequence[str]) -> str:
    """A variable's text, if it is one of several words."""
    if text not in choices:
        kind = name.removeprefix("MANIPLE_").lower()
        raise InvalidArgument(f"{name}={text!r} is no {kind} (one of {', '.join(choices)}). Unset it.")
    return text


def path_in(env: Mapping[str, str], name: str) -> Path | None:
    """The path in a variable; None if it is not set."""
    text = env.get(name)
    return Path(text) if text else None


# An OpenMP runtime binds threads to cores by these, also the thread that imports it.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def values_of(names: Sequence[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of `names` that are set, with their values."""
    return {name: env[name] for name in names if env.get(name)}


def binding_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that make a library bind threads to cores."""
    return values_of(_BINDING, env)


def visible_gpus(env: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that CUDA may use; None: all."""
    return env.get("CUDA_VISIBLE_DEVICES")
