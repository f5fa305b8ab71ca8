"""Synchronous sharing: all workers exchange at the same step, in rounds of collective calls.

This is what both ways have in common, `synchronous_gradients` and `synchronous_values`. Workers may leave and join
between two rounds where the collectives are elastic: a worker that the others have passed over, or that was started
again, takes over their state and continues with them. Replicas that must be equal are compared by digests every few
rounds. The center stays: the first worker of each round copies the replica there from time to time, for snapshots,
`--resume`, validation and late workers.
"""

import functools
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from maniple.adapters import Adapter
from maniple.clock import clock
from maniple.collectives.call import PassedOver
from maniple.contracts import Array, Center, Collectives, ElasticMembership, Entry, ResidentVectors, Round, State
from maniple.errors import Desynced, Diverged, ManipleError, PeerLost
from maniple.layout import Layout
from maniple.pace import RateLimit
from maniple.replica.context import TrainingContext
from maniple.replica.nonfinite import Contributions
from maniple.replica.saved_state import load_newcomer_state, write_newcomer_state
from maniple.replica.sharing import Sharing

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

_PUBLISH_SHARE = 0.003  # of the time for copying the replica to the center: all workers wait for the one that does


class Synchronous(Sharing):
    """Rounds of all workers, and a center that follows them."""

    copies_center_state = True

    def __init__(self, center: Center | None, collectives: Collectives, *, wire: str) -> None:
        super().__init__(center)
        self._collectives, self._elastic, self._wire = collectives, collectives.elastic, wire
        self._publish_pace = RateLimit(_PUBLISH_SHARE)
        self._last = Round(())  # the outcome of the last round; without ranks before the first of this process
        self._digests: Array | None = None  # of `_after_round`, as the last compared round has left them

    def _open_vectors(self) -> tuple[Layout, ResidentVectors]:
        """The vectors that are reduced in each round, and their layout."""
        raise NotImplementedError

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        super().attach(replica, model, context)
        rule, count = self._rule, model.parameter_count
        layout, self._resident = self._open_vectors()
        self._contributions = Contributions(rule, layout, rank=self._collectives.rank, events=context.events)
        # With gradients, parameters are equal until the next step and compared before a round. Buffers change with
        # each forward pass, so those that were averaged are compared as they are after the round; so are values.
        if rule.averages_gradients:
            self._before_round, self._after_round = list(range(count)), model.averaged_buffers(rule.norm)
        else:
            has_buffers = rule.norm != "local"
            self._before_round = list[int]()
            self._after_round = [
                i for i in range(len(model.entries)) if i < count or (has_buffers and model.is_buffer(i))
            ]
        if rule.check_every:
            # Reserved now: /dev/shm may be full by the time of the first comparison.
            self._collectives.reserve(8 * (1 + len(self._before_round) + len(self._after_round)))
        self._attach_shared()  # hooks come last: nothing removes them if one of the above fails
        if rule.norm == "synchronised":
            self._unhook.append(model.synchronise_norm(self._sum))

    @property
    def members(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ranks in the last round; unknown with a quorum, where late workers have another last round."""
        return None if self._rule.quorum or not self.rounds else self._last.ranks

    @property
    def _is_first(self) -> bool:
        """This worker has the lowest rank of the last round, and acts for all where one is enough."""
        return not self._last.ranks or self._collectives.rank == min(self._last.ranks)

    def begin(self) -> None:
        """Join the rounds with the center's values, those of the first worker, or the state of current members."""
        self._pull_center()
        if self._elastic is not None:
            self._enter(self._elastic)
            return
        self._model.begin()
        for i in range(len(self._model.entries)):
            value = self._model.array(i)
            self._collectives.broadcast(value, root=self._collectives.ranks[0])
            if self._state is not None:
                for name in self._rule.center_vectors:
                    self._collectives.broadcast(self._state.entries[i][name], root=self._collectives.ranks[0])
                self._rule.remember(value, self._state.entries[i])
            self._model.commit(i)

    # Rounds

    def _prepare_round(self, *, is_shadow: bool = False) -> None:
        """Before a round: write the state for newcomers, and compare the replicas if that is due."""
        if self._elastic is not None:
            self._elastic.provide_state()
        every = self._rule.check_every
        if every and self.rounds and self.rounds % every == 0:
            self._compare(is_shadow)

    def _all_reduce(self, weight: float) -> None:
        """Average the vectors of all workers.

        If the others have continued without this worker, it takes over their state and contributes nothing.
        """
        quorum = {"quorum": self._rule.quorum} if self._rule.quorum else {}
        while True:
            try:
                self._last = self._resident.all_reduce("mean", weight=weight, **quorum)
                break
            except PassedOver:
                self._enter_again()
                self._contribute_nothing()
                weight = 0.0
        self.rounds += 1
        self.waited_s += self._last.waited_s

    def _contribute_nothing(self) -> None:
        """Make the collective calls that precede a round, and contribute zeros to it."""
        self._prepare_round(is_shadow=True)
        for vector in self._resident.flat.values():
            vector[:] = 0

    def _complete_round(self) -> None:
        """After the replica has the round's result: store its digests, if they are to be compared."""
        every = self._rule.check_every
        if every and self.rounds % every == 0:
            self._digests = self._digest(self._after_round) if self._last.weight else None

    def _sum(self, x: Array) -> None:
        """Sum `x` over all workers in place, inside of a step."""
        while not self._is_finished:
            try:
                self.waited_s += self._collectives.all_reduce(x, x, "sum").waited_s
                return
            except PassedOver:
                self._enter_again()

    def _end_diverged(self, error: Diverged) -> NoReturn:
        """End as all workers do in this round. The replicas are finite, so the center gets them."""
        if self._is_first:
            with suppress(ManipleError):
                self.publish()
        raise error

    def _digest(self, which: Sequence[int]) -> Array:
        self._model.begin()
        values = (self._rule.shared(self._model.array(i), self._state_of(i)) for i in which)
        return np.array([zlib.crc32(value.view(np.uint8).data) for value in values], np.int64)

    def _state_of(self, i: int) -> State:
        """What the rule keeps of entry i."""
        return {} if self._state is None else self._state.entries[i]

    def _compare(self, is_shadow: bool) -> None:
        """Raise Desynced unless all replicas are equal. A worker that has finished training (a shadow) sends none."""
        nothing = np.zeros(0, np.int64)
        mine = np.concatenate([self._digest(self._before_round), nothing if self._digests is None else self._digests])
        try:
            sent = np.concatenate([[self._collectives.rank], nothing if is_shadow else mine])
            found = self._collectives.all_gather(sent)
        except PassedOver:
            return  # the round finds it too, and takes over the others' state
        entries = [self._model.entries[i] for i in (*self._before_round, *self._after_round)]
        _compare_digests({int(one[0]): one[1:] for one in found if len(one) > 1}, entries, self.rounds)

    # Membership

    def rest(self) -> None:
        """Take no part until the next round; other collectives than elastic ones need all workers in every round."""
        if self._elastic is not None:
            self._elastic.leave()

    def _enter_again(self) -> None:
        assert self._elastic is not None
        self._context.events.write("passed over", rounds=self.rounds)
        self._enter(self._elastic)

    def _enter(self, elastic: ElasticMembership) -> None:
        while True:  # until this worker has the others' state before they continue without it again
            elastic.leave()
            try:
                if elastic.join(self._write_state):
                    self._load_state(elastic)
                return
            except (PassedOver, FileNotFoundError):  # the file was for another newcomer, and is removed
                continue

    def _write_state(self, path: Path, meeting: int) -> None:
        first = (self._context.replicas or [self.replica])[0]  # whose steps the samplers count
        extra = {} if self._digests is None else {"digests": self._digests}
        plain = {
            "rounds": self.rounds,
            "nonfinite": sorted(self._contributions.in_a_row.items()),
            "position": self._context.samples.position(first),
        }
        if write_newcomer_state(path, self._model, self._state, extra, plain):
            self._context.events.write("greeted", meeting=meeting)

    def _load_state(self, elastic: ElasticMembership) -> None:
        """Take over the others' state; the center's, if no worker is left to give it."""
        path = elastic.await_state()
        if path is None:
            self._pull_center()
            return
        extra, plain = load_newcomer_state(path, self._model, self._state)
        self.rounds, self._digests = plain["rounds"], extra.get("digests")
        self._context.samples.continue_at(plain["position"], self.rounds)
        self._contributions.in_a_row = dict(plain["nonfinite"])
        self._context.events.write("entered", rounds=self.rounds)

    # The center

    def publish(self) -> None:
        """Set the center to the shared parameters."""
        if self._center is None or self._context.host.is_over:
            return
        begin = clock.monotonic()
        with self._shown():
            push = functools.partial(self._center.push, state_copy=self._center_copy)
            outcome, _ = self.replica.timed("keep", push, self._model)
        if not outcome.refused and self.replica.is_primary and self._is_complete(len(self._last.ranks)):
            self._context.samples.write_position(self.replica, is_common=True)
        self._refusals.check(outcome, "the workers, whose replicas change together,")
        self._publish_pace.exchanged(clock.monotonic() - begin, self._layout.size_bytes)

    def push(self) -> None:
        """Bring the center up to date with the last round. `pull` has nothing to do: each round updates the replica."""
        self.publish()

    def publish_validated(self) -> bool:
        """Bring the center up to date: it may be behind what `center()` shows, which all workers have."""
        self.publish()
        return self._center is not None

    def _is_complete(self, workers: int) -> bool:
        """All workers were in the last round, except those that were given up, which have no samples left.

        A round that some have missed says nothing about their samples, which a resumed run must not leave out.
        """
        return workers >= self._context.environment.world or workers >= self._context.samples.remaining

    def _shown(self) -> AbstractContextManager[None]:
        """Let the model hold the shared parameters, which some rules keep apart from the replica."""
        return nullcontext()

    @contextmanager
    def center(self) -> Generator[None]:
        """Let the model hold the result of the last round, which each worker has.

        The center in shared memory may be behind, since only the first worker brings it up to date.
        """
        self.replica.is_center = True
        try:
            with self._shown():
                yield
        finally:
            self.replica.is_exchanging = self.replica.is_center = False

    # The end

    def finish(self, *, exchange: bool, timeout_s: float) -> None:
        """Leave the rounds; the other workers continue. The center gets what this worker knows."""
        super().finish(exchange=exchange, timeout_s=timeout_s)
        self._collectives.close()

    def _finish(self, timeout_s: float) -> None:
        del timeout_s  # rounds have their own deadline
        try:
            if not self._finish_rounds():
                return
            is_newest = self._shadow() if self._elastic is None else self._elastic.is_current
        except (SystemExit, PeerLost):
            # The grace period of a signal has ended before a round did. Elastic members continue without this worker;
            # other ones cannot, so nobody else updates the center.
            if not self._context.is_signalled:
                raise
            is_newest = self._elastic is None
        if is_newest and self._publishes_last:  # else other workers know more, and update the center
            self.publish()

    @property
    def _publishes_last(self) -> bool:
        """This worker may publish when it leaves: what the center shows is the same in all workers."""
        return True

    def _finish_rounds(self) -> bool:
        """Share the last steps; False if that is impossible now."""
        return True

    def _shadow(self) -> bool:
        """Contribute zeros to the others' rounds until all workers have finished, since these collectives need all.

        True if no other worker has learned more since.
        """
        is_newest = True
        while not self._are_rounds_over:
            self._contribute_nothing()
            self._all_reduce(0.0)
            if (error := self._contributions.check_round(self._last, self.replica.steps)) is not None:
                raise error
            if self._last.weight == 0 and not self._last.nonfinite:
                return is_newest
            is_newest = self._follow_round()
        return is_newest

    @property
    def _are_rounds_over(self) -> bool:
        """The others make no more rounds."""
        return False

    def _follow_round(self) -> bool:
        """Take over the result of a round of others; False if it cannot be known here."""
        return False


def _compare_digests(found: Mapping[int, Array], entries: Sequence[Entry], rounds: int) -> None:
    """Raise Desynced, naming the first parameter that differs and its workers, unless all digests are equal."""
    for i in range(min((len(one) for one in found.values()), default=0)):
        values = [int(one[i]) for one in found.values()]
        usual = max(set(values), key=values.count)
        others = [str(rank) for rank, one in found.items() if int(one[i]) != usual]
        if others:
            raise Desynced(
                f"after {rounds} rounds the replicas are no longer equal: {entries[i].name!r} of worker "
                f"{', '.join(others)} differs from that of the others ({len(found)} workers). Look for what a worker "
                "does by itself: a learning rate, a clipping or a change of parameters that depends on its rank or its "
                "own data."
            )
