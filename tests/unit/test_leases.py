"""Leases: each sample of each epoch is done once if nobody dies, at least once otherwise, and none is ever lost."""

import contextlib
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maniple.errors import HostAway, InvalidArgument, WaitedTooLong
from maniple.memory.segment import DEAD, LEFT, LIVE
from maniple.sampler import Lease, LeaseTable, LeaseTerms, Sampler
from maniple.sampler.leases import MAX_LEASES, LeaseSnapshot, NoLease
from maniple.sampler.remote_leases import LEASE, LOOK, LeaseTables, RemoteLender
from tests.unit.leasing import Run, Sample, Tenant, drawn_at_once, samples_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, LeaseTerms(count=10, lease_size=3, shuffle=True))  # chunks 0 to 3, the last of 1 sample
    yield run
    run.close()


def samples(*epochs: int) -> list[Sample]:
    return [(epoch, environment) for epoch in epochs for environment in range(10)]


class Leasing(RuleBasedStateMachine):
    """Any schedule of taking, drawing, doing, giving back, dying, coming again and restoring."""

    EPOCHS, RANKS, LIMIT = 3, 4, 0
    ranks = st.integers(0, RANKS - 1)
    picks = st.integers(0, 99)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.run = Run(Path(self.folder.name), LeaseTerms(count=10, lease_size=3, shuffle=True))
        self.live: dict[int, Tenant] = {}
        self.held: dict[int, dict[int, Lease]] = {}
        self.drawn: dict[int, set[int]] = {}
        self.epoch: dict[int, int] = {}
        self.rest: dict[int, int] = {}  # of the limit, in this pass
        self.begun = 0  # passes, by the furthest
        self.done: Counter[Sample] = Counter()
        self.trained: Counter[Sample] = Counter()
        self.has_loss = False
        self.snapshot = (self.run.table().snapshot(), Counter[Sample]())

    def come(self, rank: int) -> None:
        self.live[rank] = tenant = self.run.join(rank)
        self.held[rank], self.drawn[rank], self.rest[rank] = {}, set(), self.LIMIT
        self.epoch[rank] = tenant.first_epoch(self.LIMIT) if self.LIMIT else 0

    def go(self, rank: int, state: int) -> None:
        self.run.segment.mark(rank, state)
        self.has_loss |= bool(self.held[rank])
        for book in (self.live, self.held, self.drawn, self.epoch, self.rest):
            del book[rank]

    @rule(rank=ranks)
    def take(self, rank: int) -> None:
        if rank not in self.live:
            self.come(rank)
        epoch = self.epoch[rank]
        if epoch == self.EPOCHS:
            return
        self.begun = max(self.begun, epoch + 1)
        answer = self.live[rank].take(epoch, most=self.rest[rank])
        if isinstance(answer, Lease):
            self.held[rank][answer.slot] = answer
            self.trained.update(samples_of(answer))
            if self.LIMIT:
                self.rest[rank] -= answer.samples
                assert self.rest[rank] >= 0, "a pass has more samples than its limit"
                if not self.rest[rank]:
                    self.begin_next(rank)
            return
        epochs = range(self.begun) if self.LIMIT else [epoch]
        open_ = {one: (who, slot) for who, held in self.held.items() for slot in held for one in samples_of(held[slot])}
        left = [one for one in samples(*epochs) if not self.done[one]]
        assert all(one in open_ for one in left), "a pass ends while some of its samples are free"
        others = [(who, slot) for who, slot in map(open_.__getitem__, left) if who != rank]
        is_drawing = any(slot not in self.drawn[who] for who, slot in others)
        assert answer is (NoLease.WAIT if is_drawing else NoLease.END)
        if answer is NoLease.END:
            self.begin_next(rank)

    def begin_next(self, rank: int) -> None:
        last = self.EPOCHS if self.LIMIT else self.EPOCHS - 1
        self.epoch[rank], self.rest[rank] = min(self.epoch[rank] + 1, last), self.LIMIT

    @rule(rank=ranks, pick=picks, how=st.sampled_from(["drawn", "done", "back"]))
    def tell(self, rank: int, pick: int, how: str) -> None:
        if held := self.held.get(rank):
            slot = sorted(held)[pick % len(held)]
            if how == "back" and self.LIMIT:  # who gives back samples of an earlier pass makes no other for them
                if self.rest[rank] + held[slot].samples > self.LIMIT or self.epoch[rank] == self.EPOCHS:
                    return
                self.rest[rank] += held[slot].samples
            self.live[rank].take(-1, **{how: [slot]})
            if how == "drawn":
                self.drawn[rank].add(slot)
                return
            lease = held.pop(slot)
            self.drawn[rank].discard(slot)
            if how == "done":
                self.done.update(samples_of(lease))
            self.has_loss |= how == "back"

    @rule(rank=ranks, state=st.sampled_from([LEFT, DEAD]))
    def end(self, rank: int, state: int) -> None:
        if rank in self.live:
            self.go(rank, state)

    @rule(rank=ranks)
    def return_under_the_old_name(self, rank: int) -> None:
        """It was only silent for a while, and nobody has taken its leases yet."""
        if rank in self.live:
            self.run.segment.mark(rank, DEAD)
            self.run.segment.mark(rank, LIVE)

    @rule()
    def save(self) -> None:
        self.snapshot = (self.run.table().snapshot(), Counter(self.done))

    @precondition(lambda self: self.live)
    @rule()
    def restore(self) -> None:
        for rank in list(self.live):
            self.go(rank, DEAD)
        self.run.resume(self.snapshot[0])
        self.done, self.begun = Counter(self.snapshot[1]), 0
        self.has_loss = True

    @invariant()
    def no_sample_is_with_two_live_workers(self) -> None:
        held = [one for held in self.held.values() for lease in held.values() for one in samples_of(lease)]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        for rank, tenant in self.live.items():
            for lease in self.held[rank].values():
                self.done.update(samples_of(lease))
            tenant.take(-1, done=list(self.held[rank]))
            self.held[rank] = {}
        self.finish()
        assert self.done == Counter(samples(*range(self.EPOCHS))), "a sample is lost, or was done twice"
        assert self.has_loss or self.trained == self.done
        self.run.close()
        self.folder.cleanup()

    def finish(self) -> None:
        """One more worker takes all that is left."""
        last = self.run.join(self.RANKS)
        for epoch in range(self.EPOCHS):
            rest = last.finish(epoch)
            self.done.update(rest)
            self.trained.update(rest)


class LimitedLeasing(Leasing):
    """The same where no pass has more than a worker's share: if all make their passes, nothing is left."""

    LIMIT = 3  # of 10 samples, by 4 workers

    def finish(self) -> None:
        """All make the rest of their passes, also those who have died and come again."""
        for rank in range(self.RANKS):
            if rank not in self.live:
                self.come(rank)
            for epoch in range(self.epoch[rank], self.EPOCHS):
                rest = self.live[rank].finish(epoch, self.rest[rank])
                self.done.update(rest)
                self.trained.update(rest)
                self.begin_next(rank)


Leasing.TestCase.settings = LimitedLeasing.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestAnySchedule = Leasing.TestCase
TestAnyScheduleOfLimitedPasses = LimitedLeasing.TestCase


def test_worker_alone_gets_every_sample_of_every_epoch_in_order(run):
    tenant = run.join(0)
    assert [tenant.finish(epoch) for epoch in range(3)] == [samples(0), samples(1), samples(2)]


def test_lease_of_a_dead_worker_goes_to_the_next_who_asks(run):
    first, second = run.join(0), run.join(1)
    lost = first.take(0)
    assert isinstance(second.take(0), Lease)
    run.segment.mark(0, DEAD)
    again = second.take(0)
    assert again == lost


def test_successor_of_the_same_rank_gets_what_its_predecessor_left(run):
    lost = run.join(0).take(0)
    assert run.join(0).take(0) == lost


def test_a_message_of_a_worker_thought_dead_about_a_lease_that_another_has_is_ignored(run):
    first, second = run.join(0), run.join(1)
    slot = first.take(0).slot
    run.segment.mark(0, DEAD)
    assert second.take(0).slot == slot
    run.segment.mark(0, LIVE)
    first.take(-1, done=[slot])
    run.segment.mark(1, DEAD)
    assert first.take(0).slot == slot


def test_last_chunks_are_waited_for_only_while_they_are_being_drawn(run):
    first, second = run.join(0), run.join(1)
    slot = first.take(0).slot
    assert len(second.finish(0)) == 7
    assert second.take(0) is NoLease.WAIT
    first.take(-1, drawn=[slot])
    assert second.take(0) is NoLease.END
    run.segment.mark(0, DEAD)
    assert second.take(1) == Lease(slot, 0, 0, 3), "what was drawn and not done is left behind in a later pass"


def test_answer_that_was_lost_is_given_again(run):
    tenant = run.join(0)
    first = tenant.take(0, held=[])
    assert tenant.take(0, held=[]) == first
    second = tenant.take(0, held=[first.slot])
    assert second.start == 3


def test_table_with_other_terms_is_refused_and_the_first_chunk_size_holds(run):
    run.table()
    for other in (LeaseTerms(11, 3, True), LeaseTerms(10, 3, False)):
        with pytest.raises(InvalidArgument, match="All workers must call"):
            LeaseTable.open(run.segment, 0, other)
    assert LeaseTable.open(run.segment, 0, LeaseTerms(10, 5, True)).terms.lease_size == 3


def test_snapshot_keeps_what_is_not_done(run):
    tenant = run.join(0)
    done, held = tenant.take(0), tenant.take(0)
    tenant.take(-1, done=[done.slot], drawn=[held.slot])
    saved = tenant.table.snapshot()
    assert saved.leased == [(0, 3, 6)]
    assert saved.samples == 3
    run.resume(saved)
    again = run.join(0)
    assert again.finish(0) == samples(0)[3:]
    assert again.table.snapshot().samples == 0


def test_epoch_that_was_closed_for_new_ones_brings_nothing_more(run):
    hasty, slow = run.join(0), run.join(1)
    kept = slow.take(0)
    for epoch in range(20):
        hasty.take(-1, drawn=[hasty.take(epoch).slot])
    assert slow.take(0, drawn=[kept.slot]) is NoLease.END
    assert slow.take(19).epoch == 19


def test_full_table_asks_for_leases_back(tmp_path):
    run = Run(tmp_path, LeaseTerms(MAX_LEASES + 1, 1, False))
    tenant = run.join(0)
    for _ in range(MAX_LEASES):
        tenant.take(0)
    assert tenant.take(0) is NoLease.FULL
    assert isinstance(tenant.take(0, done=[7]), Lease)
    run.close()


def test_passes_left_early_do_not_fill_the_table(run):
    tenant = run.join(0)
    back: list[int] = []
    for epoch in range(MAX_LEASES + 3):
        lease = tenant.take(epoch, back=back)
        assert (lease.epoch, lease.start) == (epoch, 0)
        back = [lease.slot]


class Killed(BaseException):
    """kill -9: nothing more is written, and the kernel gives the lock back."""


class Mortal:
    """A column of a table whose holder is killed before it writes one more than `writes[0]` words to all of them."""

    def __init__(self, column: Any, writes: list[int]) -> None:
        self.column, self.writes = column, writes

    def __getitem__(self, index: Any) -> Any:
        return self.column[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.writes[0] == 0:
            raise Killed
        self.writes[0] -= 1
        self.column[index] = value

    def __iter__(self) -> Any:
        return iter(self.column)

    def tolist(self) -> list[int]:
        return self.column.tolist()


@pytest.mark.parametrize("scene", ["first of an epoch", "next", "left behind", "back", "last epoch closed", "split"])
@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("writes", range(13))
def test_kill_at_any_word_of_a_take_loses_nothing(run, scene, most, writes):
    victim, witness = run.join(0), run.join(1)
    done: list[Sample] = []
    news: dict[str, list[int]] = {}
    epoch, first = 0, 0
    if scene != "first of an epoch":
        one, two = victim.take(0), victim.take(0)
        done += samples_of(one)  # it counts as done whether the table hears of it or not
        news = {"done": [one.slot], "drawn": [two.slot]}
    if scene in {"left behind", "split"}:
        run.join(2).take(0)
        run.segment.mark(2, DEAD)
    if scene == "back":
        news["back"] = [victim.take(0).slot]
    if scene == "last epoch closed":
        done += samples(*range(16))
        for number in range(16):
            witness.finish(number)
        epoch = first = 16
        run.segment.mark(0, DEAD)
        done += witness.finish(15)
        victim = run.join(0)
        news = {}
    columns, left = vars(victim.table._fields), [writes]
    for name in set(columns) - {"owners"}:  # which is only read
        columns[name] = Mortal(columns[name], left)
    with contextlib.suppress(Killed):
        victim.take(epoch, most=most, **news)
    run.segment.mark(0, DEAD)
    rest = Counter([*done, *witness.finish(first), *witness.finish(first + 1)])
    wanted = set(samples(first, first + 1))
    assert wanted <= set(rest), f"lost: {wanted - set(rest)}"
    again = sum(rest[one] - 1 for one in wanted)
    assert again <= 2 * 3, "only what the victim held may be done twice"


class Host:
    """What a host grants to workers elsewhere, without the network."""

    def __init__(self, run: Run) -> None:
        self.run, self.tables = run, LeaseTables(run.segment)
        self.is_away = False
        self.answers_lost = 0
        self.may_fail = threading.Event()  # until then, a question to a host that is away goes unanswered
        self.may_fail.set()

    def lender(self, rank: int, terms: LeaseTerms | None = None) -> RemoteLender:
        holder = self.run.join(rank).holder

        def ask(request: str, info: dict[str, Any], *, timeout_s: float) -> Any:
            if self.is_away:
                assert self.may_fail.wait(60)
                raise HostAway("away")
            answer = self.tables.grant(request, info, holder)
            if request == LEASE and self.answers_lost:
                self.answers_lost -= 1
                raise WaitedTooLong("the answer was lost")
            return answer

        return RemoteLender(ask, 0, terms or self.run.terms, on_away=lambda: None)


def trained(lender: RemoteLender, epoch: int) -> list[int]:
    """The samples of one pass, each done when the next lease is asked for, but those that nobody has lent."""
    found, done = [], []
    while isinstance(lease := lender.take(epoch, done=done), Lease):
        done = [lease.slot]
        found += range(lease.start, lease.stop) if lease.slot >= 0 else []
    return found


def test_remote_worker_gets_the_chunk_size_and_is_refused_with_other_data(run):
    host = Host(run)
    assert host.lender(0).terms.lease_size == 3
    assert host.lender(1, LeaseTerms(10, 5, True)).terms.lease_size == 3
    with pytest.raises(InvalidArgument, match="All workers must call"):
        host.lender(2, LeaseTerms(11, 3, True))


def test_lease_whose_answer_was_lost_is_not_lost(run):
    host = Host(run)
    lender = host.lender(0)
    host.answers_lost = 2
    assert trained(lender, 0) == list(range(10))
    lender.take(-1)
    assert run.table().snapshot().samples == 0


def test_lease_requested_ahead_is_returned_when_its_pass_is_left_or_the_script_ends(run):
    host = Host(run)
    lender, other = host.lender(0), run.join(1)
    first = lender.take(0)
    second = lender.take(1, back=[first.slot])
    assert second == Lease(second.slot, 1, 0, 3)
    lender.take(-1, back=[second.slot])
    assert sorted(other.finish(0) + other.finish(1)) == samples(0, 1)


def test_worker_elsewhere_trains_on_without_waiting_while_its_host_is_away(run):
    host = Host(run)
    lender = host.lender(0)
    first = lender.take(0)  # one more is on its way
    host.is_away = True
    while lender.take(0).slot >= 0:
        pass
    host.may_fail.clear()  # from here on each question takes its time
    assert {lender.take(0, done=[first.slot]).slot for _ in range(100)} == {-1}
    host.is_away = False
    host.may_fail.set()
    lender.take(-1)
    run.segment.mark(0, DEAD)
    assert sorted(run.join(1).finish(0)) == samples(0)[3:], "what was reported done while the host was away is done"


def test_messages_about_leases_from_before_a_restored_snapshot_are_ignored(run, monkeypatch):
    dice = iter([0, 1000])
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(dice))
    host = Host(run)
    lender = host.lender(0)
    old = [lender.take(0).slot, lender.take(0).slot]
    lender._ahead[1].result()
    run.resume(run.table().snapshot())
    host.tables = LeaseTables(run.segment)
    run.segment.renew(0)
    run.segment.mark(0, LIVE)  # it comes back under its old name
    old.append(lender.take(0).slot)  # the one that was asked for ahead
    assert lender.take(0).start == 0
    lender.take(-1, done=old)
    run.segment.mark(0, DEAD)
    assert sorted(run.join(1).finish(0)) == samples(0), "nothing counts as done for what was done before"


@pytest.mark.parametrize("seed", range(3))
def test_workers_elsewhere_are_granted_each_chunk_once_at_the_same_time(tmp_path, seed):
    run = Run(tmp_path, LeaseTerms(2000, 1, True))
    host = Host(run)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [Sampler(2000, lender=host.lender(rank), world=4, seed=(seed,)) for rank in range(4)]
        drawn = drawn_at_once(workers, 1, 0)
    finally:
        sys.setswitchinterval(before)
    assert sum(drawn, Counter()) == Counter(range(2000))
    run.close()


def test_a_worker_of_a_resumed_run_begins_with_the_first_epoch_that_has_samples_left(run):
    first = run.join(0)
    assert first.first_epoch(0) == 0
    first.finish(0)
    first.finish(1)
    lease = first.take(2)
    assert run.join(1).first_epoch(0) == 2, "three samples of it are handed out, and not done"
    run.resume(run.table().snapshot())
    second = run.join(0)
    assert second.first_epoch(0) == second.first_epoch(5) == 2
    assert second.finish(2)[0] == (2, lease.start)
    assert run.join(1).first_epoch(0) == 3


# Passes of at most one share


def test_fast_worker_is_passes_ahead_and_never_takes_the_share_of_a_slow_one(run):
    fast = run.join(0)
    taken = [fast.finish(epoch, 5) for epoch in range(3)]
    assert [len(one) for one in taken] == [5, 5, 5]
    slow = run.join(1)  # it was slow to start
    assert slow.first_epoch(5) == 0
    taken += [slow.finish(epoch, 5) for epoch in range(3)]
    assert [one for part in taken for one in part] == samples(0, 1, 2), "epoch after epoch, whoever takes it"
    assert run.table().snapshot().missed == 0


def test_rest_of_a_worker_that_dies_is_taken_first_and_what_nobody_takes_is_counted(run):
    dead, other = run.join(0), run.join(1)
    lost = dead.take(0, most=5)
    assert other.finish(0, 5) == samples(0)[3:8]
    run.segment.mark(0, DEAD)
    assert other.finish(1, 5) == samples_of(lost) + samples(0)[8:]
    assert other.finish(2, 5) == samples(1)[:5]
    left = run.table().snapshot()
    assert (left.missed, left.samples, left.progress) == (15, 0, (1, 5))


def test_successor_begins_in_the_pass_to_which_its_rank_has_come(run):
    first, other = run.join(0), run.join(1)
    for epoch in range(2):
        first.finish(epoch, 5)
    other.finish(0, 5)
    first.take(2, most=5)  # 3 samples of its third pass, of which the center has nothing
    run.segment.mark(0, DEAD)
    again = run.join(0)
    assert again.first_epoch(5) == 2
    assert run.join(2).first_epoch(5) == 1, "another begins in the first epoch that has samples left"
    assert len(again.finish(2, 5)) == len(other.finish(1, 5)) == len(other.finish(2, 5)) == 5
    assert run.table().snapshot().progress == (3, 0)


def test_lease_left_behind_that_is_larger_than_the_rest_of_a_pass_is_cut(run):
    lost = run.join(0).take(0, most=5)
    run.segment.mark(0, DEAD)
    other = run.join(1)
    assert other.take(0, most=1) == Lease(lost.slot, 0, 0, 1)
    rest = other.take(0, most=4)
    assert (rest.start, rest.stop) == (1, 3)


def test_passes_that_begin_at_a_later_epoch_take_that_one(run):
    assert run.join(0).finish(7, 5) == samples(7)[:5]
    assert run.join(1).first_epoch(5) == 7


def test_worker_that_comes_late_makes_the_passes_of_the_others_shorter(run):
    first, second, late = (run.join(rank) for rank in range(3))
    assert len(first.finish(0, 5) + second.finish(0, 5)) == 10
    late.finish(1, 4)
    assert len(first.finish(1, 5)) == 5
    assert len(second.finish(1, 5)) == 1, "so that no epoch is made that nobody has asked for"


def test_snapshot_from_before_leases_were_ranges_is_read():
    old = {"terms": {"count": 10, "chunk": 3, "shuffle": True}, "cursors": [[0, 4], [1, 2]], "leases": [[0, 3], [1, 0]]}
    saved = msgspec.convert(old, LeaseSnapshot)
    assert saved == LeaseSnapshot(LeaseTerms(10, 3, True), [(0, 10), (1, 6)], [(0, 9, 10), (1, 0, 3)])
    assert msgspec.json.decode(msgspec.json.encode(saved), type=LeaseSnapshot) == saved


def test_worker_elsewhere_asks_for_no_more_than_its_pass_may_have(run):
    host = Host(run)
    lender, other = host.lender(0), run.join(1)
    first = lender.take(0, most=4)
    second = lender.take(0, most=1)
    assert (first.samples, second.samples, lender._ahead) == (3, 1, None)
    lender.take(-1, done=[first.slot, second.slot])
    assert sorted(other.finish(0)) == samples(0)[4:]
    assert lender.first_epoch(4) == 1
    host.is_away = True
    assert lender.take(1, most=2).samples == 2


def test_worker_elsewhere_hears_that_scripts_of_its_run_look_at_a_batch(run):
    host, holder = Host(run), run.join(0).holder
    for has_looked, expected in ((False, False), (True, True), (False, True)):
        assert host.tables.grant(LOOK, {"has_looked": has_looked}, holder) is expected
    assert host.tables.grant(LOOK, [], holder) is True
