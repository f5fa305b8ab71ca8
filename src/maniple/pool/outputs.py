"""Reduction of outputs: combines what several calls returned into what one call on all rows would have returned.

An output is an array, a number, a tensor, or a tuple, list or dict of outputs. Each leaf has its own op:

    mean     sum_k n_k x_k / sum_k n_k, where call k has seen n_k rows: exact for shares of different sizes
    sum, prod, min, max
    gather   concatenation along axis 0; numbers become an array
    none     a list with the output of each call, of any type
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from maniple.collectives.values import is_tensor
from maniple.errors import InvalidArgument

OPS = ("mean", "sum", "prod", "min", "max", "gather", "none")
Ops = Any  # an op, or a tuple, list or dict of ops in the form of the output


class OutputReducer:
    """Combines outputs one at a time. A combined value can be added to another reducer with the same ops."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._keeps_all = any(op in {"gather", "none"} for op in _leaves(ops))
        self._outputs: list[Any] = []
        self._weights: list[float] = []

    def add(self, output: Any, weight: float, *, is_reduced: bool = False, is_last: bool = True) -> None:
        """Add an output of `weight` rows.

        Args:
            is_reduced: the output comes from another reducer.
            is_last: no call follows that could overwrite the memory of this output; otherwise it is copied.
        """
        if not is_reduced:
            detach = _plain if is_last else _copied
            output = _map(self._ops, [output], lambda op, xs, _: [xs[0]] if op == "none" else detach(xs[0]))
        self._outputs.append(output)
        self._weights.append(weight)
        if len(self._outputs) > 1 and not self._keeps_all:  # combine now, to hold one output in memory only
            self._outputs, self._weights = [self.value()], [self.weight]

    @property
    def weight(self) -> float:
        """The number of rows added so far."""
        return sum(self._weights)

    def value(self) -> Any:
        """The combined output; None if nothing was added."""
        if not self._outputs:
            return None
        return _map(self._ops, self._outputs, lambda op, xs, where: _combine(op, xs, self._weights, where))


def check_ops(ops: Ops, where: str = "reduce") -> None:
    """Raise InvalidArgument for an unknown op."""
    for op in _leaves(ops):
        if op not in OPS:
            raise InvalidArgument(f"{where}={ops!r} contains the unknown op {op!r}. Use one of {', '.join(OPS)}.")


def split_pair(output: Any, names: Iterable[str], what: str) -> tuple[Any, Mapping[str, Any]]:
    """The (outputs, {name: value}) that a function returned; InvalidArgument unless it has a value for each name."""
    is_pair = isinstance(output, tuple) and len(cast(tuple[Any, ...], output)) == 2
    if not is_pair or not isinstance(output[1], Mapping) or set(cast(Any, output[1])) != set(names):
        raise InvalidArgument(
            f"{what} must return (outputs, {{name: value}}) with the names {', '.join(map(str, names))}, but this one "
            f"returned a {type(output).__qualname__} of another form. Return such a pair."
        )
    return cast(tuple[Any, Mapping[str, Any]], output)


def concatenate(xs: list[Any]) -> Any:
    """Arrays, tensors or numbers joined along axis 0."""
    if is_tensor(xs[0]):
        return sys.modules["torch"].cat([x.reshape(1) if x.ndim == 0 else x for x in xs])
    return np.concatenate([np.atleast_1d(np.asarray(x)) for x in xs])


def is_integer(x: Any) -> bool:
    """Whether an array, tensor or number holds integers or booleans."""
    if is_tensor(x):
        return not (x.is_floating_point() or x.is_complex())
    return np.asarray(x).dtype.kind in "iub"


def _leaves(ops: Ops) -> list[Any]:
    if isinstance(ops, Mapping):
        ops = list(cast(Mapping[Any, Any], ops).values())
    if isinstance(ops, (list, tuple)):
        return [leaf for op in cast(Sequence[Any], ops) for leaf in _leaves(op)]
    return [ops]


def _map(ops: Ops, outputs: list[Any], act: Callable[[str, list[Any], str], Any], where: str = "the output") -> Any:
    """Apply `act(op, leaves, where)` to the corresponding leaves of outputs of the same form."""
    first = outputs[0]
    if ops == "none":
        return act("none", outputs, where)
    forms = list(dict.fromkeys(map(_form, outputs)))
    if len(forms) > 1:
        raise InvalidArgument(
            f"{where} is {forms[0]} for some rows and {forms[1]} for others, so they cannot be combined. Return the "
            "same form for all rows (an array with a value per row, not a list), or use reduce='none'."
        )
    if first is None:
        return None
    if isinstance(first, Mapping):
        keys: Any = list(cast(Mapping[Any, Any], first))
        _check_form(ops, Mapping, keys, where)
    elif isinstance(first, (list, tuple)):
        keys = range(len(cast(Sequence[Any], first)))
        _check_form(ops, (list, tuple), keys, where)
    else:
        if not isinstance(ops, str):
            raise InvalidArgument(
                f"{where} is a {type(first).__qualname__}, but reduce={ops!r} is for several outputs. Give one op."
            )
        return act(ops, outputs, where)
    values = [
        _map(ops if isinstance(ops, str) else ops[key], [one[key] for one in outputs], act, f"{where}[{key!r}]")
        for key in keys
    ]
    if isinstance(first, Mapping):
        return dict(zip(keys, values, strict=True))
    kind = cast(Any, type(first))  # pyright: ignore[reportUnknownArgumentType]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)  # a named tuple takes its items one by one


def _form(x: Any) -> str:
    if x is None:
        return "None"
    if isinstance(x, Mapping):
        return f"a dict of {', '.join(sorted(map(repr, cast(Mapping[Any, Any], x))))}"
    return f"a {type(x).__name__} of {len(cast(Any, x))}" if isinstance(x, (list, tuple)) else "a value"


def _check_form(ops: Ops, form: Any, keys: Any, where: str) -> None:
    if isinstance(ops, str):
        return
    known = cast(Any, ops.keys() if isinstance(ops, Mapping) else range(len(ops)))
    if not isinstance(ops, form) or set(known) != set(keys):
        raise InvalidArgument(
            f"{where} has the parts {', '.join(map(repr, keys))}, but reduce={ops!r}. Give an op for each part, or one "
            "op for all."
        )


def _combine(op: str, xs: list[Any], weights: Sequence[float], where: str) -> Any:
    if op == "none":
        return [value for part in xs for value in part]
    if not all(_is_array(x) for x in xs):
        raise InvalidArgument(
            f"{where} is a {type(xs[0]).__qualname__}, which has no {op}. Return arrays or numbers, or use "
            "reduce='none'."
        )
    if op == "gather":
        return concatenate(xs)
    shapes = {tuple(np.shape(x)) for x in xs}
    if len(shapes) > 1:
        raise InvalidArgument(
            f"{where} has different shapes over the rows ({', '.join(map(str, sorted(shapes)))}), so there is no {op}. "
            "Use reduce='gather' for outputs with a value per row."
        )
    first, *rest = xs
    if op == "mean":
        if not rest:
            return first * 1.0 if is_integer(first) else first
        total = sum(weights)
        first, *rest = (x * (weight / total) for x, weight in zip(xs, weights, strict=True))
    elif op == "sum" and (str(first.dtype) if is_tensor(first) else np.asarray(first).dtype.name).endswith("bool"):
        first = first * 1  # booleans are counted: NumPy's True + True is True
    return functools.reduce(_BINARY[op], rest, first)


def _extreme(name: str, a: Any, b: Any) -> Any:
    if is_tensor(a):
        return getattr(a, name)(b)
    result = getattr(np, name)(a, b)
    return result.item() if isinstance(a, (int, float)) and not isinstance(a, np.generic) else result


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mean": operator.add,
    "sum": operator.add,
    "prod": operator.mul,
    "min": functools.partial(_extreme, "minimum"),
    "max": functools.partial(_extreme, "maximum"),
}


def _plain(x: Any) -> Any:
    """A tensor without its graph; an array of another library, such as jax, as a NumPy array."""
    if is_tensor(x):
        return x.detach()
    is_known = _is_array(x) or isinstance(x, str) or not hasattr(x, "__array__")
    return x if is_known else np.asarray(x)


def _copied(x: Any) -> Any:
    x = _plain(x)
    return x.clone() if is_tensor(x) else x.copy() if isinstance(x, np.ndarray) else x


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic, int, float, complex)) or is_tensor(x)
