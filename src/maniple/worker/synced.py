"""A replica whose rule meets in the circle: with gradients before each step, or with values after some."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np

from maniple.adapters import Adapter, Flat
from maniple.circle.absence import PassedOver
from maniple.contracts import Array, Background, Center, Circle, Moment, Resident
from maniple.errors import Diverged, InvalidArgument, ManipleError
from maniple.pace import Pace, RateLimit
from maniple.record import Events
from maniple.rules import Rule
from maniple.worker.asked import check_pace
from maniple.worker.keeping import shown
from maniple.worker.overlap import check_weight, overlap
from maniple.worker.owner import Owner
from maniple.worker.replica import Replica
from maniple.worker.rounds import Rounds

_KEEP_SHARE = 0.003  # of the time one worker may spend on bringing the center up to date: all wait for it


class Synced(Replica):
    """One worker's copy of a model that all workers change at once.

    Attributes:
        samples: the samples of this step's batch; set before `optimizer.step()` (or `reduce`; with overlap before
            `backward()`), it is this worker's weight in the mean of gradients. Never set: all count the same.
    """

    def __init__(
        self,
        model: Adapter,
        center: Center | None,
        circle: Circle,
        *,
        rule: Rule,
        pace: Pace,
        wire: str,
        events: Events,
        worker: Owner,
    ) -> None:
        super().__init__(model, center, rule=rule, pace=pace, events=events, worker=worker)
        check_pace(rule, pace, circle, wire)
        self._is_reduced = self._is_finished = self._is_watching = False
        self._are_averaged = True  # no backward pass has added to the gradients since, as far as is known
        self._diverged: Diverged | None = None  # to be raised if a step is made with the gradients that were averaged
        self._sent_weight = 1.0  # of the gradients that were averaged last
        self._overlap = overlap(model, circle, rule, wire)
        self._keep_pace = RateLimit(_KEEP_SHARE)
        self._gradients, resident = self._reside(circle, wire)
        layout = self._layout if self._gradients is None else self._gradients.layout
        self._rounds = Rounds(circle, model, resident, layout=layout, rule=rule, holder=self, events=events)
        self._offers = self._layout.views(self._rounds.flat) if self._gradients is None else []
        self._undos: list[Callable[[], None]] = [model.refuse_wrapping()] if center is None else []
        if self._gradients is not None:
            self._gradients.place(self._rounds.flat)
            self._undos.append(model.before_step(self._before_step))
            self._undos.append(model.before_foreign_step(self._before_foreign_step))
        if self._overlap is not None:
            self._undos.append(self._overlap.watch(self))
        if rule.norm == "synchronised":
            self._undos.append(model.synchronise_norm(self._total))

    @property
    def weight(self) -> float:
        """How often this worker counts in the mean of gradients."""
        if self.samples is not None and not 0 <= self.samples < math.inf:
            raise InvalidArgument(
                f"replica.samples={self.samples!r} cannot count gradients. Give the number of samples, 0 or more."
            )
        return 1.0 if self.samples is None else float(self.samples)

    @property
    def rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - counted elsewhere
        """The rounds so far."""
        return self._rounds.count

    @property
    def members(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ranks of all in the last round; not known with a quorum, where late workers have another last round."""
        return None if self._rule.quorum or not self.rounds else self._rounds.last.ranks

    @property
    def waited_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The time spent waiting for the other workers so far."""
        return self._rounds.waited_s

    @property
    def is_keeper(self) -> bool:
        """With gradients all optimizers are the same, and the first of those of the last round is enough."""
        return self._gradients is None or self._rounds.is_first

    def begin(self) -> None:
        """Enter the circle: with the values of the center or of the first worker, or of those who are there already."""
        self.pull_center()
        self._rounds.enter(self._remember)
        if self._gradients is not None:
            self._gradients.begin()

    def reduce(self, gradients: Mapping[str, Array] | None = None) -> None:
        """Average the gradients now, for instance to clip what the optimizer will see.

        The step that follows uses them as they are. Of a model of NumPy arrays, pass the gradients: they are averaged
        in place.
        """
        if self._gradients is None:
            return  # a rule that averages values leaves gradients as they are
        if not self._is_finished:
            self._watch_gradients()
        self._average(gradients, is_deferred=self._model.has_optimizer)

    def _average(self, gradients: Mapping[str, Array] | None = None, *, is_deferred: bool = False) -> None:
        """Average the gradients.

        Values that are not finite raise Diverged; `is_deferred`: when the optimizer is about to make a step with them.
        torch's GradScaler makes none then, as it is to find the same infinity in all workers and lower its scale.
        """
        assert self._gradients is not None
        if self._overlap is not None and self._is_reduced:
            check_weight(self.weight, self._sent_weight)
            return
        if self._is_finished:
            return
        self._rounds.begin()
        begin = time.perf_counter()
        self.is_exchanging = True
        try:
            self._gradients.collect(gradients)
            self._sent_weight = self.weight
            if self._overlap is not None:
                told = self._overlap.told_weight(self.weight)
            else:
                told = self._rounds.told_weight(self.weight)
            self._rounds.meet(told)
            self._judge_gradients(is_deferred=is_deferred)
            self._gradients.deliver(gradients)
            self._rounds.settled()
        finally:
            self.is_exchanging = False
        self._note_round()
        self._spent_s += time.perf_counter() - begin
        self._is_reduced = self._are_averaged = True
        self._worker.end_if_told()

    def _judge_gradients(self, *, is_deferred: bool) -> None:
        assert self._gradients is not None
        made = self._rounds.last
        self._diverged = self._rounds.contributions.judge(made, self.steps + 1)
        if self._diverged is not None and not (is_deferred and self._gradients.spoil(min(made.nonfinite.items())[1])):
            self._end_diverged(self._diverged)
        if self._diverged is None and made.nonfinite and not made.weight:
            self._gradients.drop()

    def _end_diverged(self, error: Diverged) -> NoReturn:
        """End as all workers do in this round; the replicas are finite, and the center shall have them."""
        if self._rounds.is_first:
            with suppress(ManipleError):
                self._keep()
        raise error

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradients; they are averaged at the next step after it."""
        if self._overlap is None:
            yield
            return
        with self._overlap.buckets.paused():
            yield
        self._is_reduced = self._are_averaged = False  # if a pass before it was averaged, there is more now

    def end_pass(self) -> None:
        """Average the gradients of a backward pass; what an earlier one has left there is the same for all workers."""
        self._is_reduced = False
        self._average(is_deferred=True)

    def rest(self) -> None:
        """Let the others go on without this worker until its next step, which begins with their state."""
        self._rounds.rest()

    def step(self) -> None:
        """Count one step, and exchange values if the pace says so. The optimizer's hook calls it after each step."""
        if self._gradients is not None and not self._is_reduced and not self._is_finished:
            raise InvalidArgument(
                "a step was made with gradients that were not averaged. Give the optimizer to share(), or call "
                "replica.reduce(gradients) before each update and replica.step() after it."
            )
        self._is_reduced = self.is_exchanging = False
        self._count_step()
        now = time.perf_counter()
        if self._gradients is None and self.pace.due(self._since_exchange, now - self._start):
            self.exchange()
        if self._gradients is not None:
            self._since_exchange = 0
            self._worker.settled(self)
            if self._rounds.is_first and self._keep_pace.due(1, now - self._start):
                self._keep()
        self._end_step()
        self._worker.end_if_told()

    def exchange(self) -> None:
        """Meet now: the rule's values are exchanged by all workers at once."""
        if self._gradients is not None or self._is_finished:
            return
        self._rounds.begin()
        begin = time.perf_counter()
        self.is_exchanging = True
        try:
            self._model.begin()
            for i, out in enumerate(self._offers):
                if self._is_local(i):
                    out[:] = 0  # nobody takes it, so it may be anything
                else:
                    self._rule.offer(self._model.array(i), self.memory_of(i), out)
            told = self._rounds.told_weight(1.0)
            self._settle_moments(max(0.0, told))
            self._rounds.meet(told, lambda: self._settle_moments(0.0))
            if (error := self._rounds.contributions.judge(self._rounds.last, self.steps)) is not None:
                self._end_diverged(error)
            if self._rounds.circle.rank in self._rounds.last.nonfinite:
                self._return_to_center()
            self._accept()
        finally:
            self.is_exchanging = False
        self._note_round()
        cost_s = time.perf_counter() - begin
        self._spent_s += cost_s
        self.pace.exchanged(cost_s, self._layout.size_bytes)
        self._since_exchange = 0
        self._worker.settled(self)
        if self._rounds.is_first:
            self._keep()
        self._worker.end_if_told()

    def publish(self) -> None:
        """Let the center have the replica's values."""
        self._keep()

    def publish_validated(self) -> bool:
        """Bring the center up to date: it may be behind what `center()` shows, which all workers have."""
        if self._center is None:
            return False
        self._keep()
        return True

    def pull(self) -> None:
        """Nothing to do: rounds keep the replica up to date, and by itself it would part from the others."""
        self._refuse_inside_center("pull() was called")

    def push(self) -> None:
        """Bring the center up to date with what all workers have agreed on in the last round."""
        self._refuse_inside_center("push() was called")
        self._keep()

    @contextmanager
    def center(self) -> Generator[None]:
        """Look at the shared parameters: with gradients the replica has them already.

        Else each worker has kept what the last round made of them. The center in shared memory may be behind: only the
        first worker brings it up to date.
        """
        self._refuse_inside_center("another `with replica.center():` was opened")
        self.is_center = True
        try:
            if self._gradients is not None or self._memory is None:
                yield
                return
            with shown(self._model, self._rule, self._layout, self._memory):
                try:
                    yield
                finally:
                    self.is_exchanging = True  # a SIGTERM waits until the replica is whole again
        finally:
            self.is_exchanging = self.is_center = False
        self._worker.end_if_told()

    def finish(self, *, exchange: bool) -> None:
        """Leave the circle; the others go on. The center has what this worker knows."""
        if self._is_finished:
            return
        for undo in self._undos:
            undo()
        if exchange and (self._gradients is not None or not self.is_center):
            if self._gradients is None and self._since_exchange:
                self.exchange()
            is_newest = self._rounds.is_current if self._rounds.is_elastic else self._shadow()
            if is_newest:  # else the others know more, and keep it
                self._keep()
        self._is_finished = True
        self._rounds.circle.close()
        super().finish(exchange=False)

    def _reside(self, circle: Circle, wire: str) -> tuple[Flat | None, Resident]:
        if self._overlap is not None:
            return self._overlap.buckets, self._overlap.resident
        if self._rule.meets != "gradients":
            return None, circle.reside(self._layout.sizes, wire=wire)
        gradients = self._model.gradients(norm=self._rule.norm)
        device = self._model.device if isinstance(circle, Background) else "cpu"  # which also reduces on GPUs
        return gradients, circle.reside(gradients.sizes, wire=wire, device=device)

    def _note_round(self) -> None:
        self._progress.met(len(self._rounds.last.ranks), self._layout.size_bytes)

    def _before_step(self) -> None:
        self._refuse_inside_center("a training step was made")
        if not self._is_finished:
            if self._overlap is not None or not self._is_reduced or not self._are_delivered:
                self._average()
            self._refuse_diverged()
            self.is_exchanging = True  # a SIGTERM waits until the step is whole

    def _before_foreign_step(self, parameters: Sequence[Any]) -> None:
        """Another optimizer, not given to share(), is about to make a step: perhaps with shared parameters."""
        if self._gradients is None or self._is_finished or not self._gradients.owns(parameters):
            return
        self._refuse_inside_center("a training step was made")
        self._watch_gradients()
        if not self._are_delivered:
            self._average()
        self._refuse_diverged()

    @property
    def _are_delivered(self) -> bool:
        """The gradients are those of the last average."""
        assert self._gradients is not None
        return self._are_averaged and (self._overlap is not None or self._gradients.are_delivered)

    def _watch_gradients(self) -> None:
        """From now on, know when a backward pass adds to gradients that were averaged: they must be so again.

        The mean of what all have alike and of what each has added is what all have, and the mean of the rest.
        """
        if not self._is_watching and self._overlap is None and self._gradients is not None:
            self._is_watching = True
            self._undos.append(self._gradients.on_gradient(self._note_gradient))

    def _note_gradient(self) -> None:
        self._are_averaged = False

    def _refuse_diverged(self) -> None:
        if self._diverged is not None:
            self._end_diverged(self._diverged)

    def _accept(self) -> None:
        weight = self._rounds.last.weight
        moment = Moment(step=self.rounds * getattr(self.pace, "n", 1), live=max(1, round(weight)))  # the same for all
        for i, total in enumerate(self._offers) if weight else ():
            if self._is_local(i):
                continue
            if self._rule.op == "sum":
                total *= total.dtype.type(weight)
            self._rule.accept(self._model.array(i), total, self.memory_of(i), moment)
            self._model.commit(i)
        self._rounds.settled()

    def _is_local(self, i: int) -> bool:
        return self._rule.norm == "local" and self._model.is_buffer(i)

    def _return_to_center(self) -> None:
        """What this worker has trained since the last round is not finite: begin again from there."""
        for i in range(len(self._layout.entries)):
            if not self._is_local(i):
                value = self._model.array(i)
                value[:] = self._rule.shared(value, self.memory_of(i))
                self._model.commit(i)
        self._model.begin()

    def _settle_moments(self, weight: float) -> None:
        circle = self._rounds.circle

        def average(x: Array, counts: bool) -> None:
            circle.all_reduce(x, x, "mean", weight=weight if counts else 0.0)

        def gather(mine: bytes) -> list[bytes]:
            return [one.tobytes() for one in circle.all_gather(np.frombuffer(mine, np.uint8))]

        with suppress(PassedOver):  # the round finds it too, and takes the others' state
            self._model.settle_moments(self._rule.momentum, average, gather)

    def _total(self, x: Array) -> None:
        if not self._is_finished:
            self._rounds.total(x)

    def _shadow(self) -> bool:
        """Come to the others' rounds with nothing, until all have come to their end: this circle needs everybody.

        True if nobody knows more than this worker then.
        """
        is_newest = True
        while True:
            self._rounds.begin(is_shadow=True)
            if self._gradients is None:
                self._settle_moments(0.0)
            self._rounds.clear()
            self._rounds.meet(0.0)
            if (error := self._rounds.contributions.judge(self._rounds.last, self.steps)) is not None:
                raise error
            if self._rounds.last.weight == 0 and not self._rounds.last.nonfinite:
                return is_newest
            if self._gradients is None:
                self._model.begin()
                self._accept()
            else:
                is_newest = False

    def _keep(self) -> None:
        """Bring the center up to date, with what the rule shows there."""
        if self._center is None or self._worker.is_over:
            return
        begin = time.perf_counter()
        with shown(self._model, self._rule, self._layout, self._memory):
            outcome, _ = self._timed("keep", self._center.push, self._model)
        if not outcome.refused:
            self._worker.kept(self, len(self._rounds.last.ranks))
        self._refusals.mind(outcome, "the workers, whose replicas change together,")
        self._keep_pace.exchanged(time.perf_counter() - begin, self._layout.size_bytes)

    def memory_of(self, i: int) -> Array | None:
        """What the rule keeps for entry i."""
        return None if self._memory is None else self._memory[i]

    def position(self) -> Any:
        """Where this worker is in the data."""
        return self._worker.position(self)

    def continue_at(self, position: Any, rounds: int) -> None:
        """Begin with the samples where the others are."""
        self._worker.continue_at(position, rounds)

    def pull_center(self) -> None:
        """Take the center's values."""
        super().pull()
