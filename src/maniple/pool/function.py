"""Functions of a pool: called with whole data sets, executed by all workers, each on its part of the rows.

Rows are a `range` where they are evenly spaced, so that a view suffices, or an int64 array of indices.
"""

import difflib
import inspect
import operator
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from maniple.collectives.values import is_tensor
from maniple.compiled import compiled
from maniple.contracts import Array, Collectives
from maniple.errors import InvalidArgument
from maniple.pool.data import LINE, Data, Handle, assign, is_numpy_compatible
from maniple.pool.outputs import Ops, OutputReducer, check_ops, split_pair
from maniple.pool.training import TrainingFunction, TrainingPhase

ArgumentKey = int | str  # the position or the name of an argument
Rows = range | Array
_FLAT = "flat gradient"  # among the new values of a call; no argument has such a name
_STREAMING_BYTES = 1 << 24  # more than a core's share of the cache, where non-temporal stores begin to pay


@dataclass(frozen=True)
class FunctionSpec:
    """A function and how its outputs are reduced, as the caller and the workers keep it."""

    function: Callable[..., Any]
    reduce: Ops
    update: dict[str, str] = field(default_factory=dict[str, str])  # the handles it changes, and the op of each
    training: Callable[[], TrainingFunction] | None = None  # for a process that makes training steps with it
    phase: TrainingPhase = TrainingPhase.STEP  # of a training step, that the function makes


class Function:
    """Made by `pool.function`.

    Call it with the arguments of the function itself, and these:

        batch       the rows of the scattered sets to use: the number of first rows, a slice, row numbers or a mask;
                    each worker copies its part of them from shared memory
        batch_s     the rows of each worker's part of sets that were scattered before (`pool.scatter`): one selection
                    for all, or a list with one for each
        num_slices  the number of consecutive calls per worker, each with a part of its rows
        progress    show a progress bar; by default on a terminal, if the call takes long
    """

    def __init__(
        self,
        spec: FunctionSpec,
        scatter: Iterable[ArgumentKey],
        broadcast: Iterable[ArgumentKey],
        run: Callable[["FunctionCall", dict[str, int], bool | None], list[tuple[Any, float]]],
    ) -> None:
        """`run(call, updated, progress)` executes a call in all workers; returns the output of each and its rows."""
        self._spec, self._run = spec, run
        check_ops(spec.reduce)
        names, takes_any = _parameters(spec.function)
        self._names = names if spec.training is None else names[1:]  # a loss has the model first
        self.model: Handle | None = None  # of a training function
        self.flat: Handle | None = None  # the flat gradient, of a function that computes it
        self._training: TrainingFunction | None = None  # for `serial`
        given = _keys(scatter, "scatter"), _keys(broadcast, "broadcast")
        for name in (*given[0], *given[1], *spec.update):
            if isinstance(name, str) and self._names and name not in self._names and not takes_any:
                near = difflib.get_close_matches(name, self._names, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(self._names)}."
                raise InvalidArgument(f"the function has no argument {name!r}. {hint}")
        self._scatter, whole = ({self._name_of(key) for key in keys} for keys in given)
        if both := self._scatter & whole:
            raise InvalidArgument(f"{both.pop()!r} is both scattered and broadcast. Name it once.")

    def __call__(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """What one call on all selected rows would return."""
        call = self._call(args, kwargs, batch, batch_s, num_slices)
        updated = {name: self._handle(name, args, kwargs).number for name in self._spec.update}
        if self.flat is not None:
            updated[_FLAT] = self.flat.number
        reducer = OutputReducer(self._spec.reduce)
        for output, weight in self._run(call, updated, progress):
            if weight:
                reducer.add(output, weight, is_reduced=True)
        return reducer.value()

    def serial(self, *args: Any, batch: Any = None, batch_s: Any = None, num_slices: int = 1, **kwargs: Any) -> Any:
        """The same call in this process alone, with its own objects: for comparison."""
        call = self._call(args, kwargs, batch, batch_s, num_slices)
        if call.resident and batch_s is not None:
            own: Handle = call.argument(call.resident[0])
            call.batch_s = select_in_parts(batch_s, len(own.local), own.parts)
        call.args = [_local(value) for value in call.args]
        call.kwargs = {name: _local(value) for name, value in call.kwargs.items()}
        if self._spec.training is not None and self._training is None:
            self._training = self._spec.training()
        result = execute(self._spec, call, rank=0, world=1, times=CallTimes(), training=self._training)
        if self._training is not None:
            self._training.commit(self._spec.phase)
        for name, value in result.updates.items():
            handle = self.flat if name == _FLAT and self.flat is not None else self._handle(name, args, kwargs)
            handle.local = assign(handle.local, value)
        return result.output

    def __reduce__(self) -> Any:
        raise InvalidArgument("a function of a pool cannot run in a worker. Refer to the plain function instead.")

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, batch_s: Any, slices: int
    ) -> "FunctionCall":
        if slices < 1:
            raise InvalidArgument(f"num_slices={slices}, but at least 1 call is made. Pass 1 or more.")
        keys: list[ArgumentKey] = [key for key in (*range(len(args)), *kwargs) if self._name_of(key) in self._scatter]
        call = FunctionCall(list(args), dict(kwargs), batch_s=batch_s, slices=slices)
        call.resident = [key for key in keys if isinstance(call.argument(key), Handle)]
        call.scattered = [key for key in keys if key not in call.resident]
        call.zero_copy = [key for key in call.scattered if not isinstance(call.argument(key), Data)]
        if call.scattered:
            call.rows = select_rows(batch, self._length(call))
            if not len(call.rows) and self._spec.training is not None:
                raise InvalidArgument("a step needs rows to learn from, but 0 were selected. Leave out such batches.")
            rows = {key: _contiguous(take_rows(call.argument(key), call.rows)) for key in call.zero_copy}
            call.args, call.kwargs = call.replaced(rows)
        elif batch is not None:
            raise InvalidArgument("batch selects rows of scattered sets, but none was passed. Name them in scatter=.")
        if batch_s is not None and not call.resident:
            raise InvalidArgument("batch_s selects rows of sets that workers have, but none was passed. Use batch.")
        return call

    def _length(self, call: "FunctionCall") -> int:
        lengths = {self._name_of(key): _length(call.argument(key), self._name_of(key)) for key in call.scattered}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise InvalidArgument(f"scattered sets have different lengths ({listed}). Pass sets of the same length.")
        return next(iter(lengths.values()))

    def _name_of(self, key: ArgumentKey) -> str:
        if isinstance(key, str):
            return key
        return self._names[key] if key < len(self._names) else str(key)

    def _handle(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Handle:
        named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        value = named.get(name)
        if not isinstance(value, Handle):
            raise InvalidArgument(
                f"{name!r} is updated, so it must be a handle, but is a {type(value).__qualname__}. Pass "
                "pool.replicate(...)."
            )
        return value


def _keys(keys: Iterable[ArgumentKey], what: str) -> tuple[ArgumentKey, ...]:
    found = (keys,) if isinstance(keys, (str, int)) else tuple(keys)
    wrong = [key for key in cast(tuple[Any, ...], found) if not isinstance(key, (str, int))]
    if wrong:
        raise InvalidArgument(f"{what} has {wrong[0]!r}, which names no argument. Give names or positions.")
    if any(isinstance(key, int) and key < 0 for key in found):
        raise InvalidArgument("arguments are counted from 0, not from the end. Give positions or names.")
    return found


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it accepts any keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return [], True
    return list(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _length(value: Any, name: str) -> int:
    shape = getattr(value, "shape", None)
    is_array = hasattr(value, "__array__") and not np.ma.isMaskedArray(value)  # a mask would be lost
    if shape is None or not len(shape) or not is_array:
        raise InvalidArgument(
            f"{name} is a {type(value).__qualname__}, which has no rows to scatter. Pass a plain array, a tensor or "
            "pool.data(...), or leave it out of scatter=."
        )
    return int(shape[0])


def _contiguous(values: Any) -> Any:
    """Values as they are sent: contiguous, and a separate object even if two arguments are the same array."""
    if is_tensor(values):
        return values.detach().cpu().contiguous()
    return np.ascontiguousarray(values)[:]


def _local(value: Any) -> Any:
    if isinstance(value, Handle):
        return value.local
    return value.here() if isinstance(value, Data) else value


@dataclass
class FunctionCall:
    """The arguments of one call.

    Attributes:
        rows: the selected rows of the scattered sets; None if nothing is scattered.
        scattered: keys of arguments that are whole sets, of which each process takes its part of the rows.
        resident: keys of arguments that are each process's own part of a set; `batch_s` selects from them.
        zero_copy: keys of scattered arguments that hold the selected rows alone, in memory that the next call reuses.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    rows: Rows | None = None
    scattered: list[ArgumentKey] = field(default_factory=list[ArgumentKey])
    resident: list[ArgumentKey] = field(default_factory=list[ArgumentKey])
    zero_copy: list[ArgumentKey] = field(default_factory=list[ArgumentKey])
    batch_s: Any = None
    slices: int = 1

    def as_tuple(self) -> tuple[Any, ...]:
        """The constructor's arguments: a plain tuple pickles faster."""
        return tuple(vars(self).values())

    def argument(self, key: ArgumentKey) -> Any:
        """One argument."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def replaced(self, values: dict[ArgumentKey, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments, with some values replaced."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, value in values.items():
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        return args, kwargs


@dataclass
class PartialResult:
    """The result of one process: its reduced output, the number of its rows, and new values of handles."""

    output: Any
    weight: float
    updates: dict[str, Any]


class CallTimes:
    """Where the time of a process goes, in seconds."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.compute_s = self.copy_s = self.wait_s = 0.0
        self.calls = 0

    def row(self) -> dict[str, float]:
        """The times so far, as `pool.profile` reports them."""
        idle_s = time.perf_counter() - self._begun - self.compute_s - self.copy_s - self.wait_s
        times = {"compute": self.compute_s, "copy": self.copy_s, "wait": self.wait_s, "idle": idle_s}
        return {"calls": self.calls, **times}


def execute(
    spec: FunctionSpec,
    call: FunctionCall,
    *,
    rank: int,
    world: int,
    times: CallTimes,
    on_slice: Callable[[int, int], None] = lambda _k, _n: None,
    training: TrainingFunction | None = None,
    collectives: Callable[[], Collectives | None] = lambda: None,
) -> PartialResult:
    """Call the function on this process's rows, slice by slice; `on_slice(k, n)` reports that k of n are done.

    With `training`, the mean gradient over all processes is computed; a process without rows takes part, too. The
    caller then makes the step and applies the updates, once all processes have succeeded.
    """
    if training is not None and spec.phase is TrainingPhase.UPDATE:
        times.calls += 1
        return PartialResult(training.next_update(*call.args, **call.kwargs), 1.0, {})
    begin = time.perf_counter()
    sets, count = _own_rows(call, rank, world)
    times.copy_s += time.perf_counter() - begin
    outputs, updates = OutputReducer(spec.reduce), OutputReducer(spec.update)
    slices = _slices(call, count, rank)
    if training is not None:
        training.begin(count)
    for number, rows in enumerate(slices, 1):
        args, kwargs = call.replaced({key: take_rows(value, rows) for key, value in sets.items()})
        begin = time.perf_counter()
        output = spec.function(*args, **kwargs) if training is None else training.learn(len(rows), *args, **kwargs)
        times.compute_s += time.perf_counter() - begin
        weight, is_last = float(max(1, len(rows)) if sets else 1), number == len(slices)
        if spec.update:
            output, new = split_pair(output, spec.update, f"a function with update={spec.update!r}")
            updates.add(new, weight, is_last=is_last)
        outputs.add(output, weight, is_last=is_last)
        on_slice(number, len(slices))
    if training is not None:
        begin = time.perf_counter()
        training.average(collectives(), spec.phase)
        times.compute_s += time.perf_counter() - begin
    times.calls += 1
    new_values = updates.value() or {}
    if training is not None and spec.phase is TrainingPhase.GRADIENT:
        new_values[_FLAT] = training.flat_gradient
    return PartialResult(outputs.value(), outputs.weight, new_values)


def _own_rows(call: FunctionCall, rank: int, world: int) -> tuple[dict[ArgumentKey, Any], int]:
    """This process's rows of each set, and their number."""
    sets: dict[ArgumentKey, Any] = {}
    if call.rows is not None:
        for key in call.scattered:
            value = call.argument(key)
            if key in call.zero_copy:
                value = take_rows(value, part_of(range(len(call.rows)), world, rank))
                sets[key] = value.clone() if hasattr(value, "clone") else value.copy()
            else:
                sets[key] = take_rows(value, part_of(call.rows, world, rank))
    for key in call.resident:
        value = call.argument(key)
        sets[key] = take_rows(value, select_rows(selection_for(call.batch_s, rank, world), len(value)))
    lengths = {key: len(value) for key, value in sets.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise InvalidArgument(
            f"worker {rank} has different numbers of rows of its arguments ({listed}). Scatter sets of the same "
            "length, and select the same rows of each."
        )
    return sets, next(iter(lengths.values()), 0)


def _slices(call: FunctionCall, count: int, rank: int) -> list[Rows]:
    if not call.scattered and not call.resident:
        return [range(0)]
    if not count:  # if no rows are selected at all, one call determines the form of the output
        is_empty_selection = call.rows is not None and not len(call.rows) and rank == 0
        return [range(0)] if is_empty_selection else []
    slices = min(call.slices, count)
    return [part_of(range(count), slices, k) for k in range(slices)]


def select_rows(batch: Any, length: int) -> Rows:
    """The rows of a data set of `length` rows that `batch` selects.

    `batch` is None (all rows), a number (the first n), a slice, a list or array of indices, or a mask.
    """
    if batch is None:
        return range(length)
    if isinstance(batch, slice):
        return range(length)[batch]
    if np.ndim(batch) == 0:
        return range(_check_count(batch, length))
    indices = np.asarray(batch, np.int64 if batch == [] else None) if isinstance(batch, list) else np.asarray(batch)
    if indices.ndim != 1 or indices.dtype.kind not in "iub" or (indices.dtype.kind == "b" and len(indices) != length):
        raise InvalidArgument(
            f"batch is an array {indices.dtype}{list(indices.shape)}, which selects no rows of {length}. Pass a list "
            "of integers, a mask as long as the data, a slice, or the number of first rows."
        )
    if indices.dtype.kind == "b":
        return np.flatnonzero(indices)
    least, most = (int(indices.min()), int(indices.max())) if len(indices) else (0, -1)
    if not -length <= least <= most + 1 <= length:
        wrong = least if least < -length else most
        raise InvalidArgument(
            f"batch has the row {wrong}, but there are {length} rows. Pass {-length} to {length - 1}."
        )
    indices = np.ascontiguousarray(indices, np.int64)
    return np.where(indices < 0, indices + length, indices) if least < 0 else indices


def _check_count(batch: Any, length: int) -> int:
    try:
        count = operator.index(batch)
    except TypeError:
        raise InvalidArgument(
            f"batch={batch!r} selects no rows. Pass the number of first rows, a slice, or a list of row numbers."
        ) from None
    if not 0 <= count <= length:
        raise InvalidArgument(f"batch={count} is not a number of rows of {length}. Pass 0 to {length}, or a slice.")
    return count


def part_of(rows: Rows, parts: int, index: int) -> Rows:
    """One of `parts` consecutive parts of the rows; their sizes differ by at most one."""
    return rows[len(rows) * index // parts : len(rows) * (index + 1) // parts]


def selection_for(batch: Any, rank: int, world: int) -> Any:
    """The selection of worker `rank`, where `batch` may be a list with one selection (slice, list) per worker."""
    if not isinstance(batch, (list, tuple)) or not batch:
        return batch
    each: Sequence[Any] = batch  # pyright: ignore[reportUnknownVariableType]
    if not all(isinstance(one, slice) or np.ndim(one) == 1 for one in each):
        return batch
    if len(each) != world:
        raise InvalidArgument(
            f"batch_s has selections for {len(each)} workers, but there are {world}. Give one for all, or one for each."
        )
    return each[rank]


def select_in_parts(batch: Any, length: int, parts: int) -> Rows:
    """The rows of a whole set that `batch` selects within each of its parts."""
    each: list[Array] = []
    for k in range(parts):
        rows = part_of(range(length), parts, k)
        selected = select_rows(selection_for(batch, k, parts), len(rows))
        each.append(np.asarray(rows, np.int64)[np.asarray(selected, np.int64)])
    return np.concatenate(each)


def take_rows(values: Any, rows: Rows) -> Any:
    """These rows of an array or tensor: a view where they are evenly spaced, otherwise a copy."""
    if not isinstance(rows, range):
        return _gather(values, rows)
    if rows == range(len(values)):
        return values
    if rows.step < 0 and not isinstance(values, np.ndarray):  # tensors have no negative strides
        return _gather(values, np.asarray(rows, np.int64))
    stop = rows.start + len(rows) * rows.step
    return values[rows.start : stop if stop >= 0 else None : rows.step]


def _gather(values: Any, indices: Array) -> Any:
    if isinstance(values, np.ndarray):
        array = cast(Array, values)
        if _is_streaming(array, len(indices)) and (kernels := compiled("maniple.pool.gather_kernels")) is not None:
            return kernels.take(array, indices)
        return array.take(indices, axis=0, mode="clip")  # the indices are valid: skip NumPy's check
    if is_tensor(values):
        torch = sys.modules["torch"]
        if values.device.type == "cpu" and is_numpy_compatible(values) and _is_streaming(values.numpy(), len(indices)):
            return torch.from_numpy(_gather(values.numpy(), indices))
        return values.index_select(0, torch.from_numpy(indices).to(values.device))  # faster than values[indices]
    return values[indices]


def _is_streaming(array: Array, count: int) -> bool:
    """Whether `count` rows exceed the cache and consist of whole cache lines, as the compiled kernel requires."""
    size = array.nbytes // max(1, len(array))
    is_large = size * count >= _STREAMING_BYTES
    return is_large and size % LINE == 0 and array.flags.c_contiguous and not array.dtype.hasobject
