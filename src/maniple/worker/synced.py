"""A replica whose rule meets in the circle: with gradients before each step, or with values after some."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from maniple.adapters import Adapter, Flat
from maniple.circle.absence import PassedOver
from maniple.contracts import Array, Background, Center, Circle, Moment, Resident
from maniple.errors import InvalidArgument
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
        self._is_reduced = self._is_finished = False
        self._sent_weight = 1.0  # of the gradients that were averaged last
        self._overlap = overlap(model, circle, rule, wire)
        self._keep_pace = RateLimit(_KEEP_SHARE)
        self._gradients, resident = self._reside(circle, wire)
        self._rounds = Rounds(circle, model, resident, rule=rule, holder=self, events=events)
        self._offers = self._layout.views(self._rounds.flat) if self._gradients is None else []
        self._undos: list[Callable[[], None]] = []
        if self._gradients is not None:
            self._gradients.place(self._rounds.flat)
            self._undos.append(model.before_step(self._before_step))
        if self._overlap is not None:
            self._undos.append(self._overlap.watch(self))
        if rule.norm == "synchronised":
            self._undos.append(model.synchronise_norm(self._total))

    @property
    def weight(self) -> float:
        """How often this worker counts in the mean of gradients."""
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

    def reduce(self, gradients: Mapping[str, Array] | None = None) -> None:
        """Average the gradients now, for instance to clip what the optimizer will see.

        The step that follows uses them as they are. Of a model of NumPy arrays, pass the gradients: they are averaged
        in place.
        """
        if self._gradients is None:
            raise InvalidArgument(f"{self._rule!r} averages no gradients, so reduce() has nothing to do. Use BSP().")
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
            self._rounds.meet(self.weight)
            self._gradients.deliver(gradients)
        finally:
            self.is_exchanging = False
        self._note_round()
        self._spent_s += time.perf_counter() - begin
        self._is_reduced = True
        self._worker.end_if_told()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradients; they are averaged at the next step after it."""
        if self._overlap is None:
            yield
            return
        with self._overlap.buckets.paused():
            yield
        self._is_reduced = False  # if a pass before it was averaged, there is more now

    def end_pass(self) -> None:
        """Average the gradients of a backward pass; what an earlier one has left there is the same for all workers."""
        self._is_reduced = False
        self.reduce()

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
            self._settle_moments(1.0)
            self._model.begin()
            for i, out in enumerate(self._offers):
                self._rule.offer(self._model.array(i), self.memory_of(i), out)
            self._rounds.meet(1.0, lambda: self._settle_moments(0.0))
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
        """With gradients, all replicas are the same and the center is an older one of them: bring it up to date."""
        if self._gradients is None or self._center is None:
            return False
        self._keep()
        return True

    def pull(self) -> None:
        """Not with this rule: a replica changed by itself would no longer be that of the others."""
        raise self._refusal("pull")

    def push(self) -> None:
        """Not with this rule."""
        raise self._refusal("push")

    @contextmanager
    def center(self) -> Generator[None]:
        """Look at the shared parameters: with gradients the replica has them already."""
        if self._gradients is None:
            with super().center():
                yield
            return
        self._refuse_inside_center("another `with replica.center():` was opened")
        self.is_center = True
        try:
            yield
        finally:
            self.is_center = False

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
        gradients = self._model.gradients(buffers=self._rule.norm == "averaged")
        device = self._model.device if isinstance(circle, Background) else "cpu"  # which also reduces on GPUs
        return gradients, circle.reside(gradients.sizes, wire=wire, device=device)

    def _note_round(self) -> None:
        self._progress.met(len(self._rounds.last.ranks), self._layout.size_bytes)

    def _before_step(self) -> None:
        self._refuse_inside_center("a training step was made")
        if not self._is_finished:
            is_done = self._is_reduced and self._gradients is not None and self._gradients.are_delivered
            if self._overlap is not None or not is_done:
                self.reduce()
            self.is_exchanging = True  # a SIGTERM waits until the step is whole

    def _accept(self) -> None:
        weight = self._rounds.last.weight
        moment = Moment(step=self.rounds * getattr(self.pace, "n", 1), live=max(1, round(weight)))  # the same for all
        for i, total in enumerate(self._offers) if weight else ():
            if self._rule.norm == "local" and self._model.is_buffer(i):
                continue
            if self._rule.op == "sum":
                total *= total.dtype.type(weight)
            self._rule.accept(self._model.array(i), total, self.memory_of(i), moment)
            self._model.commit(i)
        self._rounds.settled()

    def _settle_moments(self, weight: float) -> None:
        def average(x: Array) -> None:
            self._rounds.circle.all_reduce(x, x, "mean", weight=weight)

        with suppress(PassedOver):  # the round finds it too, and takes the others' state
            self._model.settle_moments(self._rule.momentum, average)

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
            if self._rounds.last.weight == 0:
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
        self._refusals.mind(outcome)
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

    def _refusal(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"{name}() is for rules of the center: with {self._rule!r} all workers' replicas change together. "
            "Leave it out."
        )
