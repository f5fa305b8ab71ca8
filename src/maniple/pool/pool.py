"""The pool: workers of a program that stays serial."""

import atexit
import functools
import itertools
import os
import secrets
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from maniple.center.segment import Segment
from maniple.errors import InvalidArgument
from maniple.place import shared_memory
from maniple.pool.calling import Call, Done, Key, Work
from maniple.pool.crew import Crew
from maniple.pool.data import Data, share_data
from maniple.pool.function import Function
from maniple.pool.memory import Memory
from maniple.pool.objects import Handle
from maniple.pool.outputs import Ops, Total, check_ops
from maniple.pool.progress import Progress
from maniple.pool.served import BOARD
from maniple.pool.training import Training, check_optimizer

Named = Handle | str
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
        self._numbers = itertools.count(1)
        self._circle = 0
        self._handles: dict[str, Handle] = {}
        self._data: list[Data] = []
        board = Memory(self._segment.path / BOARD, is_new=True)
        board.reserve(16 * self.n)
        self._board = board.view("int64", (self.n, 2))
        atexit.register(self.close)
        try:
            self._crew = Crew(self._segment.path, self.n, devices)
        except BaseException:
            atexit.unregister(self.close)
            self._segment.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.n})" if not self._crew.closed else f"Pool({self.n}), closed"

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return self._crew.pids

    def close(self) -> None:
        """End the workers, and free all data. Nothing of the pool can be used after that."""
        atexit.unregister(self.close)
        self._crew.close("close() was called")
        for data in list(self._data):
            data.free()
        self._segment.remove()

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
        number, work = next(self._numbers), Work(fn, reduce, dict(update or {}))
        made = Function(work, scatter, broadcast, functools.partial(self._run, number))
        self._crew.ask("define", {"number": number, "work": work})
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
        handle = model if isinstance(model, Handle) else self.replicate(model)
        made = functools.partial(Training, local, loss, optimizer, settings)  # if `serial` is called
        training = self._new_handle(None, made, is_factory=True)
        parts = {"model": handle, "loss": loss, "optimizer": optimizer, "settings": settings}
        self._crew.ask("train", {"number": training.number, **parts})
        number = next(self._numbers)
        work = Work(loss, "mean", training=training)
        function = Function(work, range(_MANY if sets is None else sets), (), functools.partial(self._run, number))
        function.model = handle
        self._crew.ask("define", {"number": number, "work": Work(_nothing, "mean", training=training)})
        return function

    def data(self, array: Any) -> Data:
        """A copy of an array or a CPU tensor in shared memory, seen by all workers; a `np.memmap` stays in its file."""
        self._crew.check()

        def forget(path: Path) -> None:
            self._data.remove(data)
            if not self._crew.closed:
                self._crew.ask("free", {"path": path})

        data = share_data(array, self._segment.path / f"data-{next(self._numbers)}", forget)
        self._data.append(data)
        return data

    def replicate(self, made: Any, *, name: str | None = None) -> Handle:
        """An object of its own for each worker: a copy of this one, or what this function or class makes there."""
        is_factory = isinstance(made, (types.FunctionType, types.MethodType, functools.partial, type))
        handle = self._new_handle(name, made, is_factory=is_factory)
        self._crew.ask("keep", {"number": handle.number, "value": made, "is_factory": is_factory})
        return handle

    def drop(self, what: Named) -> None:
        """Let the workers have an object no more."""
        handle = self._handle(what)
        del self._handles[handle.name]
        self._crew.ask("drop", {"number": handle.number})

    def get(self, what: Named, rank: int = 0) -> Any:
        """A copy of worker `rank`'s object."""
        handle = self._handle(what)
        return self._crew.ask("get", _named(handle), to=self._rank(rank))

    def set(self, what: Named, rank: int, value: Any) -> None:
        """Give worker `rank` another object, or a module a state dict."""
        handle = self._handle(what)
        options = {"number": handle.number, "value": value, "is_factory": False}
        self._crew.ask("keep", options, to=self._rank(rank))

    def shapes(self, what: Named) -> list[Any]:
        """The shape of each worker's array; of an object with several, a list of them."""
        each = self._crew.ask("shapes", _named(self._handle(what)))
        return [shapes[0] if len(shapes) == 1 else shapes for shapes in each]

    def lengths(self, what: Named) -> list[int]:
        """How many rows each worker's array has."""
        return [shape[0] for shape in self.shapes(what)]

    def scatter(self, values: Any, *, name: str | None = None) -> Handle:
        """Split an array along axis 0; each worker keeps its part. Give it to a function that scatters it."""
        handle = self._new_handle(name, values.here() if isinstance(values, Data) else values)
        self._crew.ask("share", {"number": handle.number, "value": values})
        return handle

    def gather(self, what: Named) -> Any:
        """All workers' arrays, one after the other along axis 0."""
        return self._collected(what, "gather")

    def reduce(self, what: Named, op: str = "mean") -> Any:
        """What `op` makes of all workers' arrays, for the caller."""
        return self._collected(what, op)

    def broadcast(self, what: Named | Sequence[Named], *, root: int = 0) -> None:
        """Set all workers' arrays to those of worker `root`."""
        self._meet("broadcast", what, root=self._rank(root))

    def all_reduce(self, what: Named | Sequence[Named], op: str = "mean") -> None:
        """Set all workers' arrays to what `op` makes of them."""
        self._meet("all_reduce", what, op=op)

    def all_gather(self, what: Named, *, name: str | None = None) -> Handle:
        """All workers' arrays, one after the other, for each worker."""
        handle = self._new_handle(name, None)
        self._meet("all_gather", what, into=handle.number)
        return handle

    def profile(self, *, reset: bool = False) -> list[dict[str, float]]:
        """Where each worker's time went, in seconds: compute, copy, wait (for the others), idle (for the caller)."""
        rows: list[dict[str, float]] = []
        for rank, times in enumerate(self._crew.ask("profile", {"is_reset": reset})):
            row = {"rank": rank, "calls": times.calls, "compute": times.compute_s, "copy": times.copy_s}
            rows.append(row | {"wait": times.wait_s, "idle": times.idle_s})
        return rows

    def _run(self, number: int, call: Call, updated: dict[str, int], progress: bool | None) -> list[Done]:
        bar = Progress(self._board, progress, is_sliced=call.slices > 1)
        try:
            passing = [call.argument(key) for key in call.passing]
            options = {"number": number, "call": call, "circle": self._circle, "updated": updated}
            return self._crew.ask("call", options, passing=passing, on_wait=bar.show)
        except BaseException:
            self._circle += 1  # some may have been cut short in a round
            raise
        finally:
            bar.close()

    def _meet(self, verb: str, what: Named | Sequence[Named], **options: Any) -> None:
        handles = [self._handle(one) for one in ([what] if isinstance(what, (Handle, str)) else what)]
        numbers = [(handle.number, handle.name) for handle in handles]
        try:
            asked = {"verb": verb, "numbers": numbers, "circle": self._circle, "options": options}
            self._crew.ask("meet", asked)
        except BaseException:
            self._circle += 1
            raise

    def _collected(self, what: Named, op: str) -> Any:
        check_ops(op, "op")
        total = Total(op)
        for value in self._crew.ask("get", _named(self._handle(what))):
            total.add(value, 1.0)
        return total.value()

    def _new_handle(self, name: str | None, local: Any, *, is_factory: bool = False) -> Handle:
        number = next(self._numbers)
        name = name if name is not None else f"object-{number}"
        if name in self._handles:
            raise InvalidArgument(f"there is an object {name!r} already. Drop it first, or choose another name.")
        self._handles[name] = Handle(number, name, local, is_factory=is_factory)
        return self._handles[name]

    def _handle(self, what: Named) -> Handle:
        name = what.name if isinstance(what, Handle) else what
        if name not in self._handles:
            known = ", ".join(self._handles) or "none"
            raise InvalidArgument(f"there is no object {name!r} in this pool (there are: {known}).")
        return self._handles[name]

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.n:
            raise InvalidArgument(f"there is no worker {rank} (0 to {self.n - 1}).")
        return rank


def _named(handle: Handle) -> dict[str, Any]:
    return {"number": handle.number, "name": handle.name}


def _nothing() -> None:
    """The loss is in the training."""
