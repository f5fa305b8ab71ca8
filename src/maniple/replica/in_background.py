"""Exchanges in the background: a copy of the replica is exchanged while training continues.

The copy `s` is sent as if it were the replica, by the same code, and becomes `y`. What training has changed meanwhile
is kept when the result is applied between two steps:

    x = y + (x - s)

For EASGD this is `x -= d`; for rules that set the replica to the center, `x = c + (x - s)`. Nothing is lost or counted
twice: if the exchange fails half-way, what the center has applied of it is in the copy, and reaches the replica in the
same way.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from maniple.adapters import Adapter
from maniple.clock import Deadline, clock
from maniple.contracts import Array, Entry
from maniple.layout import Layout
from maniple.replica.nonfinite import is_finite
from maniple.replica.replica import TrainingMark

T = TypeVar("T")
_POLL_S = 0.05  # between two calls of `on_wait`


class BackgroundCall(Generic[T]):
    """One call in a thread of its own.

    Attributes:
        mark: how far training was when the call began.
        duration_s: how long the call took; 0 while it runs.
    """

    def __init__(self, act: Callable[[], T], mark: TrainingMark) -> None:
        self.mark, self.begin, self.start, self.duration_s = mark, clock.monotonic(), clock.time(), 0.0
        self._act = act
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        # A daemon: a worker whose script has failed ends without waiting for the network.
        threading.Thread(target=self._run, name="maniple-exchange", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """The call has ended."""
        return self._is_done.is_set()

    def wait(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of the call, which has deadlines of its own; `on_wait` may raise to give up."""
        while not self._is_done.wait(_POLL_S):
            on_wait()

    def result(self, timeout_s: float, what: str, on_wait: Callable[[], None] = lambda: None) -> T:
        """Wait for the end of the call; give its result, or raise its error.

        The call has deadlines of its own; `timeout_s` is for one that must be shorter. `on_wait` is called every 50 ms,
        and may raise to give up: the call then goes on, and `result` may be called again.
        """
        deadline = Deadline(timeout_s)

        def look() -> None:
            on_wait()
            deadline.check(lambda: what)

        self.wait(look)
        if self._error is not None:
            raise self._error
        return self._result  # pyright: ignore[reportReturnType]

    def _run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:  # raised again by `result`, in the training thread
            self._error = error
        self.duration_s = max(1e-9, clock.monotonic() - self.begin)
        self._is_done.set()


class ReplicaCopy:
    """A copy of a replica's shared values (`contracts.FlatModel`), and how to bring its changes back.

    Attributes:
        flat: the copy `s`, which an exchange turns into `y`.
    """

    def __init__(self, model: Adapter, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self.flat, self._sent = layout.allocate(), layout.allocate()
        self._values, self._before = layout.views(self.flat), layout.views(self._sent)

    @property
    def entries(self) -> list[Entry]:
        """Those of the replica."""
        return self._model.entries

    def begin(self) -> None:
        """Do nothing: the copy is memory of its own."""

    def array(self, i: int) -> Array:
        """Entry i of the copy."""
        return self._values[i]

    def commit(self, i: int) -> None:
        """Do nothing: `array` returns the memory itself."""

    def flat_vectors(self) -> tuple[dict[str, Array], int]:
        """The copy as flat vectors."""
        return self.flat, len(self._values)

    def take(self) -> None:
        """Set the copy to the replica."""
        model, (flat, count) = self._model, self._model.flat_vectors() or ({}, 0)
        if count == len(self._values):
            for dtype, vector in self.flat.items():
                vector[:] = flat[dtype]
        else:
            model.begin()
            for i, value in enumerate(self._values):
                value[:] = model.array(i)
                model.commit(i)
        self.drop_changes()

    def bring_back(self) -> None:
        """Apply to the replica what has changed in the copy since `take`, or since this was last called."""
        model = self._model
        model.begin()
        for i, (new, before) in enumerate(zip(self._values, self._before, strict=True)):
            value = model.array(i)
            # In this order, a replica that has not trained meanwhile becomes `y` to the bit.
            with np.errstate(invalid="ignore"):
                np.subtract(value, before, out=before)
            if not is_finite(before):  # such an element takes what the center gave for it
                np.copyto(before, 0, where=~np.isfinite(before))
            add_since(before, new, value, is_buffer=model.is_buffer(i))
            model.commit(i)
        self.drop_changes()

    def drop_changes(self) -> None:
        """Do not bring back what has changed in the copy."""
        for dtype, vector in self._sent.items():
            vector[:] = self.flat[dtype]


def add_since(since: Array, y: Array, x: Array, *, is_buffer: bool) -> None:
    """Set `x` to `y`, which was received, plus what training has changed since.

    A running variance may fall by more than `y` meanwhile, and must not become negative: it then takes `y`.
    """
    was_positive = x >= 0 if is_buffer else None
    np.add(since, y, out=x)
    if was_positive is not None:
        np.copyto(x, y, where=was_positive & (x < 0) & (y >= 0))
