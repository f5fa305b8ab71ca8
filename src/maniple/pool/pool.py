"""The pool: worker processes that execute functions of a program that stays serial."""

import contextlib
import functools
import operator
import os
import secrets
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from maniple.contracts import Array
from maniple.environment import shared_memory
from maniple.errors import InvalidArgument
from maniple.memory.segment import Segment
from maniple.pool.data import Data, DataMemory, Handle, HandleOrName, Handles, OneOrMany, object_numbers, share_data
from maniple.pool.function import ArgumentKey, Function, FunctionCall, FunctionSpec
from maniple.pool.outputs import Ops, OutputReducer, check_ops
from maniple.pool.processes import WorkerProcesses
from maniple.pool.training import TrainingFunction, TrainingPhase, check_optimizer
from maniple.pool.worker_process import PROGRESS_FILE, pickle_by_value

_MAX_ARGUMENTS = 64  # of a loss: by default all of them are scattered
_PROGRESS_AFTER_S = 1.0  # shorter calls need no progress bar


class Pool:
    """Workers on this machine that run functions of a serial program, each on its part of the rows.

    Use it as a context manager, or `close()` it. An error in a worker is raised here, as that error.

    Args:
        n: the number of workers; by default one for each device, or one for each core that this process may use.
        devices: such as ["cuda:0", "cuda:1"]; each worker sees only its own. By default the CPU.
    """

    def __init__(self, n: int | None = None, devices: Sequence[str] | None = None) -> None:
        devices = [devices] if isinstance(devices, str) else list(devices or ())
        self.n = n if n is not None else len(devices) or len(os.sched_getaffinity(0))
        if self.n < 1:
            raise InvalidArgument(f"Pool(n={self.n}) has no workers. Give 1 or more.")
        root = shared_memory(os.environ)
        # A segment that stays marked as unfinished is removed, not saved, if this process is killed.
        self._segment = Segment.create(root, secrets.token_hex(8), Path(), is_incomplete=True)
        self._handles = Handles()
        self._data: list[Data] = []
        self._unused: list[int] = []  # numbers of functions that the program has released
        progress = DataMemory(self._segment.path / PROGRESS_FILE, is_new=True)
        progress.reserve(16 * self.n)
        self._progress = progress.view("int64", (self.n, 2))
        try:
            self._workers = WorkerProcesses(self._segment.path, self.n, devices)
        except BaseException:
            self._segment.remove()
            raise
        self._owner = os.getpid()
        # Runs when the program ends or releases the pool, as a notebook cell does that is executed again.
        self._end = weakref.finalize(self, _end, self._workers, self._segment, self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.n})" if not self._workers.closed else f"Pool({self.n}), closed"

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a pool cannot be sent to its workers: a function refers to it. Pass data and handles as arguments instead."
        )

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._workers.pids

    def close(self) -> None:
        """End the workers and free all data. The pool cannot be used any more."""
        if os.getpid() != self._owner:  # a forked copy of the process owns nothing
            return
        self._end()
        for data in list(self._data):
            data.free()

    def function(
        self,
        fn: Callable[..., Any],
        *,
        scatter: Iterable[ArgumentKey] = (),
        broadcast: Iterable[ArgumentKey] = (),
        reduce: Ops = "none",
        update: dict[str, str] | None = None,
    ) -> Function:
        """`fn`, to be called on whole data sets and run on all workers.

        Args:
            scatter: the arguments, by name or position, that are split along axis 0; the others are passed whole.
            broadcast: arguments that are passed whole; it documents the intention only.
            reduce: how the outputs of all slices are combined: mean (weighted by rows), sum, prod, min, max, gather or
                none (a list); one op for all, or a tuple or dict of ops in the form of the output.
            update: handles among the arguments that get new values, and how the values of several slices are combined.
                Then `fn` returns (outputs, {name: new value}); all slices see the old values.
        """
        check_ops(update or {}, "update")
        pickle_by_value(fn)
        spec = FunctionSpec(fn, reduce, dict(update or {}))
        return self._define(spec, spec, scatter, broadcast)

    def train_function(
        self, model: Any, loss: Callable[..., Any], optimizer: Any, *, sets: int | None = None, **settings: float
    ) -> Function:
        """A function of whole data sets that makes one training step on all workers and returns the loss before it.

        Each worker computes the gradient on its part of the rows; all get the mean over all rows and make the same
        update. `serial` trains the caller's own copy of the model.

        Args:
            model: a torch module, a dict of NumPy arrays, or a handle of one.
            loss: `loss(model, *rows)` returns the mean over rows. For a dict of arrays it returns (loss, gradients), as
                `jax.value_and_grad(loss)` does.
            optimizer: sgd, momentum, nesterov, adagrad, rmsprop, adadelta, adam or adamax, with its settings (lr=0.1);
                or a function that makes a torch optimizer from parameters.
            sets: the number of first arguments that are data sets to scatter; by default all.
        """
        handle, own, theirs = self._trained(model, loss, optimizer, settings)
        specs = FunctionSpec(loss, "mean", training=own), FunctionSpec(loss, "mean", training=theirs)
        function = self._define(*specs, range(_MAX_ARGUMENTS if sets is None else sets), ())
        function.model = handle
        return function

    def gradient_and_update(
        self, model: Any, loss: Callable[..., Any], optimizer: Any, *, sets: int | None = None, **settings: float
    ) -> tuple[Function, Function]:
        """The two halves of `train_function`, which takes the same arguments: a gradient, and an update with it.

        The first is called with data sets and returns the loss. Each worker then has the mean gradient of all
        parameters in one vector, the object of the handle `gradient.flat`. The second takes no arguments, updates the
        model with what is in that vector, and returns the number of updates so far.

            gradient, update = pool.gradient_and_update(model, loss, "adam", lr=0.01)
            clip = pool.function(clip_norm)  # modifies the vector in place, identically on all workers
            gradient(x, y, batch=rows)
            clip(gradient.flat, 1.0)
            update()
        """
        handle, own, theirs = self._trained(model, loss, optimizer, settings)
        makers = functools.cache(own), functools.partial(_same, self.replicate(theirs))  # one for both halves

        def half(fn: Callable[..., Any], reduce: Ops, phase: TrainingPhase, scatter: Iterable[ArgumentKey]) -> Function:
            here, there = (FunctionSpec(fn, reduce, training=make, phase=phase) for make in makers)
            return self._define(here, there, scatter, ())

        gradient = half(loss, "mean", TrainingPhase.GRADIENT, range(_MAX_ARGUMENTS if sets is None else sets))
        update = half(TrainingFunction.next_update, "max", TrainingPhase.UPDATE, ())
        gradient.model = update.model = handle
        gradient.flat = self.replicate(np.empty(0))  # placed by the first call
        return gradient, update

    def data(self, array: Any) -> Data:
        """A copy of an array or a CPU tensor in shared memory, seen by all workers; a `np.memmap` stays in its file."""
        self._workers.check()

        def on_free(path: Path) -> None:
            self._data.remove(data)
            if not self._workers.closed:
                self._workers.ask("free", path)

        data = share_data(array, self._segment.path / f"data-{next(object_numbers)}", on_free)
        self._data.append(data)
        return data

    def replicate(self, made: Any, *, name: str | None = None) -> Handle:
        """Give each worker its own object: a copy of this one, or the result of this function or class there."""
        is_factory = isinstance(made, (types.FunctionType, types.MethodType, functools.partial, type))
        pickle_by_value(made if is_factory else type(made))
        with self._handles.create(name, made, is_factory=is_factory) as handle:
            self._workers.ask("store", handle.number, made, is_factory)
        return handle

    def drop(self, what: OneOrMany) -> None:
        """Release an object, or several, in all workers."""
        for handle in self._handles.resolve(what)[0]:
            self._handles.drop(handle)
            self._workers.ask("drop", handle.number)

    def get(self, what: OneOrMany, rank: int = 0) -> Any:
        """A copy of worker `rank`'s object; a list for several."""
        rank = self._check_rank(rank)
        return self._map(what, lambda handle: self._workers.ask("get", handle.number, handle.name, rank=rank))

    def set(self, what: OneOrMany, rank: int, value: Any) -> None:
        """Give worker `rank` another object, or a module a state dict; a list of values for several."""
        handles, is_list = self._handles.resolve(what)
        rank = self._check_rank(rank)
        for handle, one in zip(handles, _paired(value, handles, "values") if is_list else [value], strict=True):
            self._workers.ask("store", handle.number, one, False, rank=rank)

    def shapes(self, what: OneOrMany) -> list[Any]:
        """The shape of each worker's array; a list of shapes for an object with several arrays, or several objects."""
        return self._map(what, self._shapes)

    def lengths(self, what: OneOrMany) -> list[Any]:
        """The number of rows of each worker's array; lists like those of `shapes`."""

        def length(handle: Handle, shape: Any) -> Any:
            if isinstance(shape, list):
                return [length(handle, one) for one in shape]  # pyright: ignore[reportUnknownVariableType]
            if not shape:
                raise InvalidArgument(
                    f"{handle.name!r} is an array without axes, so it has no rows. Replicate one with an axis: "
                    "np.array([value])."
                )
            return shape[0]

        return self._map(what, lambda handle: [length(handle, shape) for shape in self._shapes(handle)])

    @overload
    def scatter(  # pyright: ignore[reportOverlappingOverload] - one array may be of any class
        self, values: list[Any] | tuple[Any, ...], *, name: Sequence[str] | None = None
    ) -> list[Handle]: ...
    @overload
    def scatter(self, values: Any, *, name: str | None = None) -> Handle: ...
    def scatter(self, values: Any, *, name: str | Sequence[str] | None = None) -> Handle | list[Handle]:
        """Split an array along axis 0; each worker keeps its part. Pass the handle to a function that scatters it.

        A list or tuple of arrays is split array by array; `name` is then a list of names.
        """
        is_list = isinstance(values, (list, tuple))
        several: list[Any] = list(values) if is_list else [values]  # pyright: ignore[reportUnknownArgumentType]
        for one in several:
            if not hasattr(one, "shape") or not len(one.shape):
                raise InvalidArgument(
                    f"a value of type {type(one).__qualname__} has no axis 0 to split among the workers. Pass an "
                    "array, a tensor, pool.data, or a list of these."
                )
        made: list[Handle] = []
        with contextlib.ExitStack() as stack:
            for one, own in zip(several, _names(name, several, is_list=is_list), strict=True):
                local = one.here() if isinstance(one, Data) else one
                made.append(stack.enter_context(self._handles.create(own, local, parts=self.n)))
                self._workers.ask("scatter", made[-1].number, one)
        return made if is_list else made[0]

    def gather(self, what: OneOrMany) -> Any:
        """All workers' arrays, concatenated along axis 0; a list for several objects."""
        return self._map(what, lambda handle: self._reduced(handle, "gather"))

    def reduce(self, what: OneOrMany, op: str = "mean") -> Any:
        """All workers' arrays reduced by `op`, for the caller; a list for several objects."""
        check_ops(op, "op")
        return self._map(what, lambda handle: self._reduced(handle, op))

    def broadcast(self, what: OneOrMany, *, root: int = 0) -> None:
        """Set all workers' arrays to those of worker `root`."""
        self._collective("broadcast", self._handles.resolve(what)[0], root=self._check_rank(root))

    def all_reduce(self, what: OneOrMany, op: str = "mean") -> None:
        """Reduce all workers' arrays by `op`, and give each worker the result."""
        self._collective("all_reduce", self._handles.resolve(what)[0], op=op)

    @overload
    def all_gather(self, what: HandleOrName, *, name: str | None = None) -> Handle: ...
    @overload
    def all_gather(
        self, what: list[HandleOrName] | tuple[HandleOrName, ...], *, name: Sequence[str] | None = None
    ) -> list[Handle]: ...
    def all_gather(self, what: OneOrMany, *, name: str | Sequence[str] | None = None) -> Handle | list[Handle]:
        """Give each worker all workers' arrays, concatenated; a list of handles for several objects."""
        handles, is_list = self._handles.resolve(what)
        with contextlib.ExitStack() as stack:
            names = _names(name, handles, is_list=is_list)
            made = [stack.enter_context(self._handles.create(own, None)) for own in names]
            into = {handle.number: new.number for handle, new in zip(handles, made, strict=True)}
            self._collective("all_gather", handles, into=into)
        return made if is_list else made[0]

    def profile(self, *, reset: bool = False) -> list[dict[str, float]]:
        """Where each worker's time went, in seconds: compute, copy, wait (for the others), idle (for the caller)."""
        rows = self._workers.ask("profile", reset)
        return [{"rank": rank, **row} for rank, row in enumerate(rows)]

    def _trained(
        self, model: Any, loss: Callable[..., Any], optimizer: Any, settings: dict[str, float]
    ) -> tuple[Handle, Callable[[], TrainingFunction], Callable[[], TrainingFunction]]:
        """The handle of a model, and what makes its training function in this process and in the workers."""
        local = model.local if isinstance(model, Handle) else model
        check_optimizer(local, optimizer, settings)
        pickle_by_value(loss)
        handle = model if isinstance(model, Handle) else self.replicate(model)
        if handle is model:  # the workers' copies may differ, if a factory made them
            self.broadcast(handle)
        own, theirs = (functools.partial(TrainingFunction, one, loss, optimizer, settings) for one in (local, handle))
        return handle, own, theirs

    def _define(
        self, own: FunctionSpec, theirs: FunctionSpec, scatter: Iterable[ArgumentKey], broadcast: Iterable[ArgumentKey]
    ) -> Function:
        """A function from the specification for this process, and that for the workers."""
        number, is_changing = next(object_numbers), bool(own.update) or own.training is not None
        function = Function(own, scatter, broadcast, functools.partial(self._run, number, is_changing))
        unused = list(self._unused)
        self._workers.ask("define", number, theirs, unused)
        del self._unused[: len(unused)]
        weakref.finalize(function, self._unused.append, number).atexit = False
        return function

    def _run(
        self, number: int, is_changing: bool, call: FunctionCall, updated: dict[str, int], progress: bool | None
    ) -> list[tuple[Any, float]]:
        bar = _ProgressBar(self._progress, progress, is_sliced=call.slices > 1)
        try:
            zero_copy = [call.rows, *(call.argument(key) for key in call.zero_copy)]
            arguments = number, call.as_tuple(), updated
            results = self._workers.ask("call", *arguments, zero_copy=zero_copy, on_wait=bar.show)
            if is_changing:  # all have computed their part: now all make the step, or none does
                self._workers.ask("commit", is_atomic=True)
            return results
        finally:
            bar.close()

    def _collective(self, verb: str, handles: Sequence[Handle], **options: Any) -> None:
        objects = [(handle.number, handle.name) for handle in handles]
        self._workers.ask("collective", verb, objects, options)

    def _map(self, what: OneOrMany, act: Callable[[Handle], Any]) -> Any:
        """`act` of one object, or a list with that of each of several."""
        handles, is_list = self._handles.resolve(what)
        results = [act(handle) for handle in handles]
        return results if is_list else results[0]

    def _shapes(self, handle: Handle) -> list[Any]:
        each = self._workers.ask("shapes", handle.number, handle.name)
        return [shapes[0] if len(shapes) == 1 else shapes for shapes in each]

    def _reduced(self, handle: Handle, op: str) -> Any:
        reducer = OutputReducer(op)
        for value in self._workers.ask("get", handle.number, handle.name):
            reducer.add(value, 1.0)
        return reducer.value()

    def _check_rank(self, rank: int) -> int:
        try:
            rank = operator.index(rank)
        except TypeError:
            raise InvalidArgument(f"rank {rank!r} is not an integer. Give one from 0 to {self.n - 1}.") from None
        if not 0 <= rank < self.n:
            raise InvalidArgument(f"there is no worker {rank}: ranks are 0 to {self.n - 1}. Give one of these.")
        return rank


class _ProgressBar:
    """Shows the slices of one call; `board` has, for each worker, how many are done and how many there are."""

    def __init__(self, board: Array, is_wanted: bool | None, *, is_sliced: bool) -> None:
        self._board, self._begun = board, time.perf_counter()
        self._is_shown = is_wanted if is_wanted is not None else is_sliced and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def show(self) -> None:
        """Show the current state, if the call takes long."""
        if not self._is_shown or time.perf_counter() - self._begun < _PROGRESS_AFTER_S:
            return
        done, total = (int(count) for count in self._board.sum(axis=0))
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("slices", total=total or None)
        self._bar.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _end(workers: WorkerProcesses, segment: Segment, owner: int) -> None:
    if os.getpid() == owner:
        try:
            workers.close("close() was called")
        finally:
            segment.remove()


def _same(value: Any) -> Any:
    """The argument: a handle that is sent to a worker arrives there as the worker's object."""
    return value


def _paired(given: Any, several: Sequence[Any], what: str) -> list[Any]:
    """`given` as a list with one item for each of several objects; InvalidArgument if it is not."""
    if not isinstance(given, (list, tuple)) or len(given) != len(several):  # pyright: ignore[reportUnknownArgumentType]
        count = f"{len(given)}" if isinstance(given, (list, tuple)) else f"a value of type {type(given).__qualname__}"  # pyright: ignore[reportUnknownArgumentType]
        raise InvalidArgument(
            f"{count} was given as {what} for a list of {len(several)}. Give a list with one item for each of them."
        )
    return list(given)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _names(name: str | Sequence[str] | None, several: Sequence[Any], *, is_list: bool) -> list[str | None]:
    """The names of new objects; None for a generated name."""
    if name is None:
        return [None] * len(several)
    if is_list:
        return _paired(name, several, "name")
    if not isinstance(name, str):
        raise InvalidArgument(
            f"name={name!r} cannot name one object. Give a string; a list of names is for a list of objects."
        )
    return [name]
