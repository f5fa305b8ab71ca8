"""Synchronous rules: BSP, LocalSGD and MSync. All workers exchange at the same step, by collectives."""

from maniple.contracts import Array, ExchangeInfo, State
from maniple.errors import InvalidArgument
from maniple.rules.rule import CenterMemory, Rule, checked_count, checked_flag, checked_nonfinite, one_of
from maniple.rules.streaming import Streaming

AVERAGES = ("gradients", "parameters")
OPS = ("mean", "sum")
MOMENTA = ("keep", "average", "reset")
NORMS = ("averaged", "local", "synchronised")


class BSP(CenterMemory):
    """Bulk synchronous parallel SGD: the replicas are the same after every exchange.

        average="gradients":             g = sum_i n_i g_i / sum_i n_i    before each step of the optimizer
        average="gradients", op="sum":   g = sum_i g_i
        average="parameters":            x = sum_i x_i / p                after every `every` steps

    With gradients, p workers do what one worker does on all their batches together: `n_i` is the number of samples of
    worker i, if it sets `replica.samples`, else all count the same. Valiant: A bridging model for parallel computation,
    1990; Zinkevich et al.: Parallelized stochastic gradient descent, 2010, for the parameters.

    Args:
        average: what is averaged.
        op: "mean", or "sum" for gradients: then the step is that of the mean with p times the learning rate, where p is
            the number of workers in the round. Numbers of samples do not weight a sum; a worker with 0 is left out.
            Buffers are averaged all the same.
        every: steps between two averages of the parameters.
        momentum: what becomes of the optimizer's state when parameters are averaged: "keep" each worker's own,
            "average" it too, or "reset" it to zero.
        norm: the running statistics of normalisation layers (floating-point buffers): "averaged" with each exchange,
            "local", each worker its own, or "synchronised": torch batch-norm layers compute mean and variance over the
            batches of all workers.
        check_every: compare the replicas' digests every `check_every` exchanges, and end with the name of the first
            parameter that differs; 0: never.
        overlap: gradients go out in buckets while the backward pass still computes the others, and are averaged when
            it ends, as with DistributedDataParallel: for a torch module with torch collectives. In shared memory the
            core that computes also adds up, so there is nothing to gain, and it changes nothing there. Set
            `replica.samples` before the pass; accumulate gradients in `with replica.no_sync():`, since each pass
            outside of it is a round that all workers must make.
        nonfinite: what happens when a worker's contribution holds NaN or infinity. "stop": all workers end with
            Diverged, which names the worker, the step and the parameter. "skip": the contribution is left out of this
            round's mean, and three in a row of the same worker end the run.
    """

    every = 1
    is_synchronous = True
    offers_changes = False

    def __init__(
        self,
        average: str = "gradients",
        *,
        op: str = "mean",
        every: int = 1,
        momentum: str = "keep",
        norm: str = "averaged",
        check_every: int = 1000,
        overlap: bool = False,
        nonfinite: str = "stop",
    ) -> None:
        self.average = one_of("average", average, AVERAGES)
        self.averages_gradients = average == "gradients"
        if not self.averages_gradients:
            self.worker_vectors = ("center",)  # the last mean of the parameters
        self.op = one_of("op", op, OPS)
        self.momentum = self.moments = one_of("momentum", momentum, MOMENTA)
        self.norm = one_of("norm", norm, NORMS)
        self.every = checked_count("every", every, 1)
        self.check_every = checked_count("check_every", check_every, 0)
        self.overlap = checked_flag("BSP", "overlap", overlap)
        self.nonfinite = checked_nonfinite("BSP", nonfinite)
        if overlap and nonfinite == "skip":
            raise InvalidArgument(
                "overlap=True sends gradients before it is known whether all of them are finite, so nonfinite='skip' "
                "cannot leave them out. Leave one of them out."
            )
        if overlap and average != "gradients":
            raise InvalidArgument(
                f"overlap=True sends gradients during the backward pass, but average={average!r} averages none. "
                "Leave one of them out."
            )
        if op == "sum" and average != "gradients":
            raise InvalidArgument(
                f"op='sum' adds gradients, but average={average!r} shares parameters, whose sum is no model. Leave one "
                "of them out; Downpour(sync=True) adds what the workers have changed."
            )
        if average == "gradients" and (self.every != 1 or momentum != "keep"):
            raise InvalidArgument(
                f"BSP averages gradients at each step, so every={every!r} and momentum={momentum!r} mean nothing. "
                'Add average="parameters", or leave them out.'
            )

    def offer(self, x: Array, state: State, out: Array) -> None:
        """What this worker gives to the mean: its replica, not what it has changed."""
        Rule.offer(self, x, state, out)

    def accept(self, x: Array, total: Array, state: State, moment: ExchangeInfo) -> None:
        """Take the mean."""
        del moment
        x[:] = total
        if state:
            self.remember(total, state)


class LocalSGD(Streaming, BSP):
    """Each worker trains by itself for k steps, then all take the mean of their parameters.

        x = sum_i x_i / p    after every k steps

    LocalSGD(1) with plain SGD is BSP. Stich: Local SGD converges fast and communicates little (arXiv:1805.09767).

    Args:
        k: steps between two means.
        fragments, delay, overlap, alpha: see `Streaming`.
        momentum, norm, check_every, nonfinite: as in BSP.
    """

    def __init__(
        self,
        k: int = 10,
        *,
        fragments: int = 1,
        delay: int | None = None,
        overlap: bool = False,
        alpha: float | None = None,
        momentum: str = "keep",
        norm: str = "averaged",
        check_every: int = 100,
        nonfinite: str = "stop",
    ) -> None:
        super().__init__(
            "parameters", every=k, momentum=momentum, norm=norm, check_every=check_every, nonfinite=nonfinite
        )
        self.k = self.every
        self._stream(fragments, delay, alpha, overlap=overlap)
        if momentum != "keep" and (overlap or delay or fragments > 1):
            raise InvalidArgument(
                f"momentum={momentum!r} changes the optimizer's state in the same instant as the parameters, which "
                "rounds in fragments or in the background do not have. Leave one of them out."
            )


class MSync(BSP):
    """BSP with the first m of p gradients of each round: no worker waits for the slowest.

        g = sum_{i in S} n_i g_i / sum_{i in S} n_i,    S: the first m workers to come

    A worker that comes later takes the others' parameters and begins its next batch with them; what it had computed is
    left out. With m = p it is BSP. Chen et al.: Revisiting distributed synchronous SGD (arXiv:1604.00981), there with
    backup workers.

    Args:
        m: how many are waited for; 0: all.
        norm, check_every, nonfinite: as in BSP. There is no overlap: gradients that come too late are left
            out as a whole.
    """

    quorum: int = 0

    def __init__(self, m: int = 0, *, norm: str = "averaged", check_every: int = 1000, nonfinite: str = "stop") -> None:
        super().__init__(norm=norm, check_every=check_every, nonfinite=nonfinite)
        self.m = self.quorum = checked_count("m", m, 0)
