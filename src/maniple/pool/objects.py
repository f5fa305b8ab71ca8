"""Objects that each worker has of its own, and the arrays in them."""

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from maniple.circle.calls import Calls
from maniple.circle.values import is_tensor
from maniple.errors import InvalidArgument
from maniple.pool.outputs import joined


class Handle:
    """What the caller has of an object that each worker has for itself. Passed to a function, it is that object.

    Attributes:
        name: by which it can be called as well.
        parts: into how many the caller's own is split among the workers; 1: each has a whole one.
    """

    def __init__(self, number: int, name: str, local: Any = None, *, is_factory: bool = False, parts: int = 1) -> None:
        self.number, self.name, self.parts = number, name, parts
        self._local, self._is_factory = local, is_factory

    @property
    def local(self) -> Any:
        """The caller's own, for `serial` calls; made when it is first needed."""
        if self._is_factory:
            self._local, self._is_factory = self._local(), False
        return self._local

    @local.setter
    def local(self, value: Any) -> None:
        self._local, self._is_factory = value, False

    def __repr__(self) -> str:
        return f"Handle({self.name!r})"

    def __reduce__(self) -> Any:
        return find, (self.number, self.name)


Named = Handle | str
Several = Named | Sequence[Named]
numbers = itertools.count(1)  # of all pools: what belongs to one is not found in another


class Handles:
    """Those of one pool, by name."""

    def __init__(self) -> None:
        self._known: dict[str, Handle] = {}

    @contextlib.contextmanager
    def made(self, name: str | None, local: Any, *, is_factory: bool = False, parts: int = 1) -> Generator[Handle]:
        """A new one, for what is made meanwhile. If that fails, the name is free again."""
        number = next(numbers)
        name = name if name is not None else f"object-{number}"
        if name in self._known:
            raise InvalidArgument(f"there is an object {name!r} already. Drop it first, or choose another name.")
        self._known[name] = Handle(number, name, local, is_factory=is_factory, parts=parts)
        try:
            yield self._known[name]
        except BaseException:
            del self._known[name]
            raise

    def each(self, what: Several) -> tuple[list[Handle], bool]:
        """Those that are meant, and whether a list or tuple of them was given; none is given twice."""
        is_list = isinstance(what, (list, tuple))
        found = [self.find(one) for one in (what if is_list else [what])]
        for i, handle in enumerate(found):
            if handle in found[:i]:
                raise InvalidArgument(f"object {handle.name!r} is given twice in one call. Give each object once.")
        return found, is_list

    def find(self, what: object) -> Handle:
        """The one that is meant."""
        if not isinstance(what, (Handle, str)):
            raise InvalidArgument(
                f"a value of type {type(what).__qualname__} names no object of a pool. Pass a handle (of "
                "replicate, scatter or all_gather) or its name, or a list of them."
            )
        name = what.name if isinstance(what, Handle) else what
        if name not in self._known or (isinstance(what, Handle) and self._known[name] is not what):
            known = ", ".join(self._known) or "none"
            raise InvalidArgument(f"there is no object {name!r} in this pool (there are: {known}).")
        return self._known[name]

    def drop(self, handle: Handle) -> None:
        """Know it no more."""
        del self._known[handle.name]


_kept: dict[int, Any] = {}  # of this worker


def keep(number: int, value: Any) -> None:
    """In a worker: have an object, or its new value."""
    _kept[number] = renewed(_kept.get(number), value)


def renewed(old: Any, value: Any) -> Any:
    """The new value of an object; what has a state, such as a module, stays and gets that."""
    if not isinstance(value, Mapping) or not hasattr(old, "load_state_dict"):
        return value
    old.load_state_dict(value)
    return old


def find(number: int, name: str) -> Any:
    """In a worker: its own object."""
    try:
        return _kept[number]
    except KeyError:
        raise InvalidArgument(f"{name!r} was dropped, or never made. Make it with pool.replicate().") from None


def drop(number: int) -> None:
    """In a worker: have it no more."""
    _kept.pop(number, None)


def arrays_of(value: Any, name: str) -> Iterator[Any]:
    """The arrays and tensors in an object: it may be one, hold some in tuples, lists and dicts, or be a module."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for one in cast(Mapping[Any, Any], value).values():
            yield from arrays_of(one, name)
    elif isinstance(value, (list, tuple)):
        for one in cast(Sequence[Any], value):
            yield from arrays_of(one, name)
    elif hasattr(value, "state_dict") and hasattr(value, "parameters"):
        yield from (one.data for one in value.state_dict(keep_vars=True).values())
    else:
        raise InvalidArgument(
            f"{name!r} is a {type(value).__qualname__}, which holds no arrays to send around. Replicate an array, "
            "a module, or a tuple, list or dict of them."
        )


def meet(calls: Calls, verb: str, number: int, name: str, options: dict[str, Any]) -> None:
    """In all workers at once: broadcast, all_reduce or all_gather an object in place."""
    value = find(number, name)
    arrays = list(arrays_of(value, name))
    if verb == "all_gather":
        if len(arrays) != 1:
            raise InvalidArgument(
                f"{name!r} holds {len(arrays)} arrays, and all_gather is for one. Replicate or scatter each of them "
                "by itself, and pass a list of handles."
            )
        keep(options["into"][number], joined(calls.all_gather(arrays[0])))
        return
    for array in arrays:
        if verb == "broadcast":
            calls.broadcast(array, root=options["root"], out=array)
        elif not (hasattr(value, "state_dict") and _is_whole(array)):  # a module's counts have no mean
            calls.all_reduce(array, options["op"], out=array)


def _is_whole(array: Any) -> bool:
    return not array.is_floating_point() and not array.is_complex() if is_tensor(array) else array.dtype.kind in "iub"
