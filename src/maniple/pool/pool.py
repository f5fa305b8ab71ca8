"""The pool: workers of a program that stays serial."""

import contextlib
import functools
import operator
import os
import secrets
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, overload

from maniple.center.segment import Segment
from maniple.errors import InvalidArgument
from maniple.place import shared_memory
from maniple.pool.box import send_by_value
from maniple.pool.calling import Call, Done, Key, Work
from maniple.pool.crew import Crew
from maniple.pool.data import Data, share_data
from maniple.pool.function import Function
from maniple.pool.memory import Memory
from maniple.pool.objects import Handle, Handles, Named, Several, numbers
from maniple.pool.outputs import Ops, Total, check_ops
from maniple.pool.progress import Progress
from maniple.pool.served import BOARD
from maniple.pool.training import Training, check_optimizer

_MANY = 64  # arguments of a function, at most


class Pool:
    """Workers on this machine that run functions of a serial program, each on its part of the rows.

    Use it as a context manager, or `close()` it. An error in a worker is raised here, as that error.

    Args:
        n: how many workers; by default one for each device, else for each core that this process may use.
        devices: such as ["cuda:0", "cuda:1"]; each worker sees its own alone. By default the CPU.
    """

    def __init__(self, n: int | None = None, devices: Sequence[str] | None = None) -> None:
        devices = [devices] if isinstance(devices, str) else list(devices or ())
        self.n = n if n is not None else len(devices) or len(os.sched_getaffinity(0))
        if self.n < 1:
            raise InvalidArgument(f"Pool(n={self.n}) has no workers. Give 1 or more.")
        root = shared_memory(os.environ)
        self._segment = Segment.create(root, secrets.token_hex(8), Path(), is_making=True)  # not to be kept
        self._circle = 0
        self._handles = Handles()
        self._data: list[Data] = []
        self._unused: list[int] = []  # functions that the program has no more
        board = Memory(self._segment.path / BOARD, is_new=True)
        board.reserve(16 * self.n)
        self._board = board.view("int64", (self.n, 2))
        try:
            self._crew = Crew(self._segment.path, self.n, devices)
        except BaseException:
            self._segment.remove()
            raise
        # at the latest when the program ends, or has the pool no more: a cell of a notebook makes it again
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._crew, self._segment, self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.n})" if not self._crew.closed else f"Pool({self.n}), closed"

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a pool cannot be sent to its workers: a function refers to it. Pass data and handles as arguments instead."
        )

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return self._crew.pids

    def close(self) -> None:
        """End the workers, and free all data. Nothing of the pool can be used after that."""
        if os.getpid() != self._owner:  # a copy of the process by fork has nothing to end
            return
        self._end()
        for data in list(self._data):
            data.free()

    def function(
        self,
        fn: Callable[..., Any],
        *,
        scatter: Iterable[Key] = (),
        broadcast: Iterable[Key] = (),
        reduce: Ops = "none",
        update: dict[str, str] | None = None,
    ) -> Function:
        """`fn`, to be called on whole data sets and run on all workers.

        Args:
            scatter: the arguments, by name or position, that are split along axis 0; the others are passed whole.
            broadcast: those that are passed whole, for the reader.
            reduce: what becomes of the outputs: mean (weighted by rows), sum, prod, min, max, gather or none (a list),
                one for all, or a tuple or dict of them in the form of the output.
            update: handles among the arguments that get new values, and how those of several slices are put together.
                Then `fn` returns (outputs, {name: new value}); all slices see the old values.
        """
        check_ops(update or {}, "update")
        send_by_value(fn)
        number, work = next(numbers), Work(fn, reduce, dict(update or {}))
        made = Function(work, scatter, broadcast, functools.partial(self._run, number, bool(update)))
        self._define(number, work, made)
        return made

    def train_function(
        self, model: Any, loss: Callable[..., Any], optimizer: Any, *, sets: int | None = None, **settings: float
    ) -> Function:
        """A function of whole data sets that makes one training step on all workers; it gives the loss before it.

        Each worker computes the gradient on its part of the rows; the mean over all rows is the same for all, and all
        make the same update. `serial` trains the caller's own copy of the model.

        Args:
            model: a torch module, a dict of NumPy arrays, or a handle of one.
            loss: `loss(model, *rows)` gives the mean over rows. Of a dict of arrays it gives (loss, gradients), as
                `jax.value_and_grad(loss)` does.
            optimizer: sgd, momentum, nesterov, adagrad, rmsprop, adadelta, adam or adamax, with its settings (lr=0.1);
                or a function that makes a torch optimizer of parameters.
            sets: how many arguments are data sets that are scattered; by default all.
        """
        local = model.local if isinstance(model, Handle) else model
        check_optimizer(local, optimizer, settings)
        send_by_value(loss)
        handle = model if isinstance(model, Handle) else self.replicate(model)
        if handle is model:  # each worker may have made its own
            self.broadcast(handle)
        number = next(numbers)
        made = functools.partial(Training, local, loss, optimizer, settings)  # if `serial` is called
        training = Handle(number, f"training-{number}", made, is_factory=True)
        parts = {"model": handle, "loss": loss, "optimizer": optimizer, "settings": settings}
        work = Work(loss, "mean", training=training)
        run = functools.partial(self._run, number, True)
        function = Function(work, range(_MANY if sets is None else sets), (), run)
        function.model = handle
        self._crew.ask("train", {"number": number, **parts})
        self._define(number, Work(_nothing, "mean", training=training), function)
        return function

    def data(self, array: Any) -> Data:
        """A copy of an array or a CPU tensor in shared memory, seen by all workers; a `np.memmap` stays in its file."""
        self._crew.check()

        def forget(path: Path) -> None:
            self._data.remove(data)
            if not self._crew.closed:
                self._crew.ask("free", {"path": path})

        data = share_data(array, self._segment.path / f"data-{next(numbers)}", forget)
        self._data.append(data)
        return data

    def replicate(self, made: Any, *, name: str | None = None) -> Handle:
        """An object of its own for each worker: a copy of this one, or what this function or class makes there."""
        is_factory = isinstance(made, (types.FunctionType, types.MethodType, functools.partial, type))
        send_by_value(made if is_factory else type(made))
        with self._handles.made(name, made, is_factory=is_factory) as handle:
            self._crew.ask("keep", {"number": handle.number, "value": made, "is_factory": is_factory})
        return handle

    def drop(self, what: Several) -> None:
        """Let the workers have an object, or several, no more."""
        for handle in self._handles.each(what)[0]:
            self._handles.drop(handle)
            self._crew.ask("drop", {"number": handle.number})

    def get(self, what: Several, rank: int = 0) -> Any:
        """A copy of worker `rank`'s object; of several, a list."""
        rank = self._rank(rank)
        return self._of_each(what, lambda handle: self._crew.ask("get", _named(handle), to=rank))

    def set(self, what: Several, rank: int, value: Any) -> None:
        """Give worker `rank` another object, or a module a state dict; to several, a list of them."""
        handles, is_list = self._handles.each(what)
        rank = self._rank(rank)
        for handle, one in zip(handles, _paired(value, handles, "values") if is_list else [value], strict=True):
            self._crew.ask("keep", {"number": handle.number, "value": one, "is_factory": False}, to=rank)

    def shapes(self, what: Several) -> list[Any]:
        """The shape of each worker's array; of an object with several, a list of them; of several objects, a list."""
        return self._of_each(what, self._shapes)

    def lengths(self, what: Several) -> list[Any]:
        """How many rows each worker's array has; lists as those of `shapes`."""

        def length(handle: Handle, shape: Any) -> Any:
            if isinstance(shape, list):
                return [length(handle, one) for one in shape]  # pyright: ignore[reportUnknownVariableType]
            if not shape:
                raise InvalidArgument(
                    f"{handle.name!r} is an array without axes, so it has no rows. Replicate one with an axis: "
                    "np.array([value])."
                )
            return shape[0]

        return self._of_each(what, lambda handle: [length(handle, shape) for shape in self._shapes(handle)])

    @overload
    def scatter(  # pyright: ignore[reportOverlappingOverload] - one array may be of any class
        self, values: list[Any] | tuple[Any, ...], *, name: Sequence[str] | None = None
    ) -> list[Handle]: ...
    @overload
    def scatter(self, values: Any, *, name: str | None = None) -> Handle: ...
    def scatter(self, values: Any, *, name: str | Sequence[str] | None = None) -> Handle | list[Handle]:
        """Split an array along axis 0; each worker keeps its part. Give it to a function that scatters it.

        Of a list or tuple of arrays, each is split; `name` is a list of names then.
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
                made.append(stack.enter_context(self._handles.made(own, local, parts=self.n)))
                self._crew.ask("share", {"number": made[-1].number, "value": one})
        return made if is_list else made[0]

    def gather(self, what: Several) -> Any:
        """All workers' arrays, one after the other along axis 0; of several objects, a list."""
        return self._of_each(what, lambda handle: self._collected(handle, "gather"))

    def reduce(self, what: Several, op: str = "mean") -> Any:
        """What `op` makes of all workers' arrays, for the caller; of several objects, a list."""
        check_ops(op, "op")
        return self._of_each(what, lambda handle: self._collected(handle, op))

    def broadcast(self, what: Several, *, root: int = 0) -> None:
        """Set all workers' arrays to those of worker `root`."""
        self._meet("broadcast", self._handles.each(what)[0], root=self._rank(root))

    def all_reduce(self, what: Several, op: str = "mean") -> None:
        """Set all workers' arrays to what `op` makes of them."""
        self._meet("all_reduce", self._handles.each(what)[0], op=op)

    @overload
    def all_gather(self, what: Named, *, name: str | None = None) -> Handle: ...
    @overload
    def all_gather(
        self, what: list[Named] | tuple[Named, ...], *, name: Sequence[str] | None = None
    ) -> list[Handle]: ...
    def all_gather(self, what: Several, *, name: str | Sequence[str] | None = None) -> Handle | list[Handle]:
        """All workers' arrays, one after the other, for each worker; of several objects, a list of handles."""
        handles, is_list = self._handles.each(what)
        with contextlib.ExitStack() as stack:
            names = _names(name, handles, is_list=is_list)
            made = [stack.enter_context(self._handles.made(own, None)) for own in names]
            into = {handle.number: new.number for handle, new in zip(handles, made, strict=True)}
            self._meet("all_gather", handles, into=into)
        return made if is_list else made[0]

    def profile(self, *, reset: bool = False) -> list[dict[str, float]]:
        """Where each worker's time went, in seconds: compute, copy, wait (for the others), idle (for the caller)."""
        rows: list[dict[str, float]] = []
        for rank, times in enumerate(self._crew.ask("profile", {"is_reset": reset})):
            row = {"rank": rank, "calls": times.calls, "compute": times.compute_s, "copy": times.copy_s}
            rows.append(row | {"wait": times.wait_s, "idle": times.idle_s})
        return rows

    def _define(self, number: int, work: Work, function: Function) -> None:
        unused, self._unused[:] = list(self._unused), ()
        if unused:
            self._crew.ask("forget", {"numbers": unused})
        self._crew.ask("define", {"number": number, "work": work})
        weakref.finalize(function, self._unused.append, number).atexit = False

    def _run(
        self, number: int, is_changing: bool, call: Call, updated: dict[str, int], progress: bool | None
    ) -> list[Done]:
        bar = Progress(self._board, progress, is_sliced=call.slices > 1)
        try:
            passing = [call.rows, *(call.argument(key) for key in call.passing)]
            options = {"number": number, "told": call.told(), "circle": self._circle, "updated": updated}
            done = self._crew.ask("call", options, passing=passing, on_wait=bar.show)
            if is_changing:  # all have come so far: now all make the step, or none does
                self._crew.ask("commit", {}, is_firm=True)
            return [Done(output, weight, {}) for output, weight in done]
        except BaseException:
            self._circle += 1  # some may have been cut short in a round
            raise
        finally:
            bar.close()

    def _meet(self, verb: str, handles: Sequence[Handle], **options: Any) -> None:
        which = [(handle.number, handle.name) for handle in handles]
        try:
            asked = {"verb": verb, "numbers": which, "circle": self._circle, "options": options}
            self._crew.ask("meet", asked)
        except BaseException:
            self._circle += 1
            raise

    def _of_each(self, what: Several, act: Callable[[Handle], Any]) -> Any:
        """What `act` makes of one object, or a list of what it makes of each of several."""
        handles, is_list = self._handles.each(what)
        made = [act(handle) for handle in handles]
        return made if is_list else made[0]

    def _shapes(self, handle: Handle) -> list[Any]:
        each = self._crew.ask("shapes", _named(handle))
        return [shapes[0] if len(shapes) == 1 else shapes for shapes in each]

    def _collected(self, handle: Handle, op: str) -> Any:
        total = Total(op)
        for value in self._crew.ask("get", _named(handle)):
            total.add(value, 1.0)
        return total.value()

    def _rank(self, rank: int) -> int:
        try:
            rank = operator.index(rank)
        except TypeError:
            raise InvalidArgument(f"rank {rank!r} is no whole number. Give one from 0 to {self.n - 1}.") from None
        if not 0 <= rank < self.n:
            raise InvalidArgument(f"there is no worker {rank} (0 to {self.n - 1}).")
        return rank


def _end(crew: Crew, segment: Segment, owner: int) -> None:
    if os.getpid() == owner:
        try:
            crew.close("close() was called")
        finally:
            segment.remove()


def _named(handle: Handle) -> dict[str, Any]:
    return {"number": handle.number, "name": handle.name}


def _paired(given: Any, several: Sequence[Any], what: str) -> list[Any]:
    """A list that has one for each of several objects."""
    if not isinstance(given, (list, tuple)) or len(given) != len(several):  # pyright: ignore[reportUnknownArgumentType]
        count = f"{len(given)}" if isinstance(given, (list, tuple)) else f"a value of type {type(given).__qualname__}"  # pyright: ignore[reportUnknownArgumentType]
        raise InvalidArgument(
            f"{count} was given as {what} for a list of {len(several)}. Give a list with one for each of them."
        )
    return list(given)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _names(name: str | Sequence[str] | None, several: Sequence[Any], *, is_list: bool) -> list[str | None]:
    """The names of new objects; None is for one that gets a name by itself."""
    if name is None:
        return [None] * len(several)
    if is_list:
        return _paired(name, several, "name")
    if not isinstance(name, str):
        raise InvalidArgument(f"name={name!r} is no name for one object. Give a string, or a list for a list.")
    return [name]


def _nothing() -> None:
    """The loss is in the training."""
