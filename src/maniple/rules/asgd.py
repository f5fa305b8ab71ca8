"""ASGD: Legion's weighted push, then pull."""

from maniple.contracts import Array, ExchangeInfo, Operation, State
from maniple.rules import kernels
from maniple.rules.rule import Rule, checked_flag, checked_share


class ASGD(Rule):
    """Push the replica into the center with two weights, and take the result.

        c = alpha c + beta x;    x = c

    ASGD(0.5, 0.5) is the same map as EASGD(0.5). Weights that do not add up to 1 shrink or grow the
    parameters at each exchange; that is allowed, and seldom wanted. With `overlap`, exchanges run in the background:
    `x = c + (x - s)`, where `s` was sent.
    """

    def __init__(self, alpha: float = 0.5, beta: float = 0.5, *, overlap: bool = False) -> None:
        self.alpha = checked_share("ASGD", "alpha", alpha)
        self.beta = checked_share("ASGD", "beta", beta)
        self.overlap = checked_flag("ASGD", "overlap", overlap)

    def exchange(self, x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
        del state, moment
        return (kernels.active or kernels.activate()).blend(x, c, self.alpha, self.beta)

    def operation(self, moment: ExchangeInfo) -> Operation:
        del moment
        return Operation("blend", self.alpha, self.beta)
