"""The adapters: a framework's model seen as named flat arrays (`contracts.Model`)."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from maniple.adapters.arrays import Arrays, Average, Gather, Params
from maniple.contracts import Array, Model, Part
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.place.machine import visible_gpus


class Adapter(Model, Protocol):
    """A model that also tells when its optimizer has made a step."""

    def on_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` after each step of the optimizer; gives back what undoes it."""
        ...

    def before_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` before each step of the optimizer; gives back what undoes it."""
        ...

    def on_forward(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` before each forward pass that trains, where that can be seen; gives back what undoes it."""
        ...

    @property
    def parameter_count(self) -> int:
        """How many of the entries, the first ones, are parameters."""
        ...

    def is_buffer(self, i: int) -> bool:
        """Entry i is a buffer, such as the running statistics of a normalisation layer."""
        ...

    @property
    def has_optimizer(self) -> bool:
        """There is an optimizer, before whose steps `before_step` is called."""
        ...

    def averaged_buffers(self, norm: str) -> list[int]:
        """The entries that are buffers and averaged with the gradients, by this setting of the rule."""
        ...

    def gradients(self, *, norm: str) -> "Flat":
        """The gradients as flat vectors, with the buffers that are averaged too."""
        ...

    def buckets(self, *, norm: str) -> "InBuckets | None":
        """The same, in parts that are complete one after the other; None where nothing tells when they are."""
        ...

    @property
    def device(self) -> str:
        """Where the parameters lie, as torch calls it."""
        ...

    def synchronise_norm(self, total: Callable[[Array], None]) -> Callable[[], None]:
        """Let batch-norm layers count the batches of all workers; `total` sums an array over them, in place."""
        ...

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The optimizer's state as named arrays and plain values."""
        ...

    def restore_optimizer(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Give the optimizer such a state."""
        ...

    @property
    def local_buffers(self) -> Sequence[str]:
        """The names of floating-point buffers that are not shared, because they were not finite."""
        ...

    def refuse_wrapping(self) -> Callable[[], None]:
        """Raise InvalidArgument when somebody wraps the model from now on; gives back what undoes it."""
        ...

    def before_foreign_step(self, act: Callable[[Sequence[Any]], None]) -> Callable[[], None]:
        """Call `act` with the parameters of any other optimizer before its steps; gives back what undoes it."""
        ...

    def settle_moments(self, momentum: str, average: Average, gather: Gather) -> None:
        """The parameters are averaged: "keep" the optimizer's moments, "average" them too, or "reset" them."""
        ...


class Flat(Protocol):
    """Gradients that are averaged in flat vectors."""

    @property
    def layout(self) -> Layout:
        """The entries of the vectors."""
        ...

    @property
    def sizes(self) -> dict[str, int]: ...
    def begin(self) -> None:
        """Training begins, or goes on from here."""
        ...

    def owns(self, parameters: Sequence[Any]) -> bool: ...
    def on_gradient(self, act: Callable[[], None]) -> Callable[[], None]: ...
    def spoil(self, entry: int) -> bool: ...
    def drop(self) -> None: ...
    def place(self, flat: dict[str, Any]) -> None: ...
    @property
    def are_delivered(self) -> bool:
        """The gradients are those of the last average, as far as one can tell."""
        ...

    def collect(self, given: Mapping[str, Array] | None = None) -> None: ...
    def deliver(self, given: Mapping[str, Array] | None = None) -> None: ...


class InBuckets(Flat, Protocol):
    """Gradients that are complete in parts, while a backward pass goes on."""

    @property
    def parts(self) -> Sequence[Part]: ...
    def watch(self, on_part: Callable[[], None], on_end: Callable[[], None]) -> Callable[[], None]: ...
    def paused(self) -> AbstractContextManager[None]: ...


def adapt(
    model: Any, optimizer: Any = None, *, state: Sequence[str] = (), buffers: bool = True, params: Params | None = None
) -> Adapter:
    """See `model` as named flat arrays.

    Args:
        model: a dict of NumPy arrays, changed in place; a torch module; or torch parameters: a dict of them, a list,
            `model.parameters()`.
        optimizer: the torch optimizer that trains it, if any.
        state: names of optimizer state to share too, such as "momentum_buffer" or "exp_avg".
        buffers: share floating-point buffers too, such as batch-norm statistics.
        params: which parameters are shared: names, patterns such as "head.*", or a function of name and parameter.
    """
    # A torch module can only exist where torch was imported already: nothing is imported here for others.
    torch = sys.modules.get("torch")
    if torch is not None and (isinstance(model, torch.nn.Module) or _holds_tensors(model, torch.Tensor)):
        from maniple.adapters.torch import Module

        return Module(model, optimizer, state=state, buffers=buffers, params=params)
    if isinstance(model, Mapping):
        if optimizer is not None or state:
            raise InvalidArgument(
                "a dict of arrays has no optimizer to hook, but one was given. "
                "Leave `optimizer` and `state` out, and call replica.step() after each update."
            )
        return Arrays(cast(Mapping[str, Any], model), params=params)
    raise InvalidArgument(
        f"a model of type {type(model).__module__}.{type(model).__qualname__} cannot be shared. "
        "Pass a torch.nn.Module, its parameters, or a dict from names to NumPy arrays."
    )


def _holds_tensors(model: Any, tensor: type) -> bool:
    """It is a collection of torch parameters, or perhaps meant as one: an iterator is not looked into."""
    if isinstance(model, Mapping):
        return any(isinstance(value, tensor) for value in cast(Mapping[Any, Any], model).values())
    return isinstance(model, Iterable) and not isinstance(model, tensor | str | bytes) and not hasattr(model, "dtype")


def own_device(number: int) -> str:
    """The GPU of worker `number` of a machine, where torch is in use and finds one; else the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"cuda:{number % torch.cuda.device_count()}"
    return "cpu"


def gpu_of(device: str) -> tuple[str, str]:
    """The name of a GPU, which no other of this machine has, and why NCCL cannot reach it; both may be empty."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return "", ""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    # By its own number: with CUDA_VISIBLE_DEVICES each worker may call another GPU cuda:0.
    name = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or f"{visible_gpus()} {device}"
    return name, "" if has_nccl else "has a torch that was built without NCCL"
