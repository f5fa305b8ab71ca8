"""A function of a pool: called with whole data sets, it runs on all workers, each with its part of the rows."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from maniple.circle.values import is_tensor
from maniple.errors import InvalidArgument
from maniple.pool.calling import Call, Done, Key, Times, Work, carry_out
from maniple.pool.data import Data
from maniple.pool.objects import Handle, renewed
from maniple.pool.outputs import Total, check_ops
from maniple.pool.rows import in_parts, selected, taken

Run = Callable[[Call, dict[str, int], bool | None], list[Done]]


class Function:
    """Made by `pool.function`.

    Call it with the same arguments as the function, and these:

        batch       the rows of the scattered sets to use: how many of the first, a slice, row numbers or a mask; each
                    worker takes its part of them from shared memory by itself
        batch_s     the rows of each worker's own part of sets that were scattered before (`pool.scatter`): one
                    selection for all, or a list with one for each
        num_slices  so many calls per worker, one after the other, each with a part of its rows
        progress    show how far it is; by default on a terminal, if it takes long
    """

    def __init__(self, work: Work, scatter: Iterable[Key], broadcast: Iterable[Key], run: Run) -> None:
        self._work, self._run = work, run
        self._scatter, self._broadcast = _keys(scatter, "scatter"), _keys(broadcast, "broadcast")
        check_ops(work.reduce)
        self._names = _names(work.function)[0 if work.training is None else 1 :]  # a loss has the model first
        self.model: Handle | None = None  # that it trains
        self._check_names()

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
        updated = {name: self._handle(name, args, kwargs).number for name in self._work.update}
        total = Total(self._work.reduce)
        for done in self._run(call, updated, progress):
            if done.weight:
                total.add(done.output, done.weight, is_total=True)
        return total.value()

    def serial(self, *args: Any, batch: Any = None, batch_s: Any = None, num_slices: int = 1, **kwargs: Any) -> Any:
        """The same in this process alone, with its own objects: for comparison."""
        call = self._call(args, kwargs, batch, batch_s, num_slices)
        if call.resident and batch_s is not None:
            own: Handle = call.argument(call.resident[0])
            call.batch_s = in_parts(batch_s, len(own.local), own.parts)
        call.args = [_here(value) for value in call.args]
        call.kwargs = {name: _here(value) for name, value in call.kwargs.items()}
        training = None if self._work.training is None else self._work.training.local
        done = carry_out(self._work, call, rank=0, world=1, times=Times(), training=training)
        if training is not None:
            training.step()
        for name, value in done.updates.items():
            handle = self._handle(name, args, kwargs)
            handle.local = renewed(handle.local, value)
        return done.output

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, batch_s: Any, slices: int) -> Call:
        if slices < 1:
            raise InvalidArgument(f"num_slices={slices}, but at least 1 call is made. Pass 1 or more.")
        keys: list[Key] = [key for key in (*range(len(args)), *kwargs) if self._is_scattered(key)]
        call = Call(list(args), dict(kwargs), batch_s=batch_s, slices=slices)
        call.resident = [key for key in keys if isinstance(call.argument(key), Handle)]
        call.scattered = [key for key in keys if key not in call.resident]
        call.passing = [key for key in call.scattered if not isinstance(call.argument(key), Data)]
        if call.scattered:
            call.rows = selected(batch, self._length(call))
            if not len(call.rows) and self._work.training is not None:
                raise InvalidArgument("a step needs rows to learn from, but 0 were selected. Leave out such batches.")
            for key in call.passing:
                call.put(key, _plain(taken(call.argument(key), call.rows)))
        elif batch is not None:
            raise InvalidArgument("batch selects rows of scattered sets, but none was passed. Name them in scatter=.")
        if batch_s is not None and not call.resident:
            raise InvalidArgument("batch_s selects rows of sets that workers have, but none was passed. Use batch.")
        return call

    def _length(self, call: Call) -> int:
        lengths = {key: _length(call.argument(key), self._name_of(key)) for key in call.scattered}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{self._name_of(key)}: {length}" for key, length in lengths.items())
            raise InvalidArgument(f"scattered sets have different lengths ({told}). They need a row for each other.")
        return next(iter(lengths.values()))

    def _is_scattered(self, key: Key) -> bool:
        return key in self._scatter or self._name_of(key) in self._scatter or self._position(key) in self._scatter

    def _name_of(self, key: Key) -> str:
        if isinstance(key, str):
            return key
        return self._names[key] if key < len(self._names) else str(key)

    def _position(self, key: Key) -> int:
        return key if isinstance(key, int) else self._names.index(key) if key in self._names else -1

    def _handle(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Handle:
        position = self._position(name)
        value = kwargs.get(name, args[position] if 0 <= position < len(args) else None)
        if not isinstance(value, Handle):
            raise InvalidArgument(f"{name!r} is updated, so it must be a handle, but is a {type(value).__qualname__}.")
        return value

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a function of a pool cannot run in a worker. Let it refer to the plain function instead."
        )

    def _check_names(self) -> None:
        if any(isinstance(key, int) and key < 0 for key in (*self._scatter, *self._broadcast)):
            raise InvalidArgument("arguments are counted from 0, and not from the end. Give positions or names.")
        unknown = [k for k in (*self._scatter, *self._broadcast, *self._work.update) if isinstance(k, str)]
        for name in unknown if self._names else ():
            if name not in self._names and not _takes_any(self._work.function):
                near = difflib.get_close_matches(name, self._names, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(self._names)}."
                raise InvalidArgument(f"the function has no argument {name!r}. {hint}")
        both = set(self._scatter) & set(self._broadcast)
        if both:
            raise InvalidArgument(f"{both.pop()!r} is both scattered and broadcast. Name it once.")


def _keys(keys: Iterable[Key], what: str) -> tuple[Key, ...]:
    if isinstance(keys, (str, int)):
        return (keys,)
    found = tuple(keys)
    wrong = [key for key in cast(tuple[Any, ...], found) if not isinstance(key, (str, int))]
    if wrong:
        raise InvalidArgument(f"{what} has {wrong[0]!r}, which names no argument. Give names or positions.")
    return found


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some built-in ones nothing is known
        return []


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _length(value: Any, name: str) -> int:
    shape = getattr(value, "shape", None)
    is_array = hasattr(value, "__array__") and not np.ma.isMaskedArray(value)  # a mask would be lost
    if shape is None or not len(shape) or not is_array:
        raise InvalidArgument(
            f"{name} is a {type(value).__qualname__}, which has no rows to scatter. Pass a plain array, a tensor or "
            "pool.data(...), or leave it out of scatter=."
        )
    return int(shape[0])


def _plain(values: Any) -> Any:
    """As it can be sent: in one piece, and not the same object as another argument."""
    if is_tensor(values):
        return values.detach().cpu().contiguous()
    return np.ascontiguousarray(values)[:]


def _here(value: Any) -> Any:
    if isinstance(value, Handle):
        return value.local
    return value.here() if isinstance(value, Data) else value
