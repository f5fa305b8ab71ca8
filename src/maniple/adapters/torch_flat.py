"""Parameters of a torch module as views of one flat vector per dtype, so that an exchange needs no pass over them.

    flat vector     [w w w w w w b b b]
    parameters       w.data      b.data     views of it: optimizers, hooks and names are as before

Only parameters on the CPU that own their memory alone are moved: what another tensor or process can see stays where it
is, and the whole model is then exchanged parameter by parameter. Buffers stay too, since a deep copy of a buffer copies
all of the memory that it is a view of.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from maniple.contracts import Array
from maniple.layout import Layout


class FlatParameters:
    """The parameters `names` of a module, the first entries of `layout`, in flat vectors."""

    def __init__(self, module: nn.Module, names: list[str], layout: Layout) -> None:
        self._module, self._names, self._layout = module, names, layout
        self._vectors: dict[str, Tensor] = {}
        self._arrays: dict[str, Array] = {}  # the same memory
        self._parameters: list[Tensor] = []
        self._addresses: list[int] = []  # where the parameters have to be
        self._is_usable = True
        self._are_known = False  # no module or parameter was registered anywhere since they were looked up
        me = weakref.ref(self)

        def on_registration(*_: Any) -> None:
            if (flat := me()) is not None:
                flat._are_known = False

        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            weakref.finalize(self, register(on_registration).remove)

    def vectors(self) -> dict[str, Array] | None:
        """The flat vectors, up to date; None if some parameter cannot be kept in them. The same dict until they move.

        Parameters may be replaced at any time (`module.weight = ...`, `p.data = ...`, load_state_dict(assign=True)), so
        this looks where they are. A new one is copied into its place.
        """
        if self._is_usable and not self._is_intact():
            self._is_usable = self._move()
        if not self._is_usable:
            self._vectors, self._arrays = {}, {}
            return None
        return self._arrays

    def _is_intact(self) -> bool:
        """Whether all parameters are the known ones, in their places. With hundreds of them, a loop would take long."""
        return self._are_known and [*map(Tensor.data_ptr, self._parameters)] == self._addresses

    def _move(self) -> bool:
        """Copy the parameters to their places and let them be views; False if that is not safe."""
        places = self._layout.places[: len(self._names)]
        parameters = [_find(self._module, name) for name in self._names]
        if not self._vectors:
            sizes = {dtype: 0 for dtype, _, _ in self._layout.places} | {dtype: stop for dtype, _, stop in places}
            self._vectors = {dtype: torch.empty(size, dtype=getattr(torch, dtype)) for dtype, size in sizes.items()}
        self._addresses = [
            self._vectors[dtype][start:].data_ptr() if start < stop else 0 for dtype, start, stop in places
        ]
        moving: list[tuple[Tensor, tuple[str, int, int], tuple[int, ...]]] = []
        for tensor, address, place, entry in zip(
            parameters, self._addresses, places, self._layout.entries, strict=False
        ):
            if tensor is None:
                return False
            if tensor.data_ptr() != address or tensor.shape != entry.shape:
                moving.append((tensor, place, entry.shape))
        addresses = {tensor.data_ptr() for tensor, _, _ in moving if tensor.numel()}
        if len(addresses) < sum(tensor.numel() > 0 for tensor, _, _ in moving):
            return False  # two parameters with the same memory
        if not all(_owns_memory(tensor, place, shape) for tensor, place, shape in moving):
            return False
        with torch.no_grad():
            for tensor, (dtype, start, stop), shape in moving:
                view = self._vectors[dtype][start:stop].view(shape)
                view.copy_(tensor)
                tensor.data = view
        self._parameters = [tensor for tensor in parameters if tensor is not None]
        self._addresses = [*map(Tensor.data_ptr, self._parameters)]
        # `share_memory()` moves the memory of the vectors; then the parameters, their views, have other addresses too.
        self._arrays = {dtype: vector.numpy() for dtype, vector in self._vectors.items()}
        self._are_known = True
        return True


def _find(module: nn.Module, name: str) -> Tensor | None:
    """The parameter of this name; None if there is none in the tree of modules."""
    *path, key = name.split(".")
    found: Any = module
    for part in path:
        found = vars(found)["_modules"].get(part)
        if found is None:
            return None
    return vars(found)["_parameters"].get(key)


def _owns_memory(tensor: Tensor, place: tuple[str, int, int], shape: tuple[int, ...]) -> bool:
    """Whether a parameter can move: it is an ordinary tensor on the CPU, and nothing else uses its memory."""
    return (
        type(tensor) in {nn.Parameter, Tensor}
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype == getattr(torch, place[0])
        and tensor.shape == shape
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not tensor.is_shared()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
