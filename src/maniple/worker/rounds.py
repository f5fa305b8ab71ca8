"""The rounds of one replica: its part in a circle, from entering it to its end."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from maniple.adapters import Adapter
from maniple.circle.absence import PassedOver
from maniple.circle.shared import Shared
from maniple.contracts import Array, Circle, Resident, Round
from maniple.layout import Layout
from maniple.record import Events
from maniple.rules import Rule
from maniple.worker.digests import compare, digests
from maniple.worker.parcel import take_parcel, write_parcel
from maniple.worker.refusals import Contributions


class Holder(Protocol):
    """What the rounds ask of their replica."""

    def memory_of(self, i: int) -> Array | None: ...
    def position(self) -> Any: ...
    def continue_at(self, position: Any, rounds: int) -> None: ...
    def pull_center(self) -> None:
        """Take the center's values."""
        ...


class Rounds:
    """Vectors of one replica that all workers average, again and again.

    Attributes:
        count: the rounds so far; the same for all who are in the circle.
        waited_s: the time spent waiting for the other workers.
        last: what the last one did; nobody is in it before the first of this process.
        contributions: whether those of all workers are finite.
    """

    def __init__(
        self,
        circle: Circle,
        model: Adapter,
        resident: Resident,
        *,
        layout: Layout,
        rule: Rule,
        holder: Holder,
        events: Events,
    ) -> None:
        self.circle = circle
        self.count = 0
        self.waited_s = 0.0
        self.last = Round(())
        self._elastic = circle if isinstance(circle, Shared) else None
        self._model, self._rule, self._holder, self._events = model, rule, holder, events
        self._resident, self.flat = resident, resident.flat
        self.contributions = Contributions(rule, layout, rank=circle.rank, events=events)
        count, is_local = model.parameter_count, rule.norm == "local"
        every = [i for i in range(len(model.entries)) if i < count or (model.is_buffer(i) and not is_local)]
        # Parameters are the same for all until the next step. Buffers change with each forward pass, so those that were
        # averaged with gradients are looked at after the round, as are values.
        self._late = list(range(count)) if rule.meets == "gradients" else []
        self._early = model.averaged_buffers(rule.norm) if rule.meets == "gradients" else every
        self._digests: Array | None = None  # of what was the same for all after the last exchange
        if self._elastic is not None and rule.check_every:
            # Now, while there is room: what is shared later needs memory that something else may have taken by then.
            self._elastic.reserve(8 * (1 + len(self._late) + len(self._early)))

    @property
    def is_elastic(self) -> bool:
        """Workers may come and go."""
        return self._elastic is not None

    @property
    def is_first(self) -> bool:
        """This worker is the first of those of the last round."""
        return self.circle.rank == min(self.last.ranks, default=self.circle.rank)

    @property
    def is_current(self) -> bool:
        """The others have not gone on without this worker."""
        return self._elastic is None or self._elastic.roster.is_current

    def enter(self, remember: Callable[[int, Array], None]) -> None:
        """Begin with the others: with the values of the first worker, or with the state of those who are there."""
        if self._elastic is not None:
            self._elastic.roster.on_newcomers = self._write_parcel
            self._enter_elastic(self._elastic)
            return
        self._model.begin()
        for i in range(len(self._model.entries)):
            value = self._model.array(i)
            self.circle.broadcast(value, root=self.circle.ranks[0])
            remember(i, value)
            self._model.commit(i)

    def begin(self, *, is_shadow: bool = False) -> None:
        """Before a round: see to newcomers, and compare the replicas if that is due."""
        if self._elastic is not None:
            self._elastic.greet()
        every = self._rule.check_every
        if every and self.count and self.count % every == 0:
            self._compare(is_shadow)

    def told_weight(self, weight: float) -> float:
        """The weight with which to come to the next round: it also tells if the vectors are not finite."""
        return self.contributions.told_weight(weight, self.flat)

    def meet(self, weight: float, before: Callable[[], None] = lambda: None) -> None:
        """One round; if the others have gone on without this worker, with their state and without its own values.

        `before` is what all do before a round, for one who must do it again.
        """
        quorum = {"quorum": self._rule.quorum} if self._rule.quorum else {}
        while True:
            try:
                self.last = self._resident.all_reduce("mean", weight=weight, **quorum)
                break
            except PassedOver:
                self._enter_again()
                self.begin(is_shadow=True)
                before()
                self.clear()
                weight = 0.0
        self.count += 1
        self.waited_s += self.last.waited_s
        if self._elastic is not None:
            self._elastic.forget_parcel()

    def rest(self) -> None:
        """Take no part until the next round. In a circle that needs everybody, all must come to every round."""
        if self._elastic is not None:
            self._elastic.roster.leave()

    def clear(self) -> None:
        """Give nothing to the next round."""
        for vector in self.flat.values():
            vector[:] = 0

    def settled(self) -> None:
        """The replica has what the round gave it: remember it, if it is to be compared."""
        every = self._rule.check_every
        if every and self.count % every == 0:
            self._digests = self._digest(self._early) if self.last.weight else None

    def total(self, x: Array) -> None:
        """Sum `x` over all workers in place, inside of a step."""
        while True:
            try:
                self.waited_s += self.circle.all_reduce(x, x, "sum").waited_s
                return
            except PassedOver:
                self._enter_again()

    def _enter_again(self) -> None:
        assert self._elastic is not None
        self._events.write("passed over", rounds=self.count)
        self._enter_elastic(self._elastic)

    def _enter_elastic(self, circle: Shared) -> None:
        """Enter, also if the others go on again before this worker has their state."""
        while True:
            circle.roster.leave()
            try:
                if circle.enter():
                    self._take_parcel()
                return
            except (PassedOver, FileNotFoundError):  # the parcel was for another
                continue

    def _digest(self, which: Sequence[int]) -> Array:
        self._model.begin()
        return digests(self._rule.shared(self._model.array(i), self._holder.memory_of(i)) for i in which)

    def _compare(self, is_shadow: bool) -> None:
        """Raise Desynced unless all replicas are the same, but those whose training has come to its end."""
        nothing = np.zeros(0, np.int64)
        mine = np.concatenate([self._digest(self._late), nothing if self._digests is None else self._digests])
        told = nothing if is_shadow else mine
        try:
            found = self.circle.all_gather(np.concatenate([[self.circle.rank], told]))
        except PassedOver:
            return  # the round finds it too, and takes the others' state
        entries = [self._model.entries[i] for i in (*self._late, *self._early)]
        compare({int(one[0]): one[1:] for one in found}, entries, self.count)

    def _write_parcel(self, meeting: int) -> None:
        assert self._elastic is not None
        count = len(self._model.entries)
        memory = [value for i in range(count) if (value := self._holder.memory_of(i)) is not None]
        extra = {} if self._digests is None else {"digests": self._digests}
        plain = {
            "rounds": self.count,
            "nonfinite": sorted(self.contributions.in_a_row.items()),
            "position": self._holder.position(),
        }
        if write_parcel(self._elastic.parcel(meeting), self._model, memory, extra, plain):
            self._events.write("greeted", meeting=meeting)

    def _take_parcel(self) -> None:
        """Take the others' state; if nobody is left to give it, the center's."""
        assert self._elastic is not None
        path = self._elastic.await_parcel()
        if path is None:
            self._holder.pull_center()
            return
        extra, plain = take_parcel(path, self._model, self._holder.memory_of)
        self.count, self._digests = plain["rounds"], extra.get("digests")
        self._holder.continue_at(plain["position"], self.count)
        self.contributions.in_a_row = dict(plain["nonfinite"])
        self._events.write("entered", rounds=self.count)
