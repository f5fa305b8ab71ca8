"""A replica whose rule meets in the circle: with gradients before each step, or with values after some."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from maniple.adapters import Adapter
from maniple.circle.roster import PassedOver
from maniple.circle.shared import Shared
from maniple.contracts import Array, Center, Circle, Moment, Round
from maniple.errors import InvalidArgument
from maniple.pace import Pace, RateLimit
from maniple.record import Events
from maniple.rules import Rule
from maniple.worker.asked import check_pace
from maniple.worker.digests import compare, digests
from maniple.worker.parcel import take_parcel, write_parcel
from maniple.worker.replica import Owner, Replica

_KEEP_SHARE = 0.01  # of the time one worker may spend on bringing the center up to date


class Synced(Replica):
    """One worker's copy of a model that all workers change at once.

    Attributes:
        samples: the samples of this step's batch; set before `optimizer.step()` (or `reduce`), it is this worker's
            weight in the mean of gradients. Never set: all count the same.
        waited_s: the time spent waiting for the other workers so far.
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
        self.rounds = 0
        self.waited_s = 0.0
        self._circle = circle
        self._elastic = circle if isinstance(circle, Shared) else None
        self._is_reduced = self._is_finished = False
        self._keep_pace = RateLimit(_KEEP_SHARE)
        self._last = Round((circle.rank,))
        self._digests: Array | None = None
        check_pace(rule, pace, circle)
        self._undos = [model.before_step(self._before_step)] if rule.meets == "gradients" else []
        if rule.norm == "synchronised":
            self._undos.append(model.synchronise_norm(self._total))
        self._gradients = model.gradients(buffers=rule.norm == "averaged") if rule.meets == "gradients" else None
        sizes = self._layout.sizes if self._gradients is None else self._gradients.sizes
        self._resident = circle.reside(sizes, wire=wire)
        self._offers = self._layout.views(self._resident.flat) if self._gradients is None else []
        if self._gradients is not None:
            self._gradients.place(self._resident.flat)

    def begin(self) -> None:
        """Enter the circle: with the values of the center or of the first worker, or of those who are there already."""
        super().pull()
        if self._elastic is not None:
            self._elastic.roster.on_newcomers = self._write_parcel
            if self._elastic.enter():
                self._take_parcel()
        else:
            self._model.begin()
            for i in range(len(self._layout.entries)):
                value = self._model.array(i)
                self._circle.broadcast(value, root=self._circle.ranks[0])
                self._remember(i, value)
                self._model.commit(i)

    def reduce(self, gradients: Mapping[str, Array] | None = None) -> None:
        """Average the gradients now, for instance to clip what the optimizer will see.

        The step that follows uses them as they are. Of a model of NumPy arrays, pass the gradients: they are averaged
        in place.
        """
        if self._gradients is None:
            raise InvalidArgument(f"{self._rule!r} averages no gradients, so reduce() has nothing to do. Use BSP().")
        if self._is_reduced:
            return
        self._begin_round()
        begin = time.perf_counter()
        self.is_exchanging = True
        try:
            self._gradients.collect(gradients)
            self._meet(1.0 if self.samples is None else float(self.samples))
            self._gradients.deliver(gradients)
        finally:
            self.is_exchanging = False
        self._spent_s += time.perf_counter() - begin
        self._is_reduced = True
        self._worker.end_if_told()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradients; they are averaged at the next step after it."""
        yield

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
        else:
            self._keep()
        if self._gradients is not None:
            self._since_exchange = 0
            self._worker.settled(self)
        self._end_step()
        self._worker.end_if_told()

    def exchange(self) -> None:
        """Meet now: the rule's values are exchanged by all workers at once."""
        if self._gradients is not None or self._is_finished:
            return
        self._begin_round()
        begin = time.perf_counter()
        self.is_exchanging = True
        try:
            self._model.settle_moments(self._rule.momentum, self._average)
            self._model.begin()
            for i, out in enumerate(self._offers):
                self._rule.offer(self._model.array(i), self._memory_of(i), out)
            self._meet(1.0)
            self._accept()
        finally:
            self.is_exchanging = False
        cost_s = time.perf_counter() - begin
        self._spent_s += cost_s
        self.pace.exchanged(cost_s, self._layout.size_bytes)
        self._since_exchange = 0
        self._worker.settled(self)
        self._keep(is_due=True)
        self._worker.end_if_told()

    def publish(self) -> None:
        """Let the center have the replica's values."""
        self._keep(is_due=True)

    def pull(self) -> None:
        """Not with this rule: a replica changed by itself would no longer be that of the others."""
        raise self._refusal("pull")

    def push(self) -> None:
        """Not with this rule."""
        raise self._refusal("push")

    @contextmanager
    def center(self) -> Generator[None]:
        """Look at the shared parameters: with gradients the replica has them already."""
        if self._gradients is not None or self._center is None:
            yield
            return
        with super().center():
            yield

    def finish(self, *, exchange: bool) -> None:
        """Leave the circle; the others go on. The center has what this worker knows."""
        if self._is_finished:
            return
        for undo in self._undos:
            undo()
        if exchange and not self._is_center:
            if self._elastic is None:
                self._shadow()
            if self._elastic is None or self._elastic.roster.is_current:  # else the others know more, and keep it
                self._keep(is_due=True)
        self._is_finished = True
        self._circle.close()
        super().finish(exchange=False)

    def _before_step(self) -> None:
        self._refuse_inside_center("a training step was made")
        if not self._is_finished:
            self.reduce()
            self.is_exchanging = True  # a SIGTERM waits until the step is whole

    def _begin_round(self) -> None:
        if self._elastic is not None:
            self._elastic.greet()
        every = self._rule.check_every
        if every and self.rounds and self.rounds % every == 0:
            self._compare()

    def _meet(self, weight: float) -> None:
        """One round; if the others have gone on without this worker, with their state and without its own values."""
        quorum = {"quorum": self._rule.quorum} if self._rule.quorum else {}
        while True:
            try:
                self._last = self._resident.all_reduce("mean", weight=weight, **quorum)
                break
            except PassedOver:
                self._enter_again()
                for vector in self._resident.flat.values():
                    vector[:] = 0
                weight = 0.0
        self.rounds += 1
        self.waited_s += self._last.waited_s
        if self._elastic is not None:
            self._elastic.forget_parcel()

    def _accept(self) -> None:
        moment = Moment(step=self.steps, live=max(1, round(self._last.weight)))
        if self._last.weight == 0:
            return
        for i, total in enumerate(self._offers):
            if self._rule.op == "sum":
                total *= total.dtype.type(self._last.weight)
            self._rule.accept(self._model.array(i), total, self._memory_of(i), moment)
            self._model.commit(i)
        every = self._rule.check_every
        if every and self.rounds % every == 0:
            self._digests = self._digest()

    def _total(self, x: Array) -> None:
        """Sum over all workers, inside of a step."""
        if self._is_finished:
            return
        while True:
            try:
                self.waited_s += self._circle.all_reduce(x, x, "sum").waited_s
                return
            except PassedOver:
                self._enter_again()

    def _enter_again(self) -> None:
        """The others have gone on without this worker: go on with their state."""
        assert self._elastic is not None
        self._events.write("passed over", step=self.steps)
        self._elastic.roster.leave()
        if self._elastic.enter():
            self._take_parcel()

    def _average(self, x: Array) -> None:
        self._circle.all_reduce(x, x, "mean")

    def _shadow(self) -> None:
        """Come to the others' rounds with nothing, until all have come to their end: this circle needs everybody."""
        while True:
            for vector in self._resident.flat.values():
                vector[:] = 0
            self._meet(0.0)
            if self._last.weight == 0:
                return
            if self._gradients is None:
                self._model.begin()
                self._accept()

    def _keep(self, *, is_due: bool = False) -> None:
        """Bring the center up to date: by the first of the workers, now and then."""
        if self._center is None or self._worker.is_over:
            return
        if not is_due:
            is_first = self._circle.rank == min(self._last.ranks, default=self._circle.rank)
            if not is_first or not self._keep_pace.due(1, time.perf_counter() - self._start):
                return
        begin = time.perf_counter()
        with self._shown():
            self._timed("keep", self._center.push, self._model)
        self._keep_pace.exchanged(time.perf_counter() - begin, self._layout.size_bytes)

    @contextmanager
    def _shown(self) -> Generator[None]:
        """The model holds what the center shows, which some rules keep apart from the replica."""
        if self._memory is None:
            yield
            return
        own = self._layout.views(self._layout.allocate())
        self._copy(into=own)
        self._model.begin()
        for i in range(len(own)):
            self._model.array(i)[:] = self._rule.shared(own[i], self._memory[i])
            self._model.commit(i)
        try:
            yield
        finally:
            self._copy(out_of=own)

    def _memory_of(self, i: int) -> Array | None:
        return None if self._memory is None else self._memory[i]

    def _digest(self) -> Array:
        self._model.begin()
        count = self._model.parameter_count  # buffers may be each worker's own
        return digests(self._rule.shared(self._model.array(i), self._memory_of(i)) for i in range(count))

    def _compare(self) -> None:
        """Raise Desynced unless all replicas are the same."""
        mine = self._digest() if self._gradients is not None else self._digests
        if mine is None:
            return
        try:
            ranks, all_digests = self._circle.ranks, self._circle.all_gather(mine)
        except PassedOver:
            return  # the round finds it too, and takes the others' state
        compare(dict(zip(ranks, all_digests, strict=True)), self._layout.entries, self.rounds)

    def _write_parcel(self, meeting: int) -> None:
        assert self._elastic is not None
        extra = {} if self._digests is None else {"digests": self._digests}
        write_parcel(self._elastic.parcel(meeting), self._model, self._memory, extra, {"rounds": self.rounds})
        self._events.write("greeted", meeting=meeting)

    def _take_parcel(self) -> None:
        """Take the others' state; if nobody is left to give it, the center's."""
        assert self._elastic is not None
        path = self._elastic.await_parcel()
        if path is None:
            super().pull()
            return
        extra, plain = take_parcel(path, self._model, self._memory)
        self.rounds, self._digests = plain["rounds"], extra.get("digests")
        self._events.write("entered", rounds=self.rounds)

    def _refusal(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"{name}() is for rules of the center: with {self._rule!r} all workers' replicas change together. "
            "Leave it out."
        )
