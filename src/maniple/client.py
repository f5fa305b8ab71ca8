"""Named arrays at a host, one call at a time: what the classic parameter server offered.

client = maniple.Client("node-07:29400")          # or Client(): the address from the environment
A = client.create("A", A)                         # the first creator's value wins; everyone gets the settled one
client.push("A", A, alpha=0.5, beta=0.5)          # A = alpha A + beta value, atomically, exactly once
A = client.pull("A")
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from maniple.center.arrays import ARRAY, Brought
from maniple.center.batch import ask
from maniple.center.link import Door, Link, checked
from maniple.center.positions import crossing, points
from maniple.center.remote import Remote, find_layout
from maniple.center.tcp import insist
from maniple.contracts import Array, Entry
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError
from maniple.layout import Layout, fitted
from maniple.place import find
from maniple.wire.messages import (
    Answer,
    Bye,
    Listing,
    Message,
    Names,
    Offer,
    Put,
    Save,
    Saved,
    Take,
    Value,
)

_MAX_LIST_BYTES = 64 << 20
P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(call: "Callable[Concatenate[Client, P], R]") -> "Callable[Concatenate[Client, P], R]":
    """Let one thread at a time use the connection: a question and its answer must not be torn apart by another's."""

    @functools.wraps(call)
    def alone(client: "Client", *args: P.args, **kwargs: P.kwargs) -> R:
        with client._turn():  # pyright: ignore[reportPrivateUsage]
            return call(client, *args, **kwargs)

    return alone


class Client:
    """A connection to a host's named arrays. Calls wait for a host that is away, up to `timeout_s`.

    Threads may share a client: their calls are made one after the other. For calls at the same time, give each
    thread a client of its own.

    Args:
        address: HOST:PORT or unix:PATH; by default MANIPLE_ADDRESS. The token always comes from the environment:
            MANIPLE_TOKEN_FILE or MANIPLE_TOKEN.
        timeout_s: how long a call may wait for the host, or for calls of other threads, before it raises HostAway.
    """

    def __init__(self, address: str | None = None, *, timeout_s: float = 60.0) -> None:
        place = find(address=address)
        if place.address is None:
            raise InvalidArgument(
                "no host to connect to: no address was given, and MANIPLE_ADDRESS is not set. Start one with "
                "`maniple serve`, or add --listen 127.0.0.1:0 to `maniple run`, and pass its HOST:PORT."
            )
        self._link = Link(Door.of(place), "data")
        self._timeout_s = timeout_s
        self._layouts: dict[str, Layout] = {}
        self._lock, self._pid = threading.RLock(), os.getpid()
        insist(self._link, lambda: None, timeout_s)

    @_one_at_a_time
    def create(self, name: str, value: npt.ArrayLike) -> Array:
        """Make the array `name`, unless it is there already; gives its value, whoever has made it."""
        array = np.asarray(value)
        entry = Entry(name, array.shape, str(array.dtype))
        brought = Brought(entry, array)
        remote = Remote(self._link, ARRAY + name, brought.layout)
        insist(self._link, lambda: remote.open(brought, ""), self._timeout_s)
        return self.pull(name)

    @_one_at_a_time
    def pull(self, name: str) -> Array:
        """The value of array `name`, as an array of one's own."""
        layout = self._layout(name)
        remote = Remote(self._link, ARRAY + name, layout)
        taken: list[Array] = []
        insist(self._link, lambda: remote.fetch([0], lambda _, value, __: taken.append(value)), self._timeout_s)
        return self._narrow(layout, taken[-1]).reshape(layout.entries[0].shape)

    @_one_at_a_time
    def push(self, name: str, value: npt.ArrayLike, *, alpha: float = 0.5, beta: float = 0.5) -> None:
        """`A = alpha A + beta value`, atomically. With `alpha=1`, differences of many clients add up exactly."""
        layout = self._layout(name)
        entry = layout.entries[0]
        data = self._checked(layout, value, entry.shape, alpha, beta)
        alpha, beta = self._weight(layout, alpha), self._weight(layout, beta)

        def offer(sequence: int) -> Message:
            return Offer(ARRAY + name, 0, sequence, 0, "blend", alpha, beta, "float32", 0, "none")

        self._apply(name, offer, data)

    @_one_at_a_time
    def pull_part(self, name: str, indices: Sequence[Sequence[int]]) -> Array:
        """The part of array `name` at the crossing of one list of indices per axis, like `A[np.ix_(...)]`."""
        layout = self._layout(name)
        positions = crossing(layout.entries[0], indices)
        return self._take(name, layout, positions)

    @_one_at_a_time
    def push_part(
        self,
        name: str,
        indices: Sequence[Sequence[int]],
        value: npt.ArrayLike,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
    ) -> None:
        """`part = alpha part + beta value` for the part at the crossing of one list of indices per axis."""
        layout = self._layout(name)
        self._put(name, crossing(layout.entries[0], indices), value, alpha, beta)

    @_one_at_a_time
    def pull_at(self, name: str, coordinates: npt.ArrayLike) -> Array:
        """The k elements of array `name` at `coordinates`, k rows of one index per axis."""
        layout = self._layout(name)
        return self._take(name, layout, points(layout.entries[0], coordinates))

    @_one_at_a_time
    def push_at(
        self, name: str, coordinates: npt.ArrayLike, values: npt.ArrayLike, *, alpha: float = 0.5, beta: float = 0.5
    ) -> None:
        """`A[at] = alpha A[at] + beta value` for k elements. With `alpha=1`, values for the same element add up."""
        layout = self._layout(name)
        self._put(name, points(layout.entries[0], coordinates), values, alpha, beta)

    @_one_at_a_time
    def names(self) -> list[str]:
        """The names of all arrays at the host."""

        def names() -> list[str]:
            stream = self._link.stream()
            stream.send(Names())
            message, size = stream.receive()
            if not isinstance(checked(message), Listing):
                raise BadFrame("a list of names was expected.")
            return msgspec.json.decode(stream.receive_bytes(size, at_most=_MAX_LIST_BYTES), type=list[str])

        return insist(self._link, names, self._timeout_s)

    @_one_at_a_time
    def save(self, path: str) -> str:
        """Have the host write all arrays to a .safetensors or .h5 file of its run folder, while others go on.

        `path` lies in the folder `center` of the run; gives the whole path on the host's machine.
        """
        answer = insist(self._link, lambda: self._link.say(Save(path)), self._timeout_s)
        if not isinstance(answer, Saved):
            raise BadFrame("the path of a saved file was expected.")
        return answer.path

    @_one_at_a_time
    def close(self) -> None:
        """Let the host forget this client."""
        if self._link.is_connected:
            with suppress(OSError):  # then it forgets with the run
                self._link.stream().send(Bye())
        self._link.drop("this client was closed")

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Generator[None]:
        if os.getpid() != self._pid:  # forked while another thread was in a call: that thread is not in this process
            self._lock, self._pid = threading.RLock(), os.getpid()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise HostAway(
                f"waited {self._timeout_s:g} s for the call of another thread on this Client, which has not ended. "
                "Give each thread a Client of its own, or raise timeout_s."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _layout(self, name: str) -> Layout:
        """Shape and dtype of an array; they never change."""

        if name not in self._layouts:
            self._layouts[name] = insist(self._link, lambda: find_layout(self._link, ARRAY + name), self._timeout_s)
        return self._layouts[name]

    def _checked(self, layout: Layout, value: npt.ArrayLike, shape: tuple[int, ...], alpha: Any, beta: Any) -> Array:
        """The value in the center's dtype, flat, if it can be pushed so."""
        entry, dtype = layout.entries[0], np.dtype(layout.places[0][0])
        array = np.asarray(value)
        if array.shape != shape:
            raise InvalidArgument(
                f"{list(array.shape)} values were pushed to {list(shape)} elements of {entry}. Push the same shape."
            )
        array = fitted(entry, array, str(dtype))
        for weight, word in ((alpha, "alpha"), (beta, "beta")):
            is_whole = float(weight).is_integer() if not isinstance(weight, complex) else False
            if isinstance(weight, complex) or not np.isfinite(weight) or (dtype.kind in "iu" and not is_whole):
                raise InvalidArgument(
                    f"{word}={weight!r} cannot weigh {entry}: it must be a finite number, and whole for whole numbers "
                    "(alpha=1, beta=1 adds the value)."
                )
        return array.reshape(-1)

    def _weight(self, layout: Layout, weight: Any) -> float | int:
        """A weight as the wire has it: whole numbers stay whole."""
        return int(weight) if layout.places[0][0].startswith(("int", "uint")) else float(weight)

    def _narrow(self, layout: Layout, value: Array) -> Array:
        """A value as the center keeps it, in the dtype of its array. For float16 it is clipped, as for replicas."""
        layout.round(0, value)
        return value.astype(layout.entries[0].dtype, copy=False)

    def _take(self, name: str, layout: Layout, positions: Array) -> Array:
        def take() -> Array:
            stream = self._link.stream()
            stream.send(Take(ARRAY + name, positions.size), np.ascontiguousarray(positions).reshape(-1))
            message, size = stream.receive()
            values = np.empty(positions.size, layout.places[0][0])
            if not isinstance(checked(message), Value) or size != values.nbytes:
                raise BadFrame("some elements of an array were expected.")
            stream.receive_into(values)
            return values

        values = insist(self._link, take, self._timeout_s)
        return self._narrow(layout, values).reshape(positions.shape)

    def _put(self, name: str, positions: Array, value: npt.ArrayLike, alpha: float, beta: float) -> None:
        data = self._checked(self._layout(name), value, positions.shape, alpha, beta)
        flat = np.ascontiguousarray(positions).reshape(-1)
        if alpha != 1 and np.unique(flat).size < flat.size:
            raise InvalidArgument(
                f"the same element of {name!r} is given twice, which alpha={alpha} cannot weigh in one push. "
                "Give each element once, or push differences with alpha=1: those add up."
            )
        alpha, beta = (self._weight(self._layout(name), weight) for weight in (alpha, beta))
        self._apply(name, lambda sequence: Put(ARRAY + name, flat.size, sequence, alpha, beta), flat, data)

    def _apply(self, name: str, message: Callable[[int], Message], *payload: Array) -> None:
        """Have something applied exactly once: after a break, ask whether it was before saying it again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            insist(self._link, lambda: None, self._timeout_s)
            self._link.sequence += 1
            sequence = self._link.sequence
            try:
                stream = self._link.stream()
                stream.send(message(sequence), *payload)
                answer = stream.receive_message()
                checked(answer)
                if not isinstance(answer, Answer):
                    raise BadFrame("the acknowledgement of a push was expected.")
                if not answer.is_clean:
                    raise InvalidArgument(
                        f"some values pushed to {name!r} are not finite, or would not be in it; the array keeps its "
                        "own there. Look at what was pushed."
                    )
                return
            except ManipleError:
                self._link.drop("refused")
                raise
            except OSError as error:
                self._link.drop(str(error))
                if self._was_applied(name, sequence, deadline):
                    return
                if time.monotonic() > deadline:
                    raise HostAway(f"a push to {name!r} was cut off again and again: {error}") from error
            except BaseException:  # interrupted: a late answer must not be taken for that of another push
                self._link.drop("interrupted")
                raise

    def _was_applied(self, name: str, sequence: int, deadline: float) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        return insist(self._link, lambda: ask(self._link, ARRAY + name, sequence, 0, [0])[0], left_s)
