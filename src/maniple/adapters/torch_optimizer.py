"""The state of a torch optimizer as named arrays and plain values, without pickle."""

from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from maniple.adapters.base import Average, Gather
from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.layout import dtype_name

Plain = dict[str, Any]


def packed(optimizer: Optimizer) -> tuple[dict[str, Array], Plain]:
    """The state's tensors as arrays, and its JSON values: lr, momentum, step counts.

    State of other types, such as a list of tensors, is named only, and refused by `unpack`: the worker that gives its
    state to another continues to train.
    """
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
            else:
                plain["lost"] = f"{key!r}, a {type(value).__name__}"
    for group in known["param_groups"]:
        kept = {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                for key, value in group.items() if key != "params"}  # fmt: skip
        plain["groups"].append({key: value for key, value in kept.items() if _is_plain(value)})
    return arrays, plain


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def moments(optimizer: Optimizer, local: Set[int] = frozenset()) -> dict[tuple[int, str], Tensor]:
    """The floating-point state of its parameter's shape, by the parameter's number and the state's name.

    `local` are the ids of parameters whose state stays each worker's own.
    """
    found: dict[tuple[int, str], Tensor] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) in local:
            continue
        known: dict[str, Any] = optimizer.state.get(parameter, {})
        for key in sorted(known):
            value = known[key]
            is_like_it = isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
            if is_like_it and key != "step":  # which has the shape of a scalar parameter
                found[number, key] = value
    return found


def average_moments(optimizer: Optimizer, average: Average, gather: Gather, local: Set[int] = frozenset()) -> None:
    """Average the moments of each parameter, except `local` ones, over the workers that have some.

    Optimizers create a parameter's state with its first gradient, so workers that train different layers have different
    state: they exchange first which they have. A worker without it, or with values that are not finite, has weight 0.
    """
    own, parameters = moments(optimizer, local), parameters_of(optimizer)
    mine = [(number, key, _flat_dtype(tensor)) for (number, key), tensor in own.items()]
    said = [msgspec.json.decode(one, type=list[tuple[int, str, str]]) for one in gather(msgspec.json.encode(mine))]
    for number, key, dtype in sorted({one for each in said for one in each}):
        tensor = own.get((number, key))
        if tensor is None:
            average(np.zeros(parameters[number].numel(), dtype), False)
            continue
        flat = tensor.to("cpu", getattr(torch, dtype), copy=True).contiguous().view(-1)
        average(flat.numpy(), bool(flat.isfinite().all()))
        tensor.copy_(flat.view(tensor.shape))


def use_nesterov(optimizer: Optimizer | None, momentum: float) -> None:
    """Set the optimizer's momentum, unless it has one already; InvalidArgument if it is another one."""
    if not isinstance(optimizer, optim.SGD):
        found = "no optimizer" if optimizer is None else f"a {type(optimizer).__name__}"
        raise InvalidArgument(
            f"EAMSGD steps with Nesterov's momentum, which torch.optim.SGD has, but the model is shared with {found}. "
            "Give share() torch.optim.SGD(model.parameters(), lr=...), or choose EASGD, for any optimizer."
        )
    for group in optimizer.param_groups:
        if group["dampening"] or group["momentum"] not in {0, momentum}:
            raise InvalidArgument(
                f"the optimizer has momentum={group['momentum']!r} and dampening={group['dampening']!r}, but EAMSGD "
                f"makes steps with momentum {momentum:g} and no dampening. Leave them out, or write "
                f"EAMSGD(delta={group['momentum']!r})."
            )
        group["momentum"], group["nesterov"] = momentum, True


@torch.no_grad()
def add_look_ahead(optimizer: Optimizer, shared: Set[int], sign: float) -> None:
    """Add the look-ahead of Nesterov's momentum to the parameters with the ids `shared`, or take it off with sign -1.

    The velocity is v = -lr b, with the momentum buffer b, and the look-ahead is momentum v.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None and id(parameter) in shared:
                parameter.add_(buffer, alpha=-sign * float(group["momentum"]) * float(group["lr"]))


def _flat_dtype(tensor: Tensor) -> str:
    return "float64" if tensor.dtype == torch.float64 else "float32"


def unpack(optimizer: Optimizer, arrays: dict[str, Array], plain: Plain) -> None:
    """Set the optimizer to a state that `packed` has given."""
    if lost := plain.get("lost"):
        raise InvalidArgument(
            f"{type(optimizer).__name__} keeps {lost}, in its state, and only tensors, numbers and words can be "
            "carried to a worker that joins or is resumed. Use another optimizer, or train without restarts."
        )
    known = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for name, dtype in plain["dtypes"].items():
        number, key = name.split("/", 1)
        state.setdefault(int(number), {})[key] = _to_tensor(arrays[name], dtype)
    for name, value in plain["values"].items():
        number, key = name.split("/", 1)
        state.setdefault(int(number), {})[key] = value
    for group, saved in zip(known["param_groups"], plain["groups"], strict=True):
        for key, value in saved.items():
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


# Dtypes that NumPy lacks or safetensors files cannot name, and how their bytes are written.
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


_KINDS = {"adagrad": "Adagrad", "rmsprop": "RMSprop", "adadelta": "Adadelta", "adam": "Adam", "adamax": "Adamax"}


def optimizer(name: str, settings: Mapping[str, float], parameters: Iterable[Tensor]) -> optim.Optimizer:
    """The torch optimizer for an update rule of that name (`pool`)."""
    known: dict[str, Any] = {key: value for key, value in settings.items() if not key.startswith("beta")}
    if "beta1" in settings:
        known["betas"] = settings["beta1"], settings["beta2"]
    if name == "nesterov":
        known["nesterov"] = True
    return getattr(optim, _KINDS.get(name, "SGD"))(parameters, **known)
