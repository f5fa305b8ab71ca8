"""A torch optimizer's state as named arrays and plain values, so that it can be saved without any pickle."""

import sys
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from maniple.contracts import Array

Plain = dict[str, Any]


def read_state(optimizer: Any) -> tuple[dict[str, Array], Plain]:
    """The arrays of an optimizer by `number/key`, and all else that JSON knows."""
    state = optimizer.state_dict()
    arrays: dict[str, Array] = {}
    rest: dict[str, Plain] = {}
    for number, values in state["state"].items():
        for key, value in values.items():
            if hasattr(value, "detach"):
                arrays[f"{number}/{key}"] = _array(value)
            elif _is_plain(value):
                rest.setdefault(str(number), {})[key] = value
    groups = [
        {key: _plain(value) for key, value in group.items() if _is_plain(value)} for group in state["param_groups"]
    ]
    return arrays, {"state": rest, "groups": groups}


def write_state(optimizer: Any, arrays: Mapping[str, Array], plain: Plain) -> None:
    """Give an optimizer a state that `read_state` has read; learning rates come with it."""
    torch = cast(Any, sys.modules["torch"])
    state: dict[int, Plain] = {int(number): dict(values) for number, values in plain["state"].items()}
    for name, value in arrays.items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(value))
    now = optimizer.state_dict()["param_groups"]  # has what JSON does not know
    groups = [{**group, **saved} for group, saved in zip(now, plain["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _array(value: Any) -> Array:
    value = value.detach().cpu()
    try:
        return value.numpy()
    except TypeError:  # bfloat16, which NumPy lacks; it becomes one again where it is loaded
        return value.float().numpy()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast(list[Any], value)))
    return value is None or isinstance(value, bool | int | float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1


def _plain(value: Any) -> Any:
    return value.item() if _is_number(value) else value
