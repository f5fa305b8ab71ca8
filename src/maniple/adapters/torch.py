"""A torch module as a model: parameters, floating-point buffers and, on request, optimizer state.

On the CPU a contiguous float32 or float64 parameter is exchanged in its own memory. Everything else goes
through a staging copy: half precision (the center is float32), channels-last and other strides, and CUDA,
where one pinned host buffer takes the whole model in asynchronous copies.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maniple.adapters.arrays import Average, Gather, Params, choose
from maniple.adapters.buckets import Buckets
from maniple.adapters.gradients import Gradients
from maniple.adapters.moments import average_moments, moments, packed, unpack
from maniple.adapters.norm import normed_buffers, synchronise
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, dtype_name, flat_dtype

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class Module:
    """A torch module, or parameters without one; tied parameters are counted once.

    Whole numbers, such as the random state that Keras keeps in parameters, have no mean: they stay each worker's own.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        state: Sequence[str] = (),
        buffers: bool = True,
        params: Params | None = None,
    ) -> None:
        module = model if isinstance(model, nn.Module) else Listed(model)
        _refuse_wrapped(module)
        self._module = module
        self._optimizer = _checked(optimizer)
        if state and optimizer is None:
            raise InvalidArgument(f"state={tuple(state)!r} was asked for without an optimizer. Pass the optimizer too.")
        state = (state,) if isinstance(state, str) else state
        self._tensors: list[Callable[[], Tensor | None]] = []
        self.entries: list[Entry] = []
        # Values may be replaced while training (`module.weight = ...`, load_state_dict(assign=True)), so they
        # are looked up by name in each pass.
        names = dict(module.named_parameters(remove_duplicate=False))
        chosen = {id(names[name]) for name in choose(names, params)}
        parameters = {
            name: (_lookup(module, name), value)
            for name, value in module.named_parameters()
            if id(value) in chosen and (value.is_floating_point() or value.is_complex() or is_lazy(value))
        }
        for name, (lookup, parameter) in parameters.items():
            if is_lazy(parameter):
                raise InvalidArgument(
                    f"parameter {name!r} has no shape yet: its layer waits for the first batch. "
                    "Pass one batch through the model, and share it then."
                )
            self._append(name, parameter, lookup)
        self.parameter_count = len(self.entries)
        self._shared_names = set(parameters)
        self._local_names = {name for name, _ in module.named_parameters()} - self._shared_names
        self.local_buffers: list[str] = []
        for name, buffer in module.named_buffers() if buffers else ():
            if buffer.is_floating_point() and not buffer.isfinite().all():  # a mask of -inf, which has no mean
                self.local_buffers.append(name)
            elif buffer.is_floating_point():
                self._append(name, buffer, _lookup(module, name))
        self._first_state = len(self.entries)
        if self._optimizer is not None:
            ours = {id(p) for p in self._trained()}
            for key in state:
                for name, (lookup, parameter) in parameters.items():
                    if id(parameter) in ours:
                        self._append(f"{key}.{name}", parameter, self._state(lookup, key))
        # By reference, not by id alone: a new parameter may get the id of one that was replaced and freed.
        self._known = {id(p): weakref.ref(p) for p in self._trained()}
        self._dtypes = [getattr(torch, flat_dtype(entry)) for entry in self.entries]
        self._values: list[Tensor] = []  # of this pass
        self._staged: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}  # optimizer state that came from the center before it exists here
        self._pinned: list[Tensor] | None = None
        self._returned: dict[torch.device, torch.cuda.Event] = {}  # the newest copy back to each GPU

    def on_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` after each `optimizer.step()`; gives back what undoes it."""
        if self._optimizer is None:
            return lambda: None

        def after_step(*_: Any) -> None:
            _refuse_wrapped(self._module)  # fully_shard changes the module itself
            self._refuse_unknown()
            if self._late:
                self._deliver()
            act()

        return self._optimizer.register_step_post_hook(after_step).remove

    def before_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` before each `optimizer.step()`; gives back what undoes it."""
        if self._optimizer is None:
            return lambda: None

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(value is not None for value in (*args[1:2], kwargs.get("closure"))):
                raise InvalidArgument(
                    "optimizer.step(closure) computes gradients after the workers have averaged theirs, so replicas "
                    "would part. Call backward() before step(), or average parameters: LocalSGD(k)."
                )
            act()

        return self._optimizer.register_step_pre_hook(before_step).remove

    def on_forward(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act` before each forward pass of the module in training mode and with gradients; gives back what
        undoes it.

        What is compiled with the module does not call it.
        """
        return self._module.register_forward_pre_hook(_Forward(act)).remove

    def refuse_wrapping(self) -> Callable[[], None]:
        """Raise InvalidArgument when somebody wraps the module from now on; gives back what undoes it."""
        module = self._module

        def hook(parent: nn.Module, _: str, child: nn.Module | None) -> None:
            wrapper = _wrapper(type(parent))
            if wrapper and child is not None and any(part is module for part in child.modules()):
                raise InvalidArgument(
                    f"the model is being wrapped in {wrapper} after share(), but is averaged already: gradients would "
                    "be averaged twice, or parameters be sharded. Leave the wrapper out: no "
                    "DistributedDataParallel(model), no accelerator.prepare(model). Or leave share() out."
                )

        return register_module_module_registration_hook(hook).remove

    def before_foreign_step(self, act: Callable[[Sequence[Tensor]], None]) -> Callable[[], None]:
        """Call `act` with the parameters of any other optimizer before its steps; gives back what undoes it."""

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer is not self._optimizer:
                act([p for group in optimizer.param_groups for p in group["params"]])

        return register_optimizer_step_pre_hook(before_step).remove

    @property
    def has_optimizer(self) -> bool:
        """There is an optimizer, before whose steps `before_step` is called."""
        return self._optimizer is not None

    def is_buffer(self, i: int) -> bool:
        """Entry i is neither a parameter nor optimizer state."""
        return self.parameter_count <= i < self._first_state

    def averaged_buffers(self, norm: str) -> list[int]:
        """All of them; none if they are local, and of a synchronised norm those that it does not compute itself."""
        if norm == "local":
            return []
        synchronised = normed_buffers(self._module) if norm == "synchronised" else set[str]()
        return [i for i in range(self.parameter_count, self._first_state) if self.entries[i].name not in synchronised]

    def gradients(self, *, norm: str) -> Gradients:
        """The gradients as flat vectors."""
        return Gradients(self._module, buffers=self._averaged(norm), trained=self._trained, local=self._local_names)

    def buckets(self, *, norm: str) -> Buckets:
        """The same, in parts that are complete one after the other."""
        return Buckets(self._module, buffers=self._averaged(norm), trained=self._trained, local=self._local_names)

    def _averaged(self, norm: str) -> dict[str, Callable[[], Tensor]]:
        return {self.entries[i].name: functools.partial(self._tensor, i) for i in self.averaged_buffers(norm)}

    def _is_known(self, parameter: Tensor) -> bool:
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter

    def _refuse_unknown(self) -> None:
        """Raise InvalidArgument if the optimizer trains a parameter that was no part of the model when it was shared.

        Parameters that it trained beside the model then are the script's own, and one that has taken the place of a
        shared one is shared under its name.
        """
        news = [p for p in self._trained() if p.grad is not None and not self._is_known(p)]
        if news:
            names = {id(p): name for name, p in self._module.named_parameters()}
            known = self._shared_names | self._local_names
            if unknown := [p for p in news if names.get(id(p)) not in known]:
                raise InvalidArgument(
                    f"{names.get(id(unknown[0]), 'a parameter of the optimizer')!r} is trained but not shared: it was "
                    f"added to the optimizer after share(), where the model had {self.parameter_count} parameters. "
                    "Share the model after it is built, with all parameters in the optimizer."
                )
            self._known.update((id(p), weakref.ref(p)) for p in news)

    def _trained(self) -> Iterator[Tensor]:
        """The parameters that the optimizer changes."""
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            yield from group["params"]

    @property
    def device(self) -> str:
        """The GPU on which all parameters lie, else the CPU."""
        found = {str(p.device) for name, p in self._module.named_parameters() if name in self._shared_names}
        return found.pop() if len(found) == 1 and all(name.startswith("cuda") for name in found) else "cpu"

    def synchronise_norm(self, total: Callable[[Array], None]) -> Callable[[], None]:
        """Let batch-norm layers count the batches of all workers; gives back what undoes it."""
        return synchronise(self._module, total)

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The optimizer's state as named arrays and plain values."""
        if self._optimizer is None:
            return {}, {}
        arrays, plain = packed(self._optimizer)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        plain["kind"] = type(self._optimizer).__name__
        plain["parameters"] = [[names.get(id(one), ""), list(one.shape)] for one in self._trained()]
        return arrays, plain

    def restore_optimizer(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Give the optimizer such a state."""
        if self._optimizer is not None:
            unpack(self._optimizer, arrays, plain)

    def settle_moments(self, momentum: str, average: Average, gather: Gather) -> None:
        """Average the optimizer's moments, or set them to zero; each worker may also keep its own."""
        if self._optimizer is None or momentum == "keep":
            return
        local = {id(p) for name, p in self._module.named_parameters() if name in self._local_names}
        if momentum == "average":
            average_moments(self._optimizer, average, gather, local)
            return
        for tensor in moments(self._optimizer, local).values():
            tensor.zero_()

    def begin(self) -> None:
        """Bring what lies on a GPU into pinned host memory, all copies in flight at once."""
        self._staged.clear()  # of a pass that was cut short
        self._values = [self._tensor(i) for i in range(len(self.entries))]
        on_gpu = [(i, value) for i, value in enumerate(self._values) if value.is_cuda]
        if not on_gpu:
            return
        if self._pinned is None:
            layout = Layout(self.entries)
            flat = {dtype: _pinned(size, dtype) for dtype, size in layout.sizes.items()}
            self._pinned = [flat[dtype][start:stop] for dtype, start, stop in layout.places]
        devices = {tensor.device for _, tensor in on_gpu}
        for device in devices & self._returned.keys():  # the last pass' copies back, perhaps on another stream
            torch.cuda.current_stream(device).wait_event(self._returned[device])
        for i, tensor in on_gpu:
            self._staged[i] = self._pinned[i]
            self._pinned[i].view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def array(self, i: int) -> Array:
        """The parameter's own memory, or its staging copy, flat and in the center's dtype."""
        if (staged := self._staged.get(i)) is not None:
            return staged.numpy()
        tensor, dtype = self._values[i], self._dtypes[i]
        if tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous():
            return tensor.numpy().reshape(-1)
        staged = tensor.to("cpu", dtype, memory_format=torch.contiguous_format, copy=True).view(-1)
        self._staged[i] = staged
        return staged.numpy()

    def commit(self, i: int) -> None:
        """Write a staging copy back. To a GPU it flies asynchronously: the next `begin` waits for it."""
        if (staged := self._staged.pop(i, None)) is not None:
            tensor = self._values[i]
            tensor.copy_(staged.view(tensor.shape), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                returned = self._returned.setdefault(tensor.device, torch.cuda.Event())
                returned.record(torch.cuda.current_stream(tensor.device))

    def _append(self, name: str, like: Tensor, lookup: Callable[[], Tensor | None]) -> None:
        self.entries.append(Entry(name, tuple(like.shape), dtype_name(like)))
        self._tensors.append(lookup)

    def _tensor(self, i: int) -> Tensor:
        tensor, entry = self._tensors[i](), self.entries[i]
        if tensor is None and i >= self._first_state:  # optimizers make their state in the first step
            if i not in self._late:
                self._late[i] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            return self._late[i]
        if tensor is None or tensor.shape != entry.shape:
            became = "nothing" if tensor is None else str(tuple(tensor.shape))
            raise InvalidArgument(
                f"{entry.name!r} has become {became}, but was shared as {entry}. "
                "Keep the shapes of a shared model, or share the new one."
            )
        return tensor.detach()

    def _state(self, owner: Callable[[], Tensor | None], key: str) -> Callable[[], Tensor | None]:
        def lookup() -> Tensor | None:
            assert self._optimizer is not None
            parameter = owner()
            if parameter is None:
                return None  # named by the parameter's own entry
            known = self._optimizer.state.get(parameter)
            if not known:
                return None  # before the first step optimizers have no state yet
            value = known.get(key)
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                names = sorted(k for k, v in known.items() if isinstance(v, Tensor) and v.shape == parameter.shape)
                raise InvalidArgument(
                    f"{type(self._optimizer).__name__} keeps no state {key!r} of a parameter's shape "
                    f"(it keeps: {', '.join(names) or 'none'}). Name one of these in state=(...)."
                )
            return value

        return lookup

    def _deliver(self) -> None:
        """Give the center's optimizer state to the optimizer, which has just made its first step.

        Zeros are the state of a new center: they have nothing to give, and the first step stands.
        """
        for i in list(self._late):
            target = self._tensors[i]()
            if target is not None:
                value = self._late.pop(i)
                if value.any():
                    target.copy_(value)


class _Forward:
    """The forward hook of a shared module. Copies of the module, by pickle or deepcopy, have one that does nothing."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a constant there, so that nothing of this hook is compiled
            return
        if self._act is not None and module.training and torch.is_grad_enabled():
            self._act()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Forward, ()

    @property
    def __name__(self) -> str:  # only torch.jit.script asks for it
        raise AttributeError(
            "a model that is shared has a forward hook, which torch.jit.script cannot compile. Call worker.leave() "
            "before, or use torch.compile or torch.export."
        )


def _pinned(size: int, dtype: str) -> Tensor:
    """A host buffer that a GPU can copy to by itself; an ordinary one, slower, if the system refuses to pin."""
    try:
        return torch.empty(size, dtype=getattr(torch, dtype), pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"no pinned memory for exchanges, they will be slower: {error}", stacklevel=2)
        return torch.empty(size, dtype=getattr(torch, dtype))


class Listed(nn.Module):
    """Parameters that were given without their module, by name or in a row."""

    def __init__(self, given: Mapping[str, Any] | Iterable[Any]) -> None:
        super().__init__()
        kind, is_row = type(given), not isinstance(given, Mapping)
        if is_row:
            items = list(cast(Iterable[Any], given))
            is_named = bool(items) and all(isinstance(one, tuple) and len(cast(Any, one)) == 2 for one in items)
            given = dict(items) if is_named else {str(i): one for i, one in enumerate(items)}
        self.given = cast(Mapping[str, Any], given)
        if not self.given:
            raise InvalidArgument(
                f"a {kind.__name__} that has no parameter cannot be shared (0, at least 1 is needed). Pass the model; "
                "a generator such as model.parameters() is empty once something has gone through it."
            )
        for name, value in self.given.items():
            if isinstance(value, Tensor):
                continue
            if is_row:
                raise InvalidArgument(
                    f"a model of type {kind.__module__}.{kind.__qualname__} cannot be shared: item {name} is a "
                    f"{type(value).__name__}, and no torch parameter. Pass the model, its parameters(), or a dict from "
                    "names to NumPy arrays."
                )
            raise InvalidArgument(
                f"{name!r} is a {type(value).__name__}, and others are torch tensors. A dict that is shared holds "
                "torch tensors or NumPy arrays, and not both: share two dicts."
            )

    def named_parameters(  # pyright: ignore[reportIncompatibleMethodOverride] - there are no modules in it
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As they were given; one that stands under two names is told once."""
        del recurse
        seen: set[int] = set()
        for name, value in self.given.items():
            if not remove_duplicate or id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}{name}", value


def _lookup(module: nn.Module, name: str) -> Callable[[], Tensor | None]:
    if isinstance(module, Listed):
        return lambda: module.given.get(name)
    path = name.split(".")
    return lambda: functools.reduce(_part, path, module)


def _part(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _refuse_wrapped(module: nn.Module) -> None:
    if wrapper := _wrapper(type(module)):
        raise InvalidArgument(
            f"the model is wrapped in {wrapper}, which averages or shards it already: it would be averaged twice. "
            "Share the module itself (model.module), and leave the wrapper out."
        )


@functools.cache
def _wrapper(kind: type[nn.Module]) -> str:
    """The name of the class by which this one averages or shards a module among processes; empty if it does not."""
    return next((name for name in _WRAPPERS if any(base.__name__ == name for base in kind.__mro__)), "")


def _checked(optimizer: Any) -> Optimizer | None:
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    raise InvalidArgument(
        f"the optimizer is a {type(optimizer).__qualname__}, but a torch module is trained by a torch.optim.Optimizer. "
        "Pass that, or leave it out and call replica.step() after each update."
    )
