"""A gate at the center: outlying contributions are clipped or refused, stale ones weighted down. Pure.

The norm of a contribution is ||x - c|| under rules that send values (EASGD, ASGD), and ||x - x_old|| under rules that
send changes (Downpour). It is compared, chunk by chunk, with the last norms of all workers there:

    limit = median + k max(MAD, median / 10)        (see `outliers`)

A contribution within the limit is applied as it is, to the bit. Beyond it, its share s is

    clip      s = limit / norm
    refuse    s = 0

and a contribution that comes after tau exchanges of others counts exp(-a tau) times in addition (CGAD,
arXiv:2605.09126). With the share s, rules compute

    EASGD       d = s (x - c);  x -= alpha_w d;  c += alpha_c d         x + c is conserved
    ASGD        c = (alpha + beta - s beta) c + s beta x;  x = c
    Downpour    c += s (x - x_old);  x = c;  x_old = c                  what is cut off is discarded

and with s = 0 the center stays as it is, to the bit, while the replica moves towards it as always: under EASGD
x -= alpha_w (x - c), under the others x = c. So a replica that has gone far astray comes back, instead of being refused
for ever.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from maniple.contracts import Array, Operation, State
from maniple.errors import InvalidArgument
from maniple.outliers import learned_limit
from maniple.rules import kernels
from maniple.rules.diloco import outer_step

ACTIONS = ("clip", "refuse")
_BLOCK = 1 << 16  # elements of one difference, which stays in cache
_MAX_WINDOW = 4096  # norms per chunk, in shared memory


@dataclass(frozen=True)
class Gate:
    """Judges the contributions to the center: `worker.share(model, optimizer, gate=maniple.Gate())`.

    All workers of a run need the same gate, since it belongs to the center. It works with the asynchronous rules that
    the host can apply: EASGD, ASGD and Downpour.

    Args:
        k: how many MADs a norm may be above the median; infinity judges no norm.
        action: "clip" scales a contribution beyond the limit down to it, "refuse" leaves it out.
        window: how many norms of each chunk are remembered.
        minimum: the norms that are needed before anything is judged.
        staleness: a; a contribution counts exp(-a tau) times after tau exchanges of others. 0 weights nothing down.
    """

    k: float = 6.0
    action: str = ACTIONS[0]
    window: int = 64
    minimum: int = 16
    staleness: float = 0.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise InvalidArgument(f"action={self.action!r} of a gate is none of {', '.join(ACTIONS)}. Write 'clip'.")
        if not self.k > 0:
            raise InvalidArgument(f"k={self.k!r} of a gate must be above 0 MADs over the median. Write k=6.")
        if not 2 <= self.minimum <= self.window <= _MAX_WINDOW:
            raise InvalidArgument(
                f"a gate cannot judge from {self.minimum!r} to {self.window!r} norms (2 to {_MAX_WINDOW:,}, and "
                "minimum is not above window). Write window=64, minimum=16."
            )
        if not 0 <= self.staleness < math.inf:
            raise InvalidArgument(
                f"staleness={self.staleness!r} of a gate must be 0 or more, and finite. Write staleness=0.1."
            )

    def __str__(self) -> str:
        """As `parse_gate` reads it."""
        return f"{self.action}:k={self.k!r},window={self.window},minimum={self.minimum},staleness={self.staleness!r}"

    @property
    def judges_norms(self) -> bool:
        """Whether the norms of contributions are needed."""
        return self.k < math.inf

    def judge(self, norms: Array, norm: float, staleness: int) -> "Verdict":
        """The verdict on a contribution; `norms` are those of the last ones to the same chunk."""
        limit = learned_limit(norms, self.k)[0] if self.judges_norms and norms.size >= self.minimum else 0.0
        limit = limit or math.inf  # what has not moved at all so far may begin to
        factor = 1.0 if norm <= limit else 0.0 if self.action == "refuse" else limit / norm
        # An outlier counts as the limit. If all contributions have grown, the limit follows them after some exchanges.
        return Verdict(factor, math.exp(-self.staleness * staleness), min(norm, limit))


class Verdict(NamedTuple):
    """What becomes of a contribution.

    Attributes:
        factor: by which it is clipped; 1: it is within the limit, 0: it is refused.
        weight: by which it is multiplied in addition, because it is stale.
        norm: what the next ones are compared with.
    """

    factor: float = 1.0
    weight: float = 1.0
    norm: float = 0.0

    @property
    def share(self) -> float:
        """s, the share of the contribution that counts."""
        return self.factor * self.weight


def parse_gate(text: str) -> Gate:
    """The gate of a command-line option: `clip`, `refuse:k=8`, `staleness=0.1`."""
    head, colon, options = text.partition(":")
    if "=" in head:
        head, options = ACTIONS[0], text
    elif colon and not options:
        raise InvalidArgument(f"--gate {text} ends with a colon. Leave it out, or write --gate {head}:k=6.")
    values: dict[str, Any] = {"action": head.strip().lower()}
    known = {"k": float, "window": int, "minimum": int, "staleness": float}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            values[key.strip()] = known[key.strip()](value)
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"{option!r} in --gate {text} is none of the settings {', '.join(known)} with a number. Write for "
                f"instance --gate {ACTIONS[0]}:k=6."
            ) from None
    return Gate(**values)


def norm_of(differences: Iterable[tuple[Array, Array | None]]) -> float:
    """The norm of all x - c together, of x alone where c is None; elements that are not finite are left out.

    One pass in blocks that stay in cache.
    """
    total = 0.0
    with np.errstate(all="ignore"):
        for x, c in differences:
            scratch = np.empty(min(_BLOCK, x.size), x.dtype)
            for start in range(0, x.size, _BLOCK):
                d = x[start : start + _BLOCK]
                if c is not None:
                    d = np.subtract(d, c[start : start + _BLOCK], out=scratch[: d.size])
                square = float(np.dot(d, d))
                if not math.isfinite(square):  # float32 overflows, or an element is not finite
                    wide = d[np.isfinite(d)].astype(np.float64)
                    square = float(np.dot(wide, wide))
                total += square
    return math.sqrt(total)


def weighed(operation: Operation, share: float) -> Operation:
    """The operation that applies this share of a contribution, below 1."""
    if operation.name == "elastic":
        return replace(operation, a=operation.a * share, b=operation.b * share if share else operation.b)
    if operation.name == "nesterov":
        return replace(operation, share=operation.share * share)
    if operation.is_change:
        return replace(operation, b=operation.b * share)
    if not share:
        return replace(operation, a=1.0, b=0.0)
    return replace(operation, a=operation.a + (1 - share) * operation.b, b=operation.b * share)


def apply_operation(operation: Operation, x: Array, c: Array, state: State, staleness: int) -> Array | None:
    """Change replica, center and state in place as the host would; return the positions of refused values, or None."""
    compiled = kernels.active or kernels.activate()
    if operation.name == "elastic":
        return compiled.elastic(x, c, operation.a, operation.b)
    if operation.name == "nesterov":
        with np.errstate(invalid="ignore"):
            np.subtract(x, state["center"], out=x)
            x *= x.dtype.type(operation.share)
        refused = outer_step(x, c, state, lr=operation.a, momentum=operation.b, buffer=operation.n)
        state["center"][:] = x
        return refused
    b = operation.b / (staleness + 1) if operation.name == "compensated" else operation.b
    if operation.is_change:
        return compiled.difference(x, c, state["center"], b)
    return compiled.blend(x, c, operation.a, b)
