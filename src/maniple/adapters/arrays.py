"""A dict of NumPy arrays as a model. The arrays are changed in place."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, flat_dtype

Average = Callable[[Array, bool], None]  # averages an array over the workers in place; False: without one's own
Gather = Callable[[bytes], list[bytes]]  # what each worker says
Params = str | Iterable[str] | Callable[[str, Any], bool]  # names and patterns, or who says it of a name and a value


def choose(named: Mapping[str, Any], params: Params | None) -> set[str]:
    """The names of the parameters that are to be shared; all of them for None."""
    if params is None:
        return set(named)
    if callable(params):
        try:
            chosen = {name for name, value in named.items() if params(name, value)}
        except TypeError as error:
            raise InvalidArgument(
                f"params={params!r} cannot be called with a name and a parameter: {error}. Write for instance "
                "params=lambda name, p: p.requires_grad."
            ) from error
    else:
        words: list[Any] = [params] if isinstance(params, str) or not hasattr(params, "__iter__") else list(params)
        if not all(isinstance(word, str) for word in words):
            raise InvalidArgument(
                f"params={params!r} chooses nothing: names, patterns or a function of name and parameter do. Write for "
                'instance params=["head.*"].'
            )
        chosen = {name for word in words for name in _matching(word, named)}
    if not chosen:
        raise InvalidArgument(
            f"params={params!r} chooses none of the {len(named)} parameters ({_some(named)}), and at least 1 must be "
            "shared. Choose others, or leave it out to share all."
        )
    return chosen


def _matching(word: str, named: Mapping[str, Any]) -> list[str]:
    if found := [word] if word in named else fnmatch.filter(named, word):
        return found
    near = difflib.get_close_matches(word, named, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "Give a name, or a pattern such as 'head.*'."
    raise InvalidArgument(
        f"params= has {word!r}, which is none of the {len(named)} parameters ({_some(named)}). {hint}"
    )


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


class Arrays:
    """A dict of NumPy arrays; one that stands under two names is counted once.

    The dict is looked up anew in each pass, so `params["w"] = new` works as well as `params["w"] -= step`.
    """

    def __init__(self, arrays: Mapping[str, Any], *, params: Params | None = None) -> None:
        self._arrays = arrays
        chosen = choose({str(name): value for name, value in arrays.items()}, params)
        self.entries: list[Entry] = []
        self._dtypes: list[tuple[np.dtype[Any], np.dtype[Any]]] = []  # here, and in the flat vector
        self._staged: dict[int, Array] = {}
        seen: set[int] = set()
        self._keys: list[Any] = []
        for name, value in arrays.items():
            if str(name) not in chosen:
                continue
            if not isinstance(value, np.ndarray):
                raise InvalidArgument(
                    f"{name!r} is a {type(value).__name__}, but a model given as a dict holds NumPy arrays, "
                    "which can be changed in place. Write np.array(...) around it."
                )
            if id(value) not in seen:
                seen.add(id(value))
                entry = Entry(str(name), value.shape, str(value.dtype))
                self.entries.append(entry)
                self._keys.append(name)
                self._dtypes.append((value.dtype, np.dtype(flat_dtype(entry))))

    def on_step(self, act: Callable[[], None]) -> Callable[[], None]:
        """There is no optimizer: the loop calls replica.step() itself."""
        del act
        return lambda: None

    before_step = on_step

    @property
    def parameter_count(self) -> int:
        """All are parameters."""
        return len(self.entries)

    def is_buffer(self, i: int) -> bool:
        """All are parameters."""
        del i
        return False

    has_optimizer = False

    def averaged_buffers(self, norm: str) -> list[int]:
        """There are none."""
        del norm
        return []

    def gradients(self, *, norm: str) -> "Given":
        """Flat vectors for the gradients that the loop passes to replica.reduce(gradients)."""
        del norm
        return Given(self.entries)

    def on_forward(self, act: Callable[[], None]) -> Callable[[], None]:
        """The loop's forward pass is its own."""
        del act
        return lambda: None

    def buckets(self, *, norm: str) -> None:
        """The loop has all gradients at once."""
        del norm

    @property
    def device(self) -> str:
        """The CPU."""
        return "cpu"

    def synchronise_norm(self, total: Callable[[Array], None]) -> Callable[[], None]:
        """Arrays have no layers."""
        del total
        raise InvalidArgument('norm="synchronised" is for torch modules; a dict of arrays has no layers. Leave it out.')

    local_buffers: Sequence[str] = ()

    def refuse_wrapping(self) -> Callable[[], None]:
        """Nobody wraps a dict of arrays."""
        return lambda: None

    def before_foreign_step(self, act: Callable[[Sequence[Any]], None]) -> Callable[[], None]:
        """No optimizer of a framework trains arrays."""
        del act
        return lambda: None

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """There is no optimizer."""
        return {}, {}

    def restore_optimizer(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """There is no optimizer."""

    def settle_moments(self, momentum: str, average: "Average", gather: "Gather") -> None:
        """There is no optimizer."""

    def begin(self) -> None:
        """Forget what a pass that was cut short has left."""
        self._staged.clear()

    def array(self, i: int) -> Array:
        """The array's own memory if it is contiguous and of the center's dtype, else a copy."""
        value, dtype = self._value(i), self._dtypes[i][1]
        if value.flags.c_contiguous and value.dtype == dtype:
            return value.reshape(-1)
        self._staged[i] = staged = value.astype(dtype, order="C").reshape(-1)
        return staged

    def commit(self, i: int) -> None:
        """Write a copy back; an array's own memory is up to date already."""
        if (staged := self._staged.pop(i, None)) is not None:
            value = self._value(i)
            value[...] = staged.reshape(value.shape)

    def _value(self, i: int) -> Array:
        entry = self.entries[i]
        value = self._arrays.get(self._keys[i])
        if (
            isinstance(value, np.ndarray)
            and value.shape == entry.shape
            and value.dtype == self._dtypes[i][0]
            and value.flags.writeable
        ):
            return value
        raise InvalidArgument(
            f"{entry.name!r} has become {_described(value)}, but was shared as {entry}. "
            "Keep shape and dtype, and keep it writable, or share a new model."
        )


class Given:
    """The gradients of a dict of arrays, as the loop passes them."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.layout = Layout(entries)
        self._views: list[Array] = []

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the flat vectors."""
        return self.layout.sizes

    def place(self, flat: dict[str, Any]) -> None:
        """Use these vectors."""
        self._views = self.layout.views(flat)

    @property
    def are_delivered(self) -> bool:
        """The loop knows."""
        return True

    def begin(self) -> None:
        """There are no buffers to note."""

    def owns(self, parameters: Iterable[Any]) -> bool:
        """No optimizer of a framework trains arrays."""
        del parameters
        return False

    def on_gradient(self, act: Callable[[], None]) -> Callable[[], None]:
        """The loop makes the gradients."""
        del act
        return lambda: None

    def spoil(self, entry: int) -> bool:
        """The loop takes the gradients at once, so nothing may pass that is not finite."""
        del entry
        return False

    def drop(self) -> None:
        """Nobody had anything to give: all gradients are zero."""
        for view in self._views:
            view[:] = 0

    def collect(self, given: Mapping[str, Array] | None = None) -> None:
        """Bring the gradients into the vectors."""
        for entry, view in zip(self.layout.entries, self._views, strict=True):
            value = None if given is None else given.get(entry.name)
            if value is None or np.shape(value) != entry.shape:
                raise InvalidArgument(
                    f"reduce() got {_described(value)} as the gradient of {entry}. Of a model of NumPy arrays, pass a "
                    "dict with a gradient of its shape for each."
                )
            view[:] = np.asarray(value).reshape(-1)

    def deliver(self, given: Mapping[str, Array] | None = None) -> None:
        """Write the average over them."""
        assert given is not None
        for entry, view in zip(self.layout.entries, self._views, strict=True):
            given[entry.name][...] = view.reshape(entry.shape)


def _described(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return "nothing" if value is None else f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}{'' if value.flags.writeable else ', read-only'}"
