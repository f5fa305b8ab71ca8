"""The registry of adapters: finds the one whose framework a model is of.

Adapters of other packages register in the entry point group `maniple.adapters`, under their framework's import name:

    [project.entry-points."maniple.adapters"]
    jax = "maniple_jax:JaxAdapter"

An adapter is imported only if its framework is in `sys.modules`: without it there is no model to share, and nothing is
imported for the sake of a check.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from maniple.adapters.base import Adapter
from maniple.adapters.numpy_arrays import NumpyAdapter
from maniple.errors import InvalidArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "maniple.adapters"


def adapt(model: Any, optimizer: Any = None, **settings: Any) -> Adapter:
    """Adapt `model`, of any known framework.

    Args:
        model: a dict of NumPy arrays, changed in place; a torch module; torch parameters: a dict of them, a list,
            `model.parameters()`; or what a registered adapter accepts.
        optimizer: the optimizer that trains it, if any.
        settings: `state`, `buffers` and `params`, as `Worker.share` takes them.
    """
    return adapter_for(model)(model, optimizer, **settings)


def adapter_for(model: Any) -> type[Adapter]:
    """The adapter that accepts `model`: a built-in one, else one that another package has registered."""
    for adapter in _adapters():
        if adapter.accepts(model):
            return adapter
    # No adapter is certain. The likely one names what it does not accept; torch also takes iterators of parameters,
    # which cannot be inspected without consuming them.
    if isinstance(model, Mapping):
        return NumpyAdapter
    if "torch" in sys.modules and isinstance(model, Iterable) and not isinstance(model, str | bytes):
        from maniple.adapters.torch_module import TorchAdapter

        if not hasattr(model, "dtype"):  # a single array or tensor
            return TorchAdapter
    raise InvalidArgument(
        f"a model of type {type(model).__module__}.{type(model).__qualname__} cannot be shared. "
        "Pass a torch.nn.Module, its parameters, a dict from names to NumPy arrays, or a model of a framework whose "
        f"adapter is installed (entry point group {GROUP!r})."
    )


def _adapters() -> Iterator[type[Adapter]]:
    """The adapters of all imported frameworks, built-in ones first."""
    if "torch" in sys.modules:
        from maniple.adapters.torch_module import TorchAdapter

        yield TorchAdapter
    yield NumpyAdapter
    from importlib.metadata import entry_points  # 20 ms, which models of built-in adapters do not need

    for entry_point in entry_points(group=GROUP):
        if entry_point.name in sys.modules:
            yield _load(entry_point)


def _load(entry_point: "EntryPoint") -> type[Adapter]:
    try:
        adapter = entry_point.load()
    except Exception as error:
        raise InvalidArgument(
            f"the adapter {entry_point.value} for {entry_point.name} cannot be imported: {type(error).__name__}: "
            f"{error}. Repair or uninstall the package that registers it in {GROUP!r}."
        ) from error
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise InvalidArgument(
            f"{entry_point.value}, registered in {GROUP!r} for {entry_point.name}, is no subclass of "
            "maniple.adapters.Adapter. Derive it from that class, or uninstall the package."
        )
    return adapter
