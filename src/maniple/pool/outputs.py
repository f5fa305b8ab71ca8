"""Outputs: what several calls of one function returned, put together to what one call on all rows would have returned.

An output is an array, a number, a tensor, or a tuple, list or dict of outputs. Each of them has its own op:

    mean     sum_k n_k x_k / sum_k n_k, where call k has seen n_k rows: exact for shares of different sizes
    sum, prod, min, max
    gather   one after the other along axis 0; of numbers, an array of them
    none     a list of what each call returned, whatever that is
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from maniple.circle.values import is_tensor
from maniple.errors import InvalidArgument

OPS = ("mean", "sum", "prod", "min", "max", "gather", "none")
Ops = Any  # an op, or a tuple, list or dict of them, like the output


def check_ops(ops: Ops, where: str = "reduce") -> None:
    """Raise InvalidArgument if these are no ops."""
    if isinstance(ops, Mapping):
        for key, op in cast(Mapping[Any, Any], ops).items():
            check_ops(op, f"{where}[{key!r}]")
    elif isinstance(ops, (list, tuple)):
        for i, op in enumerate(cast(Sequence[Any], ops)):
            check_ops(op, f"{where}[{i}]")
    elif ops not in OPS:
        raise InvalidArgument(f"{where}={ops!r} is no way to put outputs together (one of {', '.join(OPS)}).")


class Total:
    """The outputs so far. What was put together elsewhere, with `op`, may be put together again."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._parts: list[tuple[Any, float]] = []

    def add(self, output: Any, weight: float, *, is_total: bool = False, is_last: bool = True) -> None:
        """One more; `is_total`: what several calls gave. After one that is not the last, a call may write over it."""
        if not is_total:
            seen = _plain if is_last else _copied
            output = _walk(self._ops, [output], lambda op, xs, _: [xs[0]] if op == "none" else seen(xs[0]))
        self._parts.append((output, weight))
        if len(self._parts) > 1 and not self._gathers(self._ops):  # nothing is kept that is not needed
            weights = [weight for _, weight in self._parts]
            self._parts = [(self._put_together(), sum(weights))]

    @property
    def weight(self) -> float:
        """The rows so far."""
        return sum(weight for _, weight in self._parts)

    def value(self) -> Any:
        """What all of them make together."""
        return self._put_together() if self._parts else None

    def _put_together(self) -> Any:
        weights = [weight for _, weight in self._parts]
        return _walk(self._ops, [part for part, _ in self._parts], lambda op, xs, at: _combined(op, xs, weights, at))

    def _gathers(self, ops: Ops) -> bool:
        if isinstance(ops, Mapping):
            return any(map(self._gathers, cast(Mapping[Any, Any], ops).values()))
        if isinstance(ops, (list, tuple)):
            return any(map(self._gathers, cast(Sequence[Any], ops)))
        return ops in {"gather", "none"}


def _walk(ops: Ops, parts: list[Any], act: Callable[[str, list[Any], str], Any], at: str = "the output") -> Any:
    """Go down into outputs of the same form, and `act` where the op says what to do."""
    first = parts[0]
    if ops == "none":
        return act("none", parts, at)
    _check_alike(parts, at)
    if first is None:
        return None
    if isinstance(first, Mapping):
        _check_form(ops, Mapping, cast(Mapping[Any, Any], first).keys(), at)
        return {
            key: _walk(_op_of(ops, key), [part[key] for part in parts], act, f"{at}[{key!r}]")
            for key in cast(Mapping[Any, Any], first)
        }
    if isinstance(first, (list, tuple)):
        _check_form(ops, (list, tuple), range(len(cast(Sequence[Any], first))), at)
        items = [
            _walk(_op_of(ops, i), [part[i] for part in parts], act, f"{at}[{i}]")
            for i in range(len(cast(Sequence[Any], first)))
        ]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(ops, str):
        raise InvalidArgument(f"{at} is a {type(first).__qualname__}, but reduce={ops!r} is for several. Give one op.")
    return act(ops, parts, at)


def _check_alike(parts: list[Any], at: str) -> None:
    forms = list(dict.fromkeys(map(_form, parts)))
    if len(forms) > 1:
        raise InvalidArgument(
            f"{at} is {forms[0]} for some rows and {forms[1]} for others, so they cannot be put together. Return the "
            "same form for all rows (an array of a value per row, not a list), or use reduce='none'."
        )


def _form(x: Any) -> str:
    if x is None:
        return "None"
    if isinstance(x, Mapping):
        return f"a dict of {', '.join(sorted(map(repr, cast(Mapping[Any, Any], x))))}"
    return f"a {type(x).__name__} of {len(cast(Any, x))}" if isinstance(x, (list, tuple)) else "a value"


def _op_of(ops: Ops, key: Any) -> Ops:
    return ops if isinstance(ops, str) else ops[key]


def _check_form(ops: Ops, form: Any, keys: Any, at: str) -> None:
    if isinstance(ops, str):
        return
    known = cast(Any, ops.keys() if isinstance(ops, Mapping) else range(len(ops)))
    if not isinstance(ops, form) or set(known) != set(keys):
        raise InvalidArgument(
            f"{at} has the parts {', '.join(map(repr, keys))}, but reduce={ops!r}. Give an op for each of them, or one."
        )


def _combined(op: str, xs: list[Any], weights: Sequence[float], at: str) -> Any:
    if op == "none":
        return [value for part in xs for value in part]
    if not all(_is_array(x) for x in xs):
        raise InvalidArgument(
            f"{at} is a {type(xs[0]).__qualname__}, which has no {op}. Return arrays or numbers, or use reduce='none'."
        )
    if op == "gather":
        return joined(xs)
    shapes = {tuple(np.shape(x)) for x in xs}
    if len(shapes) > 1:
        raise InvalidArgument(
            f"{at} has different shapes over the rows ({', '.join(map(str, sorted(shapes)))}), so there is no {op}. "
            "Use reduce='gather' for what has a value per row."
        )
    return _mean(xs, weights) if op == "mean" else _folded(op, xs)


def _mean(xs: list[Any], weights: Sequence[float]) -> Any:
    if len(xs) == 1:
        return xs[0] if not _is_whole(xs[0]) else xs[0] * 1.0
    total = sum(weights)
    result: Any = None
    for x, weight in zip(xs, weights, strict=True):
        term = x * (weight / total)
        result = term if result is None else result + term
    return result


def _folded(op: str, xs: list[Any]) -> Any:
    result = xs[0] * 1 if op == "sum" and _is_bool(xs[0]) else xs[0]  # NumPy's True + True is True
    for x in xs[1:]:
        if op == "sum":
            result = result + x
        elif op == "prod":
            result = result * x
        else:
            result = _extreme(op, result, x)
    return result


def _extreme(op: str, a: Any, b: Any) -> Any:
    if is_tensor(a):
        return a.minimum(b) if op == "min" else a.maximum(b)
    result = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    return result.item() if isinstance(a, (int, float)) and not isinstance(a, np.generic) else result


def named_pair(output: Any, names: Iterable[str], what: str) -> tuple[Any, Mapping[str, Any]]:
    """(outputs, {name: value}), as functions return that also give a value for each of these names."""
    is_pair = isinstance(output, tuple) and len(cast(tuple[Any, ...], output)) == 2
    if not is_pair or not isinstance(output[1], Mapping) or set(cast(Any, output[1])) != set(names):
        raise InvalidArgument(
            f"{what} returns (outputs, {{name: value}}) with the names {', '.join(map(str, names))}, but this one gave "
            f"a {type(output).__qualname__} that is not so."
        )
    return cast(tuple[Any, Mapping[str, Any]], output)


def joined(xs: list[Any]) -> Any:
    """Arrays, tensors or numbers one after the other."""
    if is_tensor(xs[0]):
        return sys.modules["torch"].cat([x.reshape(1) if x.ndim == 0 else x for x in xs])
    return np.concatenate([np.atleast_1d(np.asarray(x)) for x in xs])


def _plain(x: Any) -> Any:
    """Without its graph, if it is a tensor; arrays of other libraries as NumPy's."""
    if is_tensor(x):
        return x.detach()
    is_known = _is_array(x) or isinstance(x, str) or not hasattr(x, "__array__")
    return x if is_known else np.asarray(x)


def _copied(x: Any) -> Any:
    x = _plain(x)
    return x.clone() if is_tensor(x) else x.copy() if isinstance(x, np.ndarray) else x


def _is_bool(x: Any) -> bool:
    return str(x.dtype).endswith("bool") if is_tensor(x) else np.asarray(x).dtype.kind == "b"


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic, int, float, complex)) or is_tensor(x)


def _is_whole(x: Any) -> bool:
    if is_tensor(x):
        return not (x.is_floating_point() or x.is_complex())
    return np.asarray(x).dtype.kind in "iub"
