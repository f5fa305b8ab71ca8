"""Synchronous gradients: all workers average their gradients before each step of the optimizer (BSP, MSync)."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from maniple.adapters import Adapter, FlatGradients, GradientBuckets
from maniple.clock import clock
from maniple.collectives.call import nonfinite_weight
from maniple.contracts import Array, Bucket, BucketedVectors, ResidentVectors
from maniple.errors import Diverged, InvalidArgument
from maniple.layout import Layout
from maniple.replica.context import TrainingContext
from maniple.replica.nonfinite import nonfinite_entry
from maniple.replica.synchronous import Synchronous
from maniple.wire.codecs import get_codec

if TYPE_CHECKING:
    from maniple.replica.replica import Replica


class SynchronousGradients(Synchronous):
    """Averages the gradients of all workers before each step of the optimizer, so that all replicas stay equal.

    A torch optimizer's hooks call `_before_step`; with overlap the backward pass averages. A loop over NumPy arrays
    calls `replica.reduce(gradients)` before each update.
    """

    def _open_vectors(self) -> tuple[Layout, ResidentVectors]:
        model, rule, background = self._model, self._rule, self._collectives.background
        is_coarse = get_codec(self._wire).keeps_errors
        if is_coarse and model.device != "cpu":
            background = None  # these codecs compute on the CPU
        buckets = model.buckets(norm=rule.norm) if rule.overlap and background is not None else None
        self._overlap: _Overlap | None = None
        self._gradients: FlatGradients
        if buckets is not None and background is not None:
            exact = {"exact": buckets.layout.sizes_from(buckets.gradient_count)} if is_coarse else {}
            resident = background.reside_in_parts(
                buckets.layout.sizes, buckets.parts, wire=self._wire, device=model.device, **exact
            )
            self._overlap = _Overlap(buckets, resident)
            self._gradients = buckets
        else:
            self._gradients = model.gradients(norm=rule.norm)
            device = "cpu" if background is None else model.device
            layout = self._gradients.layout
            exact = {"exact": layout.sizes_from(self._gradients.gradient_count)} if is_coarse else {}
            resident = self._collectives.reside(layout.sizes, wire=self._wire, device=device, **exact)
        self._is_reduced = False  # the next step has averaged gradients
        self._is_averaged = True  # no backward pass has added to them since, as far as is known
        self._is_watching = False  # backward passes report new gradients
        self._diverged: Diverged | None = None  # raised if a step is made with the gradients of the last round
        self._sent_weight = 1.0  # of the last round
        return self._gradients.layout, resident

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        self._gradients.place(self._resident.flat)
        gradients = self._gradients.layout.places[: self._gradients.gradient_count]
        self._ends = {dtype: stop for dtype, _, stop in gradients}  # where the gradients of a flat vector end
        self._unhook += [model.before_step(self._before_step), model.before_foreign_step(self._before_foreign_step)]
        if self._overlap is not None:
            self._unhook.append(self._overlap.buckets.watch(self._send_bucket, self._end_backward))

    @property
    def is_keeper(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All optimizers are equal, so the first worker of the last round saves its state."""
        return self._is_first

    def begin(self) -> None:
        super().begin()
        self._gradients.begin()

    def reduce(self, gradients: Mapping[str, Array] | None) -> None:
        if not self._is_finished:
            self._watch_gradients()
        self._average(gradients, is_deferred=self._model.has_optimizer)

    def _before_step(self) -> None:
        """Average the gradients that the optimizer is about to use."""
        if self.replica.is_center:
            self.replica.refuse_inside_center("a training step was made")
        if not self._is_finished:
            if self._overlap is not None or not self._is_reduced or not self._is_delivered:
                self._average()
            if self._diverged is not None:
                self._end_diverged(self._diverged)
            self.replica.is_exchanging = True  # a SIGTERM waits until the step is complete

    def _average(self, gradients: Mapping[str, Array] | None = None, *, is_deferred: bool = False) -> None:
        """Average the gradients of all workers.

        Values that are not finite raise Diverged, with `is_deferred` only when the optimizer makes a step with them:
        torch's GradScaler skips the step and lowers its scale, in all workers alike.
        """
        if self._overlap is not None and self._is_reduced:
            if (weight := self._weight()) != self._sent_weight:
                raise InvalidArgument(
                    f"replica.samples makes the weight {weight:g}, but the gradients went out with "
                    f"{self._sent_weight:g} during the backward pass (overlap=True). Set replica.samples before "
                    "loss.backward()."
                )
            return
        if self._is_finished or (gradients is None and self._is_summed()):
            return
        replica = self.replica
        self._prepare_round()
        begin = clock.monotonic()
        replica.is_exchanging = True
        try:
            self._gradients.collect(gradients)
            self._sent_weight = weight = self._weight()
            if self._overlap is not None:
                weight = self._overlap.checked_weight(weight)
            else:
                weight = self._contributions.checked_weight(weight, self._resident.flat)
            self._all_reduce(weight)
            self._check_round(is_deferred=is_deferred)
            if self._rule.op == "sum" and self._last.weight > 1:  # the round has computed the mean
                for dtype, stop in self._ends.items():
                    self._resident.flat[dtype][:stop] *= self._last.weight
            self._gradients.deliver(gradients)
            self._complete_round()
        finally:
            replica.is_exchanging = False
        replica.progress.round(len(self._last.ranks), self._last.size_bytes)
        replica.spent_s += clock.monotonic() - begin
        self._is_reduced = self._is_averaged = True
        if self._context.exit_code is not None:
            self._context.exit_if_signalled()

    def _is_summed(self) -> bool:
        """The gradients are a sum already, which must not be summed again before the next step.

        A mean of equal values may be repeated, and those of later backward passes are added to it; a sum may not.
        """
        if self._rule.op != "sum" or not self._is_reduced or not self._gradients.is_delivered:
            return False
        if self._is_averaged:
            return True
        raise InvalidArgument(
            f"a backward pass has added to gradients that were summed over {len(self._last.ranks)} workers, and the "
            "next sum would count these again (op='sum'). Call replica.reduce() after the last backward pass of a "
            "step, and optimizer.zero_grad(), with set_to_none=True, after a step that was left out."
        )

    def _check_round(self, *, is_deferred: bool) -> None:
        made = self._last
        self._diverged = self._contributions.check_round(made, self.replica.steps + 1)
        if not made.nonfinite:
            return
        if self._diverged is not None:
            if not (is_deferred and self._gradients.spoil(min(made.nonfinite.items())[1])):
                self._end_diverged(self._diverged)
        elif not made.weight:  # no worker had a finite contribution
            self._gradients.drop()

    def step(self) -> None:
        """Count a step, and bring the center up to date if it is this worker's turn."""
        if not self._is_reduced and not self._is_finished:
            raise InvalidArgument(
                "a step was made with gradients that were not averaged. Give the optimizer to share(), or call "
                "replica.reduce(gradients) before each update and replica.step() after it."
            )
        replica = self.replica
        self._is_reduced = replica.is_exchanging = False
        replica.count_step()
        replica.steps_since_exchange = 0
        if replica.is_primary and self._context.samples.trained:
            self._context.samples.exchange(self._context.samples.mark())
        if self._is_first and self._publish_pace.due(1, clock.monotonic() - replica.start):
            self.publish()

    def publish_for_snapshot(self) -> None:
        """Bring the center, its position in the data and the optimizer state to the same step."""
        if self._is_first:
            self.publish()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Do not send the gradients of backward passes in this block; the next step averages them."""
        if self._overlap is None:
            yield
            return
        with self._overlap.buckets.paused():
            yield
        self._is_averaged = False  # an earlier pass may have been averaged, and there is more now
        self._is_summed()  # an error
        self._is_reduced = False

    def _weight(self) -> float:
        """This worker's weight in the mean: the samples of its batch. In a sum all workers with samples are equal."""
        samples = self.replica.samples
        if samples is None:
            return 1.0
        if not 0 <= samples < math.inf:
            raise InvalidArgument(
                f"replica.samples={samples!r} cannot weight gradients. Give the number of samples, 0 or more."
            )
        return float(samples > 0) if self._rule.op == "sum" else float(samples)

    def _before_foreign_step(self, parameters: Sequence[Any]) -> None:
        """Average before a step of an optimizer that was not given to share(), if it trains shared parameters."""
        if self._is_finished or not self._gradients.owns(parameters):
            return
        self.replica.refuse_inside_center("a training step was made")
        self._watch_gradients()
        if not self._is_delivered:
            self._average()
        if self._diverged is not None:
            self._end_diverged(self._diverged)

    @property
    def _is_delivered(self) -> bool:
        """The parameters have the gradients of the last average."""
        return self._is_averaged and (self._overlap is not None or self._gradients.is_delivered)

    def _watch_gradients(self) -> None:
        """Notice backward passes that add to averaged gradients, which must then be averaged again.

        The mean of what all workers have in common plus what each has added is the common part plus the mean of the
        rest, so nothing is counted twice.
        """
        if not self._is_watching and self._overlap is None:
            self._is_watching = True
            self._unhook.append(self._gradients.on_gradient(self._note_gradient))

    def _note_gradient(self) -> None:
        self._is_averaged = False

    def _send_bucket(self) -> None:
        """Send a bucket of gradients that the backward pass has completed."""
        assert self._overlap is not None
        self.replica.is_exchanging = True  # a SIGTERM waits until the round is complete
        self._overlap.send(self._weight())

    def _end_backward(self) -> None:
        """Average the gradients at the end of a backward pass; earlier ones are equal in all workers."""
        self._is_averaged = False
        self._is_summed()  # an error
        self._is_reduced = False
        self._average(is_deferred=True)


class _Overlap:
    """Gradients that are sent in buckets while the backward pass computes the others."""

    def __init__(self, buckets: GradientBuckets, resident: BucketedVectors) -> None:
        self.buckets, self._resident = buckets, resident
        self._parts = buckets.parts
        self._sent = 0  # parts of this round
        self._nonfinite: int | None = None  # the first entry in them that is not finite

    def send(self, weight: float) -> None:
        """Send the next bucket. It is checked before, since afterwards it holds the mean of all workers."""
        self._check(self._parts[self._sent])
        self._sent += 1
        self._resident.begin("mean", weight=weight)

    def checked_weight(self, weight: float) -> float:
        """The weight to send with the rest of this round: `weight`, or a code for an entry that is not finite."""
        for part in self._parts[self._sent :]:
            self._check(part)
        entry, self._sent, self._nonfinite = self._nonfinite, 0, None
        return weight if entry is None or weight <= 0 else nonfinite_weight(entry)

    def _check(self, part: Bucket) -> None:
        if self._nonfinite is None:
            self._nonfinite = nonfinite_entry(self.buckets.layout, self._resident.flat, part)
