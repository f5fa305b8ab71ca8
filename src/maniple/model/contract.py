"""The contract of a model class: what it must have. All violations are reported at once, before training begins."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from maniple.errors import InvalidArgument
from maniple.user_class import load_file, parse_class

_METHODS = {
    "train_iter": (("count", "recorder"), "trains on batch `count` and returns its loss, or a dict that has `loss`"),
    "val_iter": (("count", "recorder"), "returns a dict of means over validation batch `count` that has `loss`"),
    "adjust_hyperp": (("epoch",), "is called before each epoch, for learning rates and the like"),
    "cleanup": ((), "is called at the end"),
}
_PARAMS = "a torch module, a list of torch parameters, or a dict of NumPy arrays that are changed in place"

loading: list[str] = []  # the class whose file is being loaded, for `Session` to detect that it runs inside of it


class ModelData(Protocol):
    """A model's data."""

    n_batch_train: int  # of an epoch, over all workers
    n_batch_val: int


class Model(Protocol):
    """What the loop requires. Optional: `optimizer`, `n_epochs`, `snapshot_epochs`, `record_every`."""

    params: Any
    data: ModelData

    def train_iter(self, count: int, recorder: Any) -> Any: ...
    def val_iter(self, count: int, recorder: Any) -> Any: ...
    def adjust_hyperp(self, epoch: int) -> None: ...
    def cleanup(self) -> None: ...


def load_class(spec: str) -> type:
    """The class that FILE.py:CLASS names."""
    path, name = parse_class(spec, "--model")
    loading.append(spec)
    try:
        module = load_file(path)
    finally:
        loading.pop()
    found = getattr(module, name, None)
    if inspect.isclass(found):
        return found
    there = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == path.stem]
    raise InvalidArgument(
        f"--model {spec}: {Path(path)} has no class {name}. "
        + (f"It has {', '.join(there)}." if there else "Define it there, at the top level of the file.")
    )


def make(kind: type, config: dict[str, Any]) -> Model:
    """An instance, made with `config` if its constructor takes an argument, and checked."""
    try:
        takes_config = bool(inspect.signature(kind).parameters)
    except ValueError:  # a class of a compiled library
        takes_config = False
    model = kind(config) if takes_config else kind()
    if problems := faults(model, world=config["size"]):
        listed = "".join(f"\n    {problem}" for problem in problems)
        raise InvalidArgument(
            f"{kind.__name__} cannot be trained. Of what a model needs, {len(problems)} are missing or wrong:{listed}\n"
            "Correct the class; docs/model.md has a complete example."
        )
    return model


def faults(model: Any, *, world: int = 1) -> list[str]:
    """All violations of the contract, each with what is expected."""
    found = [*_params_faults(model), *_data_faults(getattr(model, "data", None), world)]
    for name, (arguments, what) in _METHODS.items():
        found += _method_faults(model, name, arguments, what)
    for name in ("n_epochs", "snapshot_epochs", "record_every"):
        value = getattr(model, name, 1)
        if not _is_count(value) or (value < 1 and name != "snapshot_epochs"):
            found.append(f"{name} is {value!r}: it is an integer, 1 or more, or left out")
    return found


def shareable(params: Any) -> Any:
    """Parameters as `worker.share` accepts them: a list of torch parameters becomes a module."""
    if isinstance(params, Sequence):
        return sys.modules["torch"].nn.ParameterList(cast(Sequence[Any], params))
    return params


def _params_faults(model: Any) -> list[str]:
    params = getattr(model, "params", None)
    if params is None:
        return [f"params is missing: {_PARAMS}"]
    if isinstance(params, Mapping):
        values = cast(Mapping[str, Any], params)
        wrong = [name for name, value in values.items() if not isinstance(value, np.ndarray)]
        if values and not wrong:
            return []
        return [
            f"params is a dict {f'whose {wrong[0]!r} is not a NumPy array' if wrong else 'without entries'}: {_PARAMS}"
        ]
    return [] if _is_torch(params) else [f"params is {_described(params)}: {_PARAMS}"]


def _is_torch(params: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(params, list | tuple) and params:
        return all(isinstance(one, torch.nn.Parameter) for one in cast(Sequence[Any], params))
    return isinstance(params, torch.nn.Module)


def _described(params: Any) -> str:
    if not isinstance(params, list | tuple):
        return f"of type {type(params).__name__}"
    kinds = sorted({type(one).__name__ for one in cast(Sequence[Any], params)})
    return f"a list of {', '.join(kinds) or 'no items'}"


def _data_faults(data: Any, world: int) -> list[str]:
    train = "data.n_batch_train", "an integer: the batches of an epoch, over all workers"
    val = "data.n_batch_val", "an integer: the batches of the validation data; 0 for none"
    if data is None:
        return [f"{name} is missing: {what}" for name, what in (train, val)]
    found: list[str] = []
    for name, what in (train, val):
        value = getattr(data, name.removeprefix("data."), None)
        if value is None:
            found.append(f"{name} is missing: {what}")
        elif not _is_count(value):
            found.append(f"{name} is {value!r}: {what}")
    batches = getattr(data, "n_batch_train", None)
    if batches is not None and _is_count(batches) and batches < world:
        found.append(f"{train[0]} is {batches}, but there are {world} workers, and each needs a batch")
    return found


def _method_faults(model: Any, name: str, arguments: tuple[str, ...], what: str) -> list[str]:
    form = f"{name}({', '.join(('self', *arguments))})"
    method = getattr(model, name, None)
    if method is None:
        return [f"{form} is missing: it {what}"]
    if not callable(method):
        return [f"{name} is of type {type(method).__name__}: it is a method {form} that {what}"]
    try:
        signature = inspect.signature(method)
    except ValueError:  # of a compiled library
        return []
    try:
        signature.bind(*arguments)
    except TypeError:
        return [f"{name}{signature} has other arguments: it is {form}, and {what}"]
    return []


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)
