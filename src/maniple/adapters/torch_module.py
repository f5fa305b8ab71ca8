"""The adapter for torch modules: parameters, floating-point buffers and, on request, optimizer state.

On the CPU parameters become views of flat vectors where that is safe (`torch_flat`), and are exchanged in place.
Other contiguous float32 or float64 parameters are exchanged in their own memory. Everything else goes through a
staging copy: half precision (the center is float32), channels-last and other strides, and CUDA,
where one pinned host buffer receives the whole model in asynchronous copies.
"""

import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maniple.adapters.base import Adapter, Average, Gather, Params, Unhook, choose_parameters
from maniple.adapters.torch_flat import FlatParameters
from maniple.adapters.torch_gradients import TorchBuckets, TorchGradients, normed_buffers, synchronise
from maniple.adapters.torch_optimizer import (
    add_look_ahead,
    average_moments,
    moments,
    packed,
    parameters_of,
    unpack,
    use_nesterov,
)
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, dtype_name, flat_dtype

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class TorchAdapter(Adapter):
    """A torch module, or parameters without one; tied parameters are shared once.

    Integers, such as the random state that Keras keeps in parameters, have no mean: they stay each worker's own.
    """

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """A module, or a dict, list or tuple with a tensor in it."""
        if isinstance(model, Mapping):
            model = list(cast(Mapping[Any, Any], model).values())
        is_row = isinstance(model, list | tuple)
        return isinstance(model, nn.Module) or (is_row and any(isinstance(one, Tensor) for one in cast(Any, model)))

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        state: Sequence[str] = (),
        buffers: bool = True,
        params: Params | None = None,
    ) -> None:
        module = model if isinstance(model, nn.Module) else ParameterRow(model)
        if wrapper := _wrapper(type(module)):
            _refuse_wrapped(wrapper)
        self._module = module
        self._optimizer = _checked(optimizer)
        self.has_optimizer = self._optimizer is not None
        if state and optimizer is None:
            raise InvalidArgument(f"state={tuple(state)!r} was asked for without an optimizer. Pass the optimizer too.")
        state = (state,) if isinstance(state, str) else state
        self._tensors: list[Callable[[], Tensor | None]] = []
        self.entries: list[Entry] = []
        # Values may be replaced while training (`module.weight = ...`, load_state_dict(assign=True)), so they
        # are looked up by name in each pass.
        names = dict(module.named_parameters(remove_duplicate=False))
        chosen = {id(names[name]) for name in choose_parameters(names, params)}
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
        self._parameter_count = len(self.entries)
        self._shared_names = set(parameters)
        self._local_names = {name for name, _ in module.named_parameters()} - self._shared_names
        local_buffers: list[str] = []
        for name, buffer in module.named_buffers() if buffers else ():
            if buffer.is_floating_point() and not buffer.isfinite().all():  # a mask of -inf, which has no mean
                local_buffers.append(name)
            elif buffer.is_floating_point():
                self._append(name, buffer, _lookup(module, name))
        self.local_buffers = local_buffers
        self._first_state = len(self.entries)
        if self._optimizer is not None:
            ours = {id(p) for p in self._trained()}
            for key in state:
                for name, (lookup, parameter) in parameters.items():
                    if id(parameter) in ours:
                        self._append(f"{key}.{name}", parameter, self._state(lookup, key))
        self._known = self._groups()
        self._dtypes = [getattr(torch, flat_dtype(entry)) for entry in self.entries]
        self._values: list[Tensor] = []  # of this pass
        self._staged: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}  # optimizer state that came from the center before it exists here
        self._pinned: list[Tensor] | None = None
        self._flat = (
            None if isinstance(module, ParameterRow) else FlatParameters(module, list(parameters), Layout(self.entries))
        )
        self._returned: dict[torch.device, torch.cuda.Event] = {}  # the newest copy back to each GPU

    def on_step(self, act: Callable[[], None]) -> Unhook:
        if self._optimizer is None:
            return lambda: None

        def after_step(*_: Any) -> None:
            if wrapper := _wrapper(type(self._module)):  # fully_shard changes the module's class
                _refuse_wrapped(wrapper)
            self._refuse_unknown()
            if self._late:
                self._deliver()
            act()

        return self._optimizer.register_step_post_hook(after_step).remove

    def before_step(self, act: Callable[[], None]) -> Unhook:
        if self._optimizer is None:
            return lambda: None

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
                raise InvalidArgument(
                    "optimizer.step(closure) computes gradients after the workers have averaged theirs, so replicas "
                    "would part. Call backward() before step(), or share parameters instead of gradients: --rule easgd "
                    "or LocalSGD(k)."
                )
            act()

        return self._optimizer.register_step_pre_hook(before_step).remove

    def on_forward(self, act: Callable[[], None]) -> Unhook:
        """Call `act` before each forward pass of the module that trains. Compiled modules do not call it."""
        return self._module.register_forward_pre_hook(_Forward(act)).remove

    def refuse_wrapping(self) -> Unhook:
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

    def before_foreign_step(self, act: Callable[[Sequence[Tensor]], None]) -> Unhook:

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer is not self._optimizer:
                act(parameters_of(optimizer))

        return register_optimizer_step_pre_hook(before_step).remove

    @property
    def parameter_count(self) -> int:
        return self._parameter_count

    def is_buffer(self, i: int) -> bool:
        return self.parameter_count <= i < self._first_state

    def averaged_buffers(self, norm: str) -> list[int]:
        """All buffers; none if they are local; with a synchronised norm those that it does not compute itself."""
        if norm == "local":
            return []
        synchronised = normed_buffers(self._module) if norm == "synchronised" else set[str]()
        return [i for i in range(self.parameter_count, self._first_state) if self.entries[i].name not in synchronised]

    def gradients(self, *, norm: str) -> TorchGradients:
        return TorchGradients(self._module, **self._averaged(norm))

    def buckets(self, *, norm: str) -> TorchBuckets:
        return TorchBuckets(self._module, **self._averaged(norm))

    def _averaged(self, norm: str) -> dict[str, Any]:
        """The settings of gradients: which buffers are averaged with them, and which gradients are not averaged."""
        buffers = {self.entries[i].name: functools.partial(self._tensor, i) for i in self.averaged_buffers(norm)}
        return {"buffers": buffers, "trained": self._trained, "local": self._local_names}

    def _refuse_unknown(self) -> None:
        """Raise InvalidArgument if the optimizer trains a parameter that was no part of the model when it was shared.

        Parameters that it trained beside the model then are the script's own, and one that has replaced a shared one
        is shared under its name.
        """
        if self._optimizer is None or _are_same(self._optimizer.param_groups, self._known):
            return
        before = {id(p) for group in self._known for p in group}
        news = [p for p in self._trained() if id(p) not in before and p.grad is not None]
        if news:
            names = {id(p): name for name, p in self._module.named_parameters()}
            known = self._shared_names | self._local_names
            if unknown := [p for p in news if names.get(id(p)) not in known]:
                raise InvalidArgument(
                    f"{names.get(id(unknown[0]), 'a parameter of the optimizer')!r} is trained but not shared: it was "
                    f"added to the optimizer after share(), where the model had {self.parameter_count} parameters. "
                    "Share the model after it is built, with all parameters in the optimizer."
                )
        if all(p.grad is not None for p in self._trained()):  # else one may be trained, and checked, later
            self._known = self._groups()

    def _groups(self) -> list[list[Tensor]]:
        """The parameters of each group of the optimizer: themselves, since an id may be used again."""
        return [] if self._optimizer is None else [list(group["params"]) for group in self._optimizer.param_groups]

    def _trained(self) -> list[Tensor]:
        """The parameters that the optimizer changes."""
        return [] if self._optimizer is None else parameters_of(self._optimizer)

    @property
    def device(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The GPU that holds all parameters, else the CPU."""
        found = {str(p.device) for name, p in self._module.named_parameters() if name in self._shared_names}
        return found.pop() if len(found) == 1 and all(name.startswith("cuda") for name in found) else "cpu"

    @property
    def suits_bsp(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bsp may be the default rule: it was measured on the CPU, and refuses closures and sparse gradients."""
        if self._optimizer is None or isinstance(self._optimizer, torch.optim.LBFGS):
            return False
        shared = {id(p): p for name, p in self._module.named_parameters() if name in self._shared_names}
        embeddings = [layer for layer in self._module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
        has_sparse = any(layer.sparse and id(layer.weight) in shared for layer in embeddings)
        return not has_sparse and all(p.device.type == "cpu" for p in shared.values())

    def synchronise_norm(self, total: Callable[[Array], None]) -> Unhook:
        return synchronise(self._module, total)

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        if self._optimizer is None:
            return {}, {}
        arrays, plain = packed(self._optimizer)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        plain["kind"] = type(self._optimizer).__name__
        plain["parameters"] = [[names.get(id(one), ""), list(one.shape)] for one in self._trained()]
        return arrays, plain

    def restore_optimizer(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        if self._optimizer is not None:
            unpack(self._optimizer, arrays, plain)

    def use_nesterov(self, momentum: float) -> None:
        use_nesterov(self._optimizer, momentum)

    @contextmanager
    def without_look_ahead(self) -> Generator[None]:
        assert self._optimizer is not None
        shared = {id(p) for name, p in self._module.named_parameters() if name in self._shared_names}
        add_look_ahead(self._optimizer, shared, -1.0)
        try:
            yield
        finally:
            add_look_ahead(self._optimizer, shared, 1.0)

    def reduce_moments(self, momentum: str, average: Average, gather: Gather) -> None:
        if self._optimizer is None or momentum == "keep":
            return
        local = {id(p) for name, p in self._module.named_parameters() if name in self._local_names}
        if momentum == "average":
            average_moments(self._optimizer, average, gather, local)
            return
        for tensor in moments(self._optimizer, local).values():
            tensor.zero_()

    def begin(self) -> None:
        """Copy what is on a GPU to pinned host memory, all copies in flight at once."""
        self._staged.clear()  # of a pass that was cut short
        values: list[Tensor] = []
        on_gpu: list[tuple[int, Tensor]] = []
        for i, lookup in enumerate(self._tensors):
            value = lookup()
            if value is None or value.shape != self.entries[i].shape:
                value = self._tensor(i)  # late optimizer state, or an error
            values.append(value := value.detach())
            if value.is_cuda:
                on_gpu.append((i, value))
        self._values = values
        if not on_gpu:
            return
        if self._pinned is None:
            layout = Layout(self.entries)
            flat = {dtype: _pinned(size, dtype) for dtype, size in layout.sizes.items()}
            self._pinned = [flat[dtype][start:stop] for dtype, start, stop in layout.places]
        devices = {tensor.device for _, tensor in on_gpu}
        for device in devices & self._returned.keys():  # the last copies back, perhaps on another stream
            torch.cuda.current_stream(device).wait_event(self._returned[device])
        for i, tensor in on_gpu:
            self._staged[i] = self._pinned[i]
            self._pinned[i].view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def flat_vectors(self) -> tuple[dict[str, Array], int] | None:
        """All parameters, where they can be kept in flat vectors."""
        self._values = []  # of the pass before: they would keep the memory of parameters that move
        vectors = None if self._flat is None else self._flat.vectors()
        return None if vectors is None else (vectors, self._parameter_count)

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
        """Write a staging copy back; to a GPU asynchronously: the next `begin` waits for it."""
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
        """Set the optimizer, which has just made its first step, to the center's optimizer state.

        Zeros are the state of a new center and are not used, so the first step keeps its effect.
        """
        for i in list(self._late):
            target = self._tensors[i]()
            if target is not None:
                value = self._late.pop(i)
                if value.any():
                    target.copy_(value)


class _Forward:
    """The forward hook of a shared module. In copies of the module, by pickle or deepcopy, it does nothing."""

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a constant for the compiler, which drops the hook
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
    """A pinned host buffer; a pageable one, which is slower, if the system refuses to pin."""
    try:
        return torch.empty(size, dtype=getattr(torch, dtype), pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"no pinned memory for exchanges, they will be slower: {error}", stacklevel=2)
        return torch.empty(size, dtype=getattr(torch, dtype))


class ParameterRow(nn.Module):
    """Parameters that were given without their module: a dict, or a row of them."""

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
        """The parameters as they were given; one under two names comes once."""
        del recurse
        seen: set[int] = set()
        for name, value in self.given.items():
            if not remove_duplicate or id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}{name}", value


def _lookup(module: nn.Module, name: str) -> Callable[[], Tensor | None]:
    if isinstance(module, ParameterRow):
        return lambda: module.given.get(name)
    path = name.split(".")

    def lookup() -> Tensor | None:
        value: Any = module
        for part in path:
            value = getattr(value, part, None)
        return value

    return lookup


def _are_same(groups: list[dict[str, Any]], known: list[list[Tensor]]) -> bool:
    """Whether an optimizer has the known parameters. Lists of the same elements are equal without comparing values."""
    if len(groups) != len(known):
        return False
    try:
        return all(group["params"] == parameters for group, parameters in zip(groups, known, strict=True))
    except RuntimeError:  # two tensors were compared: they are not the same one
        return False


def _refuse_wrapped(wrapper: str) -> NoReturn:
    raise InvalidArgument(
        f"the model is wrapped in {wrapper}, which averages or shards it already: it would be averaged twice. "
        "Share the module itself (model.module), and leave the wrapper out."
    )


@functools.cache
def _wrapper(kind: type[nn.Module]) -> str:
    """The base class by which `kind` averages or shards a module among processes; empty if it does not."""
    return next((name for name in _WRAPPERS if any(base.__name__ == name for base in kind.__mro__)), "")


def _checked(optimizer: Any) -> Optimizer | None:
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    raise InvalidArgument(
        f"the optimizer is a {type(optimizer).__qualname__}, but a torch module is trained by a torch.optim.Optimizer. "
        "Pass that, or leave it out and call replica.step() after each update."
    )
