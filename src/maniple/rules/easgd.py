"""EASGD and EAMSGD: elastic averaging, with and without Nesterov's momentum."""

from collections.abc import Callable

from maniple.contracts import Array, ExchangeInfo, Operation, State
from maniple.errors import InvalidArgument
from maniple.rules import kernels
from maniple.rules.rule import CenterMemory, checked_flag, checked_nonfinite, checked_share

Alpha = float | str | Callable[[int], float]


class EASGD(CenterMemory):
    """Asynchronous elastic averaging SGD.

        d = x - c;    x -= alpha_w d;    c += alpha_c d

    Both moves start from the old values. With one alpha the exchange conserves `x + c`; alpha 0 leaves both
    alone, alpha 0.5 makes them meet. Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD
    (arXiv:1412.6651).

    Args:
        alpha: a number from 0 to 1; "auto", which is 0.9 / p with p workers alive and at most 0.5; or a schedule,
            a function from the worker's step count to such a number. It may be set while running.
        center_alpha: the center's own share, where it is to differ from the worker's `alpha`.
        sync: all workers exchange at once, each with a copy of the center that is equal in all:

            x_i -= alpha_w (x_i - c);    c += alpha_c sum_i (x_i - c)

        nonfinite: with `sync`, what happens when a worker's contribution is not finite: as in BSP.
        overlap: exchange in the background while training continues; d is then subtracted when the answer is there.
    """

    op = "sum"

    def __init__(
        self,
        alpha: Alpha = "auto",
        *,
        center_alpha: float | None = None,
        sync: bool = False,
        nonfinite: str = "stop",
        overlap: bool = False,
    ) -> None:
        self.alpha = alpha
        self.center_alpha = center_alpha
        self.sync = checked_flag("EASGD", "sync", sync)
        if self.sync:  # else the class decides: a subclass may keep state of its own
            self.is_synchronous, self.worker_vectors = True, ("center",)
        self.overlap = checked_flag("EASGD", "overlap", overlap)
        self.nonfinite = checked_nonfinite("EASGD", nonfinite, is_sync=sync)

    @property
    def alpha(self) -> Alpha:
        """The elastic share."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: Alpha) -> None:
        if isinstance(value, str):
            if value != "auto":
                raise InvalidArgument(
                    f"EASGD has alpha={value!r}, which is neither 'auto', a share from 0 to 1, nor a schedule. "
                    "Write alpha='auto' or a number such as 0.5."
                )
        elif not callable(value):
            value = checked_share("EASGD", "alpha", value)
        self._alpha = value

    @property
    def center_alpha(self) -> float | None:
        """The center's own share, or None for the worker's."""
        return self._center_alpha

    @center_alpha.setter
    def center_alpha(self, value: float | None) -> None:
        self._center_alpha = None if value is None else checked_share("EASGD", "center_alpha", value)

    def alphas(self, moment: ExchangeInfo) -> tuple[float, float]:
        """The center's and the worker's share at this moment."""
        if self._alpha == "auto":
            alpha = min(0.5, 0.9 / max(1, moment.live))  # beyond 0.5 replica and center would swap sides
        elif callable(self._alpha):
            alpha = checked_share("EASGD's schedule", "alpha", float(self._alpha(moment.step)))
        else:
            assert isinstance(self._alpha, float)
            alpha = self._alpha
        return (alpha if self._center_alpha is None else self._center_alpha), alpha

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        del state
        center, worker = self.alphas(moment)
        return (kernels.active or kernels.activate()).elastic(x, c, center, worker)

    def operation(self, moment: ExchangeInfo) -> Operation:
        center, worker = self.alphas(moment)
        return Operation("elastic", center, worker)

    def accept(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Move both, from the old values."""
        center, worker = self.alphas(moment)
        x -= x.dtype.type(worker) * (x - state["center"])
        state["center"] += x.dtype.type(center) * total


class EAMSGD(EASGD):
    """Asynchronous elastic averaging with Nesterov's momentum at the workers.

        v = delta v - eta g(x + delta v);    x += v             in each step
        d = x - c;    x -= alpha_w d;    c += alpha_c d         in an exchange

    The rule sets momentum and nesterov of the optimizer, a `torch.optim.SGD`, which keeps `x + delta v` as parameters
    and makes the same steps in these terms. An exchange takes the look-ahead `delta v` off them and adds it again
    afterwards, so that x meets the center, as in Zhang, Choromanska, LeCun (arXiv:1412.6651). Momentum 0.99 makes steps
    about 100 times as long in the end: begin with a tenth of the learning rate of EASGD without momentum.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        worker.share(model, optimizer, rule=maniple.EAMSGD())

    Args:
        delta: the momentum, from 0 to less than 1.
        alpha, center_alpha: as in EASGD.
    """

    def __init__(self, alpha: Alpha = "auto", delta: float = 0.99, *, center_alpha: float | None = None) -> None:
        super().__init__(alpha, center_alpha=center_alpha)
        if isinstance(delta, bool) or not 0 <= delta < 1:
            raise InvalidArgument(
                f"EAMSGD has delta={delta!r}, but a momentum is from 0 to less than 1, where steps would never shrink. "
                "Write delta=0.99."
            )
        self.delta = self.nesterov = float(delta)
