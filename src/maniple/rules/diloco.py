"""DiLoCo: many local steps, then an outer step with Nesterov momentum."""

from numbers import Real

import numpy as np

from maniple.contracts import Array, ExchangeInfo, Operation, State, StateNames
from maniple.errors import InvalidArgument
from maniple.rules import kernels
from maniple.rules.bsp import NORMS
from maniple.rules.rule import CenterMemory, checked_count, checked_flag, checked_nonfinite, one_of
from maniple.rules.streaming import Streaming

# What the asynchronous form keeps at the center: m, s, how many arrivals are in s, and the synchronous rounds before.
DELAYED_NESTEROV = StateNames(("momentum", "gathered"), ("arrivals", "rounds"))


class DiLoCo(Streaming, CenterMemory):
    """Distributed low-communication training.

    Every worker trains by itself for `every` steps. What it has changed is a gradient for an outer optimizer, SGD with
    Nesterov momentum. All workers do this in the same round:

        D = mean_i(c - x_i);    m = mu m + D;    c -= lr (D + mu m);    x_i = c

    With lr 1 and mu 0 it is LocalSGD. A single worker makes the outer step alone. The state of the inner optimizer
    stays with each worker. Douillard et al.: DiLoCo (arXiv:2311.08105).

    With `sync=False` no worker waits: each brings its D_i to the center when it has made its steps, and the momentum is
    applied once for every N arrivals (delayed Nesterov), since momentum at each stale arrival diverges:

        s += D_i / N
        every N-th arrival:    m = mu m + s;    c -= lr (mu m + D_i / N);    s = 0
        else:                  c -= lr D_i / N
        x_i = c

    Liu et al.: Asynchronous local-SGD training for language modeling (arXiv:2401.09135).

    Args:
        every: local steps between two exchanges.
        lr, momentum: of the outer optimizer.
        sync: all workers exchange in the same round, by collectives; else each with the center.
        buffer: N, with `sync=False`; "auto" is twice the number of live workers. 1 is refused.
        warm: with `sync=False`, how many synchronous rounds come first.
        dynamic: with `sync=False`, slower workers make fewer local steps: `every` times their speed, divided by the
            speed that one worker in ten exceeds, and at most `every`.
        fragments, delay, overlap, alpha: see `Streaming`.
        norm, check_every, nonfinite: with `sync`, as in BSP. Running statistics of normalisation layers are averaged
            without momentum, by which a variance could become negative; with `sync=False` they stay local.
    """

    worker_vectors = ("center",)
    center_vectors = ("momentum",)
    acts_alone = True

    def __init__(
        self,
        every: int = 100,
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        sync: bool = True,
        buffer: int | str = "auto",
        warm: int = 0,
        dynamic: bool = False,
        fragments: int = 1,
        delay: int | None = None,
        overlap: bool = False,
        alpha: float | None = None,
        norm: str = "averaged",
        check_every: int = 100,
        nonfinite: str = "stop",
    ) -> None:
        self.every = checked_count("every", every, 1)
        self.lr, self.momentum = _checked("lr", lr, 2.0), _checked("momentum", momentum, 1.0)
        self.sync = self.is_synchronous = checked_flag("DiLoCo", "sync", sync)
        self.buffer = buffer if buffer == "auto" else checked_count("buffer", buffer, 1)
        self.warm = checked_count("warm", warm, 0)
        self.dynamic = checked_flag("DiLoCo", "dynamic", dynamic)
        self.norm = one_of("norm", norm, NORMS)
        self.check_every = checked_count("check_every", check_every, 0)
        self.nonfinite = checked_nonfinite("DiLoCo", nonfinite, is_sync=sync)
        self.offers_changes = not self._is_mean
        self._stream(fragments, delay, alpha, overlap=overlap)
        if self.buffer == 1:
            raise InvalidArgument(
                "DiLoCo has buffer=1, which applies the momentum at every single arrival and diverges. Write "
                'buffer="auto", which is 2 p for p workers, or leave it out.'
            )
        if sync and (buffer != "auto" or warm or dynamic):
            raise InvalidArgument(
                "DiLoCo's buffer, warm and dynamic are for workers that exchange with the center, each on its own. Add "
                "sync=False, or leave them out."
            )
        if not sync:
            self.center_vectors, self.center_scalars = DELAYED_NESTEROV
            self.shares_buffers = False
            if fragments > 1 or delay is not None or alpha is not None:
                raise InvalidArgument(
                    "DiLoCo's fragments, delay and alpha are for synchronous rounds, but sync=False has none. Leave "
                    "them out, or use overlap=True, with which exchanges run in the background."
                )

    @property
    def _is_mean(self) -> bool:
        """The outer step takes the mean as it is, so it is computed like LocalSGD's, without rounding differences."""
        return self.lr == 1 and self.momentum == 0

    def offer(self, x: Array, state: State, out: Array) -> None:
        """What this worker has changed; its value if the mean is taken as it is."""
        if self._is_mean:
            out[:] = x
        else:
            super().offer(x, state, out)

    def accept(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Make the outer step."""
        del moment
        center, momentum = state["center"], state["momentum"]
        if self._is_mean:
            center[:] = total
        else:
            decay, rate = x.dtype.type(self.momentum), x.dtype.type(self.lr)
            momentum *= decay
            momentum += total
            total += decay * momentum
            total *= rate
            center += total
        x[:] = center

    def accept_buffer(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Take the mean: with momentum, a variance could become negative."""
        del moment
        center = state["center"]
        if self._is_mean:
            center[:] = total
        else:
            center += total
        x[:] = center

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        """The outer step for one arrival at the center."""
        old = state["center"]
        with np.errstate(invalid="ignore"):
            np.subtract(x, old, out=x)
        refused = outer_step(x, c, state, lr=self.lr, momentum=self.momentum, buffer=self.buffer_size(moment))
        old[:] = x
        return refused

    def operation(self, moment: ExchangeInfo) -> Operation:
        return Operation("nesterov", self.lr, self.momentum, self.buffer_size(moment), is_change=True)

    def buffer_size(self, moment: ExchangeInfo) -> int:
        """N, the arrivals for which the momentum is applied once."""
        return max(2, 2 * moment.live) if isinstance(self.buffer, str) else self.buffer

    def rounded(self, x: Array, state: State) -> None:
        state["center"][:] = x  # else the next exchange would bring the rounding as if it were a change


def outer_step(x: Array, c: Array, state: State, *, lr: float, momentum: float, buffer: int) -> Array | None:
    """One step of delayed Nesterov momentum at the center `c` for a replica's change `x`, which then holds the center.

    `state` is what the rule keeps at the center. Returns the positions of refused values, or None.
    """
    arrivals = state["arrivals"]
    is_full = int(arrivals[0]) + 1 >= buffer
    refused = kernels.kernels().nesterov(
        x, c, state["gathered"], state["momentum"], lr=lr, beta=momentum, count=buffer, is_full=is_full
    )
    arrivals[0] = 0 if is_full else arrivals[0] + 1
    return refused


def _checked(name: str, value: float, limit: float) -> float:
    """`value` if it is a number from 0 to below `limit`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= limit:
        raise InvalidArgument(
            f"DiLoCo has {name}={value!r}, which is not from 0 to {limit:g}. Usual are lr=0.7 and momentum=0.9."
        )
    return float(value)
