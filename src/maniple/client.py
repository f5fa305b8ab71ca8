"""Client: named arrays at a host, as a parameter server offers them.

client = maniple.Client("node-07:29400")          # or Client(): the address from the environment
A = client.create("A", A)                         # the first creator's value wins, and everyone gets it
client.push("A", A, alpha=0.5, beta=0.5)          # A = alpha A + beta value, atomically, exactly once
A = client.pull("A")
"""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from maniple.center.arrays import ARRAY, grid_positions, point_positions, single_array
from maniple.center.tcp_client import TcpCenter, find_layout, query_applied
from maniple.clock import Deadline
from maniple.connection.link import Endpoint, Link
from maniple.connection.retry import BLOCKED_S, dropped_on_error, retry_until
from maniple.contracts import Array, Entry
from maniple.environment import read_environment
from maniple.errors import BadFrame, HostAway, InvalidArgument, ManipleError
from maniple.layout import Layout, fitted
from maniple.wire.messages import (
    ArrayList,
    ArraysSaved,
    ChunkValue,
    ExchangeReply,
    ExchangeRequest,
    Goodbye,
    ListArrays,
    Message,
    PullElements,
    PushElements,
    SaveArrays,
)

_MAX_LIST_BYTES = 64 << 20
R = TypeVar("R")
Positions = Callable[[Entry, Any], Array]  # the flat positions of elements of an array


class Client:
    """A connection to a host's named arrays. It reconnects by itself.

    Threads may share a client; their calls run one after the other. For concurrent calls, give each thread its own
    client.

    Args:
        address: HOST:PORT or unix:PATH; by default MANIPLE_ADDRESS. The token always comes from the environment:
            MANIPLE_TOKEN_FILE or MANIPLE_TOKEN.
        timeout_s: how long a call may wait for the host, or for calls of other threads, before it raises HostAway.
    """

    def __init__(self, address: str | None = None, *, timeout_s: float = 60.0) -> None:
        environment = read_environment(address=address)
        if environment.address is None:
            raise InvalidArgument(
                "no host to connect to: no address was given, and MANIPLE_ADDRESS is not set. Start a host with "
                "`maniple serve`, or add --listen 127.0.0.1:0 to `maniple run`, and pass its HOST:PORT."
            )
        self._link = Link(Endpoint.of(environment), "data")
        self._timeout_s = timeout_s
        self._layouts: dict[str, Layout] = {}
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._retry(lambda: None)

    def create(self, name: str, value: npt.ArrayLike) -> Array:
        """Create the array `name` unless it exists; return its value, which may be another client's."""
        with self._locked():
            array = np.asarray(value)
            model = single_array(Entry(name, array.shape, str(array.dtype)), array)
            TcpCenter.open_or_create(self._link, ARRAY + name, model, deadline_s=self._timeout_s)
            return self.pull(name)

    def pull(self, name: str) -> Array:
        """Return a copy of array `name`."""
        with self._locked():
            layout, values = self._layout(name), list[Array]()
            center = TcpCenter(self._link, ARRAY + name, layout)
            self._retry(lambda: center.fetch([0], lambda _, value, __: values.append(value)))
            return _narrow(layout, values[-1]).reshape(layout.entries[0].shape)

    def push(self, name: str, value: npt.ArrayLike, *, alpha: float = 0.5, beta: float = 0.5) -> None:
        """Set `A = alpha A + beta value`, atomically. With `alpha=1`, differences of many clients add up exactly."""
        with self._locked():
            layout = self._layout(name)
            data, a, b = _checked(layout, value, layout.entries[0].shape, alpha, beta)

            def request(sequence: int) -> Message:
                return ExchangeRequest(ARRAY + name, 0, sequence, 0, "blend", a, b, "float32", 0, "none")

            self._apply(name, request, data)

    def pull_part(self, name: str, indices: Sequence[Sequence[int]]) -> Array:
        """Return the part `A[np.ix_(*indices)]` of array `name`: one list of indices per axis."""
        return self._pull_elements(name, grid_positions, indices)

    def push_part(
        self,
        name: str,
        indices: Sequence[Sequence[int]],
        value: npt.ArrayLike,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
    ) -> None:
        """Set `part = alpha part + beta value`, where the part is `A[np.ix_(*indices)]`."""
        self._push_elements(name, grid_positions, indices, value, alpha=alpha, beta=beta)

    def pull_at(self, name: str, coordinates: npt.ArrayLike) -> Array:
        """Return the k elements of array `name` at `coordinates`, k rows of one index per axis."""
        return self._pull_elements(name, point_positions, coordinates)

    def push_at(
        self, name: str, coordinates: npt.ArrayLike, values: npt.ArrayLike, *, alpha: float = 0.5, beta: float = 0.5
    ) -> None:
        """Set `A[at] = alpha A[at] + beta value` for k elements. With `alpha=1`, values for one element add up."""
        self._push_elements(name, point_positions, coordinates, values, alpha=alpha, beta=beta)

    def names(self) -> list[str]:
        """Return the names of all arrays at the host."""
        with self._locked():
            _, names = self._retry(
                lambda: self._link.request(ListArrays(), reply=ArrayList, max_reply_bytes=_MAX_LIST_BYTES)
            )
            return msgspec.json.decode(names, type=list[str])

    def save(self, path: str) -> str:
        """Have the host write all arrays to a .safetensors or .h5 file; others may keep pushing.

        `path` is relative to the folder `center` of the run. Returns the full path on the host's machine.
        """
        with self._locked():
            reply, _ = self._retry(lambda: self._link.request(SaveArrays(path), reply=ArraysSaved))
            return reply.path

    def close(self) -> None:
        """Disconnect, and let the host forget this client."""
        with self._locked():
            if self._link.is_connected:
                with suppress(OSError):  # then the host forgets it at the end of the run
                    self._link.stream().send(Goodbye())
            self._link.drop("this client was closed")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Let one thread at a time use the connection, so that each receives the reply to its own request."""
        if os.getpid() != self._pid:  # forked while another thread held the lock: that thread does not exist here
            self._lock, self._pid = threading.RLock(), os.getpid()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise HostAway(
                f"waited {self._timeout_s:g} s for another thread's call on this Client. "
                "Give each thread its own Client, or raise timeout_s."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _retry(self, request: Callable[[], R]) -> R:
        return retry_until(self._link, request, self._timeout_s)

    def _layout(self, name: str) -> Layout:
        """Return shape and dtype of an array. They never change, so that they are asked for once."""
        if name not in self._layouts:
            self._layouts[name] = self._retry(lambda: find_layout(self._link, ARRAY + name))
        return self._layouts[name]

    def _pull_elements(self, name: str, positions_of: Positions, where: Any) -> Array:
        with self._locked():
            layout = self._layout(name)
            positions, dtype = positions_of(layout.entries[0], where), np.dtype(layout.places[0][0])
            flat = np.ascontiguousarray(positions).reshape(-1)
            request, size = PullElements(ARRAY + name, flat.size), flat.size * dtype.itemsize
            _, data = self._retry(lambda: self._link.request(request, flat, reply=ChunkValue, max_reply_bytes=size))
            if len(data) != size:
                raise BadFrame(f"{size} bytes of elements were expected, and {len(data)} came.")
            return _narrow(layout, np.ndarray(flat.size, dtype, data)).reshape(positions.shape)

    def _push_elements(
        self, name: str, positions_of: Positions, where: Any, value: npt.ArrayLike, *, alpha: float, beta: float
    ) -> None:
        with self._locked():
            layout = self._layout(name)
            positions = positions_of(layout.entries[0], where)
            data, a, b = _checked(layout, value, positions.shape, alpha, beta)
            flat = np.ascontiguousarray(positions).reshape(-1)
            if alpha != 1 and np.unique(flat).size < flat.size:
                raise InvalidArgument(
                    f"the same element of {name!r} is given twice, which alpha={alpha} cannot weigh in one push. "
                    "Give each element once, or push differences with alpha=1: those add up."
                )
            self._apply(name, lambda sequence: PushElements(ARRAY + name, flat.size, sequence, a, b), flat, data)

    def _apply(self, name: str, request: Callable[[int], Message], *payload: Array) -> None:
        """Have a push applied exactly once: after a break, ask whether it was applied before sending it again."""
        deadline = Deadline(self._timeout_s, slice_s=self._timeout_s + BLOCKED_S)
        while True:
            self._retry(lambda: None)
            self._link.sequence += 1
            sequence = self._link.sequence
            try:
                with dropped_on_error(self._link):
                    reply, _ = self._link.request(request(sequence), *payload, reply=ExchangeReply)
                break
            except ManipleError:
                raise
            except OSError as error:
                if self._was_applied(name, sequence, deadline.left_s()):
                    return
                if deadline.is_over():
                    raise HostAway(
                        f"the connection broke again and again during a push to {name!r}: {error}"
                    ) from error
        if not reply.is_clean:
            raise InvalidArgument(
                f"some values pushed to {name!r} are not finite, or would make it so; the array keeps its own values "
                "there. Look at what was pushed."
            )

    def _was_applied(self, name: str, sequence: int, timeout_s: float) -> bool:
        return retry_until(self._link, lambda: query_applied(self._link, ARRAY + name, sequence, 0, [0])[0], timeout_s)


def _checked(
    layout: Layout, value: npt.ArrayLike, shape: tuple[int, ...], alpha: Any, beta: Any
) -> tuple[Array, float | int, float | int]:
    """Return `value` flat and in the center's dtype, and the weights as they are sent.

    InvalidArgument if it cannot be pushed with these weights.
    """
    entry, dtype = layout.entries[0], np.dtype(layout.places[0][0])
    array = np.asarray(value)
    if array.shape != shape:
        raise InvalidArgument(
            f"{list(array.shape)} values were pushed to {list(shape)} elements of {entry}. Push the same shape."
        )
    array = fitted(entry, array, str(dtype))
    is_integer = dtype.kind in "iu"
    for name, weight in (("alpha", alpha), ("beta", beta)):
        is_real = isinstance(weight, int | float | np.integer | np.floating)
        if not is_real or not np.isfinite(weight) or (is_integer and not float(weight).is_integer()):
            raise InvalidArgument(
                f"{name}={weight!r} cannot be a weight for {entry}: it must be a finite number, and an integer for "
                "integers (alpha=1, beta=1 adds the value)."
            )
    kind = int if is_integer else float  # floats would round large integers
    return array.reshape(-1), kind(alpha), kind(beta)


def _narrow(layout: Layout, value: Array) -> Array:
    """Convert a value from the center's dtype to the array's. For float16 it is clipped, as for replicas."""
    layout.round(0, value)
    return value.astype(layout.entries[0].dtype, copy=False)
