"""A worker of a pool: does what the caller asks, one thing after the other, until the caller is gone.

`main` is called with LINK LIFE SEGMENT RANK WORLD on the command line: LINK and LIFE are file descriptors, of the
connection and of a pipe that ends with the caller's life.
"""

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np

from maniple.center.segment import Segment
from maniple.circle.calls import Calls
from maniple.circle.shared import Shared
from maniple.pool import objects
from maniple.pool.box import pack, unpack
from maniple.pool.calling import Call, Times, Work, carry_out
from maniple.pool.data import forget_data
from maniple.pool.link import Link, ready
from maniple.pool.memory import Memory
from maniple.pool.training import Training

STAGE, BOARD = "stage", "board"  # files in the segment: the caller's large arrays, and how far each worker is
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
_DAY_S = 86_400.0  # nobody waits so long in a circle: who dies is noticed, and the caller can interrupt
_LOOK_MS = 1000
_AWAKE_S = 0.001


def results(rank: int) -> str:
    """The file of a worker's large outputs."""
    return f"results-{rank}"


class Station:
    """Where a worker does its work."""

    def __init__(self, segment: Path, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._segment = Segment(segment)
        self._stage = Memory(segment / STAGE)
        self._results = Memory(segment / results(rank), is_new=True)
        self._board = Memory(segment / BOARD).view("int64", (world, 2))
        self._works: dict[int, Work] = {}
        self._number = 0  # of the circle
        self._circle: tuple[int, Shared] | None = None
        self._times = Times()
        self._commit: Callable[[], None] = _nothing  # what is left to do of a call when all have succeeded
        self.is_working = False

    def answer(self, message: bytes | memoryview) -> bytes:
        """Do what a message asks, and say how it went."""
        try:
            self.is_working = True
            verb, options = unpack(message, self._stage)
            value = getattr(self, f"_do_{verb}")(**options)
            begin = time.perf_counter()
            answer = pack((DONE, value), self._results)
            self._times.copy_s += time.perf_counter() - begin
        except KeyboardInterrupt:
            self.is_working = False
            answer = self.interrupted()
        except BaseException as error:
            self.is_working = False
            answer = self._failure(error)
        finally:
            self.is_working = False
        return answer

    def interrupted(self) -> bytes:
        """Say that this worker was told to stop."""
        return pack((INTERRUPTED, None), self._results)

    def _failure(self, error: BaseException) -> bytes:
        text = "".join(traceback.format_exception(error))
        short = traceback.format_exception_only(error)[-1].strip()  # also of an error that cannot tell its text
        try:
            pickle.loads(cloudpickle.dumps(error))  # some can be packed, but not opened
            return pack((FAILED, (error, short, text)), self._results)
        except Exception:
            return pack((FAILED, (None, short, text)), self._results)

    def _do_path(self, path: list[str]) -> None:
        sys.path[:] = path

    def _do_define(self, number: int, work: Work) -> None:
        self._works[number] = work

    def _do_forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._works.pop(number, None)
            objects.drop(number)

    def _do_call(self, number: int, told: Any, circle: int, updated: dict[str, int]) -> tuple[Any, float]:
        self._number = circle

        def tick(k: int, n: int) -> None:
            self._board[self.rank] = k, n

        tick(0, 0)
        work, waited_s = self._works[number], self._waited_s
        training = cast(Training | None, work.training)  # a handle is the object itself here
        done = carry_out(
            work,
            Call(*told),
            rank=self.rank,
            world=self.world,
            times=self._times,
            tick=tick,
            training=training,
            circle=lambda: self.circle,
        )
        self._times.wait_s += self._waited_s - waited_s
        self._times.compute_s -= self._waited_s - waited_s

        def commit() -> None:
            begin = time.perf_counter()
            if training is not None:
                training.step()
            for name, value in done.updates.items():
                objects.keep(updated[name], value)
            self._times.compute_s += time.perf_counter() - begin

        self._commit = commit
        return done.output, done.weight

    def _do_commit(self) -> None:
        """Change what is kept. Not interrupted: all workers do it, or none."""
        self.is_working = False
        commit, self._commit = self._commit, _nothing
        commit()

    def _do_keep(self, number: int, value: Any, is_factory: bool) -> None:
        objects.keep(number, value() if is_factory else value)

    def _do_train(self, number: int, model: Any, loss: Any, optimizer: Any, settings: dict[str, float]) -> None:
        objects.keep(number, Training(model, loss, optimizer, settings))

    def _do_drop(self, number: int) -> None:
        objects.drop(number)

    def _do_share(self, number: int, value: Any) -> None:
        from maniple.pool.rows import part, taken

        rows = taken(value, part(range(len(value)), self.world, self.rank))
        objects.keep(number, rows.copy() if isinstance(rows, np.ndarray) else rows.clone())

    def _do_get(self, number: int, name: str) -> Any:
        return objects.find(number, name)

    def _do_shapes(self, number: int, name: str) -> list[tuple[int, ...]]:
        return [tuple(array.shape) for array in objects.arrays_of(objects.find(number, name), name)]

    def _do_meet(self, verb: str, numbers: list[tuple[int, str]], circle: int, options: dict[str, Any]) -> None:
        self._number = circle
        begin, calls, waited_s = time.perf_counter(), Calls(self.circle), self._waited_s
        for number, name in numbers:
            objects.meet(calls, verb, number, name, options)
        waited_s = self._waited_s - waited_s
        self._times.wait_s += waited_s
        self._times.copy_s += time.perf_counter() - begin - waited_s

    def _do_free(self, path: Path) -> None:
        forget_data(path)

    def _do_profile(self, is_reset: bool) -> Times:
        times = self._times
        times.settle()
        if is_reset:
            self._times = Times()
        return times

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._circle is None else self._circle[1].roster.waited_s

    @property
    def circle(self) -> Shared:
        """Where the workers meet; a new one after a call that was cut short."""
        if self._circle is None or self._circle[0] != self._number:
            if self._circle is not None:
                self._circle[1].close()
            name = f"circle-{self._number}"
            made = Shared(self._segment, name, rank=self.rank, world=self.world, deadline_s=_DAY_S)
            self._circle = self._number, made
        return self._circle[1]


def main() -> None:
    """Serve until the caller closes the connection."""
    link_file, life, segment, rank, world = sys.argv[1:]
    link = Link(socket.socket(fileno=int(link_file)))
    threading.Thread(target=_watch, args=(int(life), Path(segment)), daemon=True).start()
    station = Station(Path(segment), int(rank), int(world))
    signal.signal(signal.SIGINT, _interrupter(station))
    link.send(b"")  # ready
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while True:
        try:
            ready(poll, _AWAKE_S, _LOOK_MS)
            message = link.receive()
        except (EOFError, OSError):
            return
        try:
            answer = station.answer(message)
        except KeyboardInterrupt:  # in the middle of an answer
            answer = station.interrupted()
        for stream in (sys.stdout, sys.stderr):  # what was printed is to be seen now
            with contextlib.suppress(AttributeError, OSError, ValueError):  # by those who can
                stream.flush()
        try:
            link.send(answer)
        except OSError:  # the caller is gone
            return


def _nothing() -> None:
    """There is nothing left to do."""


def _interrupter(station: Station) -> Callable[..., None]:
    def interrupt(*_: Any) -> None:
        if station.is_working:
            raise KeyboardInterrupt

    return interrupt


def _watch(life: int, segment: Path) -> None:
    """End this process when the caller is gone, and remove what would be left."""
    parent, poll = os.getppid(), select.poll()
    poll.register(life, select.POLLIN)
    while os.getppid() == parent and not poll.poll(_LOOK_MS):  # nothing is ever written there
        pass
    shutil.rmtree(segment, ignore_errors=True)
    os._exit(1)
