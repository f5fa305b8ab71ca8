"""The state of a torch optimizer as named arrays and plain values, without pickle."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from maniple.contracts import Array
from maniple.layout import dtype_name

Plain = dict[str, Any]


def packed(optimizer: Optimizer) -> tuple[dict[str, Array], Plain]:
    """The state's tensors, and all that JSON knows of the rest: lr, momentum, step counts."""
    known = optimizer.state_dict()
    arrays: dict[str, Array] = {}
    plain: Plain = {"dtypes": {}, "values": {}, "groups": []}
    for number, values in known["state"].items():
        for key, value in values.items():
            name = f"{number}/{key}"
            if isinstance(value, Tensor):
                plain["dtypes"][name] = dtype_name(value)
                arrays[name] = _to_array(value)
            elif value is None or isinstance(value, bool | int | float | str):
                plain["values"][name] = value
    for group in known["param_groups"]:
        kept = {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                for key, value in group.items() if key != "params"}  # fmt: skip
        plain["groups"].append({key: value for key, value in kept.items() if _is_plain(value)})
    return arrays, plain


def moments(optimizer: Optimizer) -> list[Tensor]:
    """The floating-point state that has its parameter's shape, in the order of the parameters."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known: dict[str, Any] = optimizer.state.get(parameter, {})
            for key in sorted(known):
                value = known[key]
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    found.append(value)
    return found


def unpack(optimizer: Optimizer, arrays: dict[str, Array], plain: Plain) -> None:
    """Give the optimizer a state that `packed` has told."""
    known = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for name, dtype in plain["dtypes"].items():
        number, key = name.split("/", 1)
        state.setdefault(int(number), {})[key] = _to_tensor(arrays[name], dtype)
    for name, value in plain["values"].items():
        number, key = name.split("/", 1)
        state.setdefault(int(number), {})[key] = value
    for group, told in zip(known["param_groups"], plain["groups"], strict=True):
        for key, value in told.items():
            before = group.get(key)
            if isinstance(before, Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(cast(list[Any], value)) if isinstance(before, tuple) else value
    optimizer.load_state_dict({"state": state, "param_groups": known["param_groups"]})


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(one) for one in cast(list[Any], value))
    return value is None or isinstance(value, bool | int | float | str)


# What files of tensors have no name for, and what it is written as.
_WRITTEN = {"bfloat16": torch.int16, "float16": torch.int16, "bool": torch.uint8, "complex64": torch.float32,
            "complex128": torch.float64}  # fmt: skip


def _to_array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    if (dtype := _WRITTEN.get(dtype_name(tensor))) is None:
        return tensor.numpy()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(dtype)).numpy()


def _to_tensor(array: Array, dtype: str) -> Tensor:
    tensor = torch.from_numpy(np.array(array))
    if dtype_name(tensor) == dtype:
        return tensor
    return torch.view_as_complex(tensor) if dtype.startswith("complex") else tensor.view(getattr(torch, dtype))
