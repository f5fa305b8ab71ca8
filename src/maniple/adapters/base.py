"""The adapter interface: a framework's model seen as named flat arrays, with optional capabilities.

An adapter has to implement `accepts`, the constructor, `array` and `commit`. The rest has defaults that suit a
framework without hooks: the training loop calls `replica.step()` itself, and passes gradients to
`replica.reduce(gradients)`. `registry` finds the adapter of a model.
"""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from maniple.contracts import Array, Bucket, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout

Average = Callable[[Array, bool], None]  # averages an array over the workers in place; False: without this worker's
Gather = Callable[[bytes], list[bytes]]  # the messages of all workers
Params = str | Iterable[str] | Callable[[str, Any], bool]  # names and patterns, or a predicate of name and parameter
Unhook = Callable[[], None]  # removes a hook


class Adapter:
    """A model of one framework as named flat arrays (`contracts.FlatModel`).

    The constructor takes what `Worker.share` takes: `Adapter(model, optimizer, state=..., buffers=..., params=...)`.

    Attributes:
        entries: the shared arrays: parameters first, then buffers, then optimizer state.
        has_optimizer: an optimizer was given whose steps call the hooks of `on_step` and `before_step`.
        suits_bsp: the default rule may be bsp, since gradients can be averaged before each step of the optimizer.
        device: where the parameters are, in torch's terms: "cpu" or "cuda:0".
        local_buffers: names of floating-point buffers that are not shared, because they were not finite.
    """

    entries: list[Entry]
    has_optimizer: bool = False
    suits_bsp: bool = False
    device: str = "cpu"
    local_buffers: Sequence[str] = ()

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """True if `model` is of this adapter's framework. Called only if the framework was imported."""
        raise NotImplementedError(f"{cls.__name__} must define accepts(model)")

    def __init__(self, model: Any, optimizer: Any = None, **settings: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define __init__(model, optimizer, ...)")

    # Values

    def begin(self) -> None:
        """Prepare a pass over the entries, and forget what an interrupted one has left."""

    def array(self, i: int) -> Array:
        """Entry i in the center's dtype, flat and contiguous: its own memory where possible, else a copy."""
        raise NotImplementedError(f"{type(self).__name__} must define array(i)")

    def commit(self, i: int) -> None:
        """Write a copy that `array(i)` has made back to the model."""
        raise NotImplementedError(f"{type(self).__name__} must define commit(i)")

    def flat_vectors(self) -> tuple[dict[str, Array], int] | None:
        """One flat vector per dtype, and how many entries, the first ones, are views of them; None if there are none.

        Called at the start of each pass.
        """
        return None

    @property
    def parameter_count(self) -> int:
        """The number of entries that are parameters; they come first."""
        return len(self.entries)

    def is_buffer(self, i: int) -> bool:
        """Entry i is a buffer, such as the running statistics of a normalisation layer."""
        del i
        return False

    # Capability: hooks. Each registers a function and gives back what removes it.

    def on_step(self, act: Callable[[], None]) -> Unhook:
        """Call `act` after each step of the optimizer."""
        return _no_hook(act)

    def before_step(self, act: Callable[[], None]) -> Unhook:
        """Call `act` before each step of the optimizer."""
        return _no_hook(act)

    def on_forward(self, act: Callable[[], None]) -> Unhook:
        """Call `act` before each forward pass that trains."""
        return _no_hook(act)

    def before_foreign_step(self, act: Callable[[Sequence[Any]], None]) -> Unhook:
        """Call `act` with the parameters of any other optimizer of the framework before its steps."""
        return _no_hook(act)

    def refuse_wrapping(self) -> Unhook:
        """Raise InvalidArgument when another library wraps the model to average it too."""
        return _no_hook()

    # Capability: gradients

    def gradients(self, *, norm: str) -> "FlatGradients":
        """The gradients as flat vectors, with the buffers that are averaged too. Default: the loop passes them."""
        del norm
        return PassedGradients(self.entries)

    def buckets(self, *, norm: str) -> "GradientBuckets | None":
        """The gradients in parts that the backward pass completes one after the other; None if it cannot tell."""
        del norm
        return None

    def averaged_buffers(self, norm: str) -> list[int]:
        """The entries that are buffers and averaged with the gradients, for this setting of the rule."""
        del norm
        return []

    def synchronise_norm(self, total: Callable[[Array], None]) -> Unhook:
        """Let batch-norm layers use the batches of all workers; `total` sums an array over them in place."""
        del total
        raise InvalidArgument(
            'norm="synchronised" is for torch modules; a dict of arrays or a model of another framework has no '
            "batch-norm layers that can be synchronised. Leave it out."
        )

    # Capability: optimizer state

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The optimizer's state as named arrays and JSON values; empty without an optimizer."""
        return {}, {}

    def restore_optimizer(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Set the optimizer to a state that `optimizer_state` has given."""

    def use_nesterov(self, momentum: float) -> None:
        """Let the optimizer step with Nesterov's momentum; InvalidArgument if it has none, or another one."""
        raise InvalidArgument(
            f"the rule needs an optimizer with Nesterov's momentum of {momentum:g}, but none was given that can have "
            "it. Give share() a torch module and torch.optim.SGD(model.parameters(), lr=...), or choose EASGD."
        )

    def without_look_ahead(self) -> AbstractContextManager[None]:
        """In this block, the parameters are without the look-ahead of Nesterov's momentum."""
        return nullcontext()

    def reduce_moments(self, momentum: str, average: Average, gather: Gather) -> None:
        """When parameters are averaged: "keep" the optimizer's moments, "average" or "reset" them."""


class FlatGradients:
    """Gradients that are averaged as flat vectors, one per dtype. The defaults suit gradients that the loop passes.

    Attributes:
        layout: the entries of the vectors.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.layout = Layout(entries)

    @property
    def gradient_count(self) -> int:
        """The number of entries that are gradients; they come first."""
        return len(self.layout.entries)

    def place(self, flat: dict[str, Any]) -> None:
        """Use these vectors, which are where the collectives reduce them."""
        raise NotImplementedError

    def begin(self) -> None:
        """Note the buffers as they are, before the first round."""

    def collect(self, given: Mapping[str, Array] | None = None) -> None:
        """Write this worker's gradients to the vectors; `given`: those that the loop has passed."""
        raise NotImplementedError

    def deliver(self, given: Mapping[str, Array] | None = None) -> None:
        """Give the average in the vectors to the parameters, or write it to `given`."""
        raise NotImplementedError

    @property
    def is_delivered(self) -> bool:
        """The parameters have the gradients of the last average, as far as can be known."""
        return True  # the loop calls reduce() when it has new ones

    def owns(self, parameters: Iterable[Any]) -> bool:
        """Some of these parameters have their gradients here."""
        del parameters
        return False  # no optimizer of a framework trains arrays that the loop computes with

    def on_gradient(self, act: Callable[[], None]) -> Unhook:
        """Call `act` for each gradient that a backward pass adds."""
        return _no_hook(act)

    def spoil(self, entry: int) -> bool:
        """Make gradient `entry` NaN in all workers, so that loss scaling skips the step; False if it cannot."""
        del entry
        return False  # the loop uses passed gradients at once, so they must be finite

    def drop(self) -> None:
        """Set the gradients to none: no worker had a finite contribution."""
        raise NotImplementedError


class GradientBuckets(FlatGradients):
    """Gradients that a backward pass completes in parts."""

    @property
    def parts(self) -> Sequence[Bucket]:
        """The ranges of the parts, in the order in which they are sent."""
        raise NotImplementedError

    def watch(self, on_part: Callable[[], None], on_end: Callable[[], None]) -> Unhook:
        """Call `on_part` for each part that is complete, and `on_end` after a backward pass."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[None]:
        """Ignore backward passes in this block."""
        raise NotImplementedError


class PassedGradients(FlatGradients):
    """Gradients that the training loop passes to `replica.reduce(gradients)`, as a dict of arrays."""

    def place(self, flat: dict[str, Any]) -> None:
        self._views = self.layout.views(flat)

    def drop(self) -> None:
        for view in self._views:
            view[:] = 0

    def collect(self, given: Mapping[str, Array] | None = None) -> None:
        for entry, view in zip(self.layout.entries, self._views, strict=True):
            value = None if given is None else given.get(entry.name)
            if value is None or np.shape(value) != entry.shape:
                raise InvalidArgument(
                    f"reduce() got {described_array(value)} as the gradient of {entry}. For a model of NumPy arrays, "
                    "pass a dict with a gradient of its shape for each."
                )
            view[:] = np.asarray(value).reshape(-1)

    def deliver(self, given: Mapping[str, Array] | None = None) -> None:
        assert given is not None
        for entry, view in zip(self.layout.entries, self._views, strict=True):
            given[entry.name][...] = view.reshape(entry.shape)


def choose_parameters(named: Mapping[str, Any], params: Params | None, *, setting: str = "params") -> set[str]:
    """The names of the parameters to share: all of them for None. `setting` is what an error calls `params`."""
    if params is None:
        return set(named)
    if callable(params):
        try:
            chosen = {name for name, value in named.items() if params(name, value)}
        except TypeError as error:
            raise InvalidArgument(
                f"{setting}={params!r} cannot be called with a name and a parameter: {error}. Write for instance "
                f"{setting}=lambda name, p: p.requires_grad."
            ) from error
    else:
        patterns: list[Any] = [params] if isinstance(params, str) or not hasattr(params, "__iter__") else list(params)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise InvalidArgument(
                f"{setting}={params!r} chooses nothing: names, patterns or a function of name and parameter do. Write "
                f'for instance {setting}=["head.*"].'
            )
        chosen = {name for pattern in patterns for name in _matching(pattern, named, setting)}
    if not chosen:
        raise InvalidArgument(
            f"{setting}={params!r} chooses none of the {len(named)} parameters ({_first_names(named)}), and at least 1 "
            "must be chosen. Choose others, or leave it out to take all."
        )
    return chosen


def described_array(value: Any) -> str:
    """What a value is, for an error message: its dtype and shape."""
    if not isinstance(value, np.ndarray):
        return "nothing" if value is None else f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}{'' if value.flags.writeable else ', read-only'}"


def _matching(pattern: str, named: Mapping[str, Any], setting: str) -> list[str]:
    if found := [pattern] if pattern in named else fnmatch.filter(named, pattern):
        return found
    near = difflib.get_close_matches(pattern, named, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "Give a name, or a pattern such as 'head.*'."
    raise InvalidArgument(
        f"{setting}= has {pattern!r}, which is none of the {len(named)} parameters ({_first_names(named)}). {hint}"
    )


def _first_names(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


def _no_hook(*_: Any) -> Unhook:
    """What removes a hook that the framework does not have."""
    return lambda: None
