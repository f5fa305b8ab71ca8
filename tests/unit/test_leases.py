"""Leases: each chunk of each epoch is done once if nobody dies, at least once otherwise, and none is ever lost."""

import contextlib
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maniple.center.segment import DEAD, LEFT, LIVE
from maniple.errors import HostAway, InvalidArgument, WaitedTooLong
from maniple.sampler import Lease, Sampler, Table, Terms
from maniple.sampler.lease import Verdict
from maniple.sampler.remote import LEASE, Borrower, Tables
from maniple.sampler.table import MOST_LEASES
from tests.unit.leasing import Chunk, Run, Tenant, drawn_at_once


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, Terms(count=10, chunk=3, shuffle=True))  # chunks 0 to 3, the last of 1 sample
    yield run
    run.close()


def chunks(*epochs: int) -> list[Chunk]:
    return [(epoch, chunk) for epoch in epochs for chunk in range(4)]


class Leasing(RuleBasedStateMachine):
    """Any schedule of taking, drawing, doing, giving back, dying, coming again and restoring."""

    EPOCHS, RANKS = 3, 4
    ranks = st.integers(0, RANKS - 1)
    picks = st.integers(0, 99)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.run = Run(Path(self.folder.name), Terms(count=10, chunk=3, shuffle=True))
        self.live: dict[int, Tenant] = {}
        self.held: dict[int, dict[int, Chunk]] = {}
        self.drawn: dict[int, set[int]] = {}
        self.epoch: dict[int, int] = {}
        self.done: Counter[Chunk] = Counter()
        self.trained: Counter[Chunk] = Counter()
        self.has_loss = False
        self.snapshot = (self.run.table().unfinished(), Counter[Chunk]())

    def come(self, rank: int) -> None:
        self.live[rank] = self.run.join(rank)
        self.held[rank], self.drawn[rank], self.epoch[rank] = {}, set(), 0

    def go(self, rank: int, state: int) -> None:
        self.run.segment.mark(rank, state)
        self.has_loss |= bool(self.held[rank])
        for book in (self.live, self.held, self.drawn, self.epoch):
            del book[rank]

    @rule(rank=ranks)
    def take(self, rank: int) -> None:
        if rank not in self.live:
            self.come(rank)
        epoch = self.epoch[rank]
        answer = self.live[rank].take(epoch)
        if isinstance(answer, Lease):
            self.held[rank][answer.slot] = (answer.epoch, answer.chunk)
            self.trained[answer.epoch, answer.chunk] += 1
            return
        open_ = {chunk: (who, slot) for who, held in self.held.items() for slot, chunk in held.items()}
        left = [chunk for chunk in chunks(epoch) if not self.done[chunk]]
        assert all(chunk in open_ for chunk in left), "a pass ends while some of its chunks are free"
        others = [(who, slot) for who, slot in map(open_.get, left) if who != rank]  # type: ignore[misc]
        is_drawing = any(slot not in self.drawn[who] for who, slot in others)
        assert answer is (Verdict.WAIT if is_drawing else Verdict.END)
        if answer is Verdict.END:
            self.epoch[rank] = min(epoch + 1, self.EPOCHS - 1)

    @rule(rank=ranks, pick=picks, how=st.sampled_from(["drawn", "done", "back"]))
    def tell(self, rank: int, pick: int, how: str) -> None:
        if held := self.held.get(rank):
            slot = sorted(held)[pick % len(held)]
            self.live[rank].take(-1, **{how: [slot]})
            if how == "drawn":
                self.drawn[rank].add(slot)
                return
            chunk = held.pop(slot)
            self.drawn[rank].discard(slot)
            self.done[chunk] += how == "done"
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
        self.snapshot = (self.run.table().unfinished(), Counter(self.done))

    @precondition(lambda self: self.live)
    @rule()
    def restore(self) -> None:
        for rank in list(self.live):
            self.go(rank, DEAD)
        self.run.resume(self.snapshot[0])
        self.done = Counter(self.snapshot[1])
        self.has_loss = True

    @invariant()
    def no_chunk_is_with_two_live_workers(self) -> None:
        held = [chunk for held in self.held.values() for chunk in held.values()]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        for held in self.held.values():
            self.done.update(held.values())
        for rank, tenant in self.live.items():
            tenant.take(-1, done=list(self.held[rank]))
        last = self.run.join(self.RANKS)
        for epoch in range(self.EPOCHS):
            rest = last.finish(epoch)
            self.done.update(rest)
            self.trained.update(rest)
        assert self.done == Counter(chunks(*range(self.EPOCHS))), "a chunk is lost, or was done twice"
        assert self.has_loss or self.trained == self.done
        self.run.close()
        self.folder.cleanup()


Leasing.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestAnySchedule = Leasing.TestCase


def test_worker_alone_gets_every_chunk_of_every_epoch_in_order(run):
    tenant = run.join(0)
    assert [tenant.finish(epoch) for epoch in range(3)] == [chunks(0), chunks(1), chunks(2)]


def test_lease_of_a_dead_worker_goes_to_the_next_who_asks(run):
    first, second = run.join(0), run.join(1)
    lost = first.take(0)
    assert isinstance(second.take(0), Lease)
    run.segment.mark(0, DEAD)
    again = second.take(0)
    assert (again.epoch, again.chunk) == (lost.epoch, lost.chunk)


def test_successor_of_the_same_rank_gets_what_its_predecessor_left(run):
    lost = run.join(0).take(0)
    assert run.join(0).take(0) == lost


def test_what_one_thought_dead_says_of_a_lease_that_another_has_now_is_not_heard(run):
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
    assert len(second.finish(0)) == 3
    assert second.take(0) is Verdict.WAIT
    first.take(-1, drawn=[slot])
    assert second.take(0) is Verdict.END
    run.segment.mark(0, DEAD)
    assert second.take(1) == Lease(slot, 0, 0), "what was drawn and not done is left behind in a later pass"


def test_answer_that_was_lost_is_given_again(run):
    tenant = run.join(0)
    first = tenant.take(0, held=[])
    assert tenant.take(0, held=[]) == first
    second = tenant.take(0, held=[first.slot])
    assert second.chunk == 1


def test_table_with_other_terms_is_refused_and_the_first_chunk_size_holds(run):
    run.table()
    for other in (Terms(11, 3, True), Terms(10, 3, False)):
        with pytest.raises(InvalidArgument, match="All workers must call"):
            Table.open(run.segment, 0, other)
    assert Table.open(run.segment, 0, Terms(10, 5, True)).terms.chunk == 3


def test_snapshot_keeps_what_is_not_done(run):
    tenant = run.join(0)
    done, held = tenant.take(0), tenant.take(0)
    tenant.take(-1, done=[done.slot], drawn=[held.slot])
    saved = tenant.table.unfinished()
    assert saved.leases == [(0, 1)]
    assert saved.samples == 3
    run.resume(saved)
    again = run.join(0)
    assert again.finish(0) == [(0, 1), (0, 2), (0, 3)]
    assert again.table.unfinished().samples == 0


def test_epoch_that_was_closed_for_new_ones_brings_nothing_more(run):
    hasty, slow = run.join(0), run.join(1)
    kept = slow.take(0)
    for epoch in range(20):
        hasty.take(-1, drawn=[hasty.take(epoch).slot])
    assert slow.take(0, drawn=[kept.slot]) is Verdict.END
    assert slow.take(19).epoch == 19


def test_full_table_asks_for_leases_back(tmp_path):
    run = Run(tmp_path, Terms(MOST_LEASES + 1, 1, False))
    tenant = run.join(0)
    for _ in range(MOST_LEASES):
        tenant.take(0)
    assert tenant.take(0) is Verdict.FULL
    assert isinstance(tenant.take(0, done=[7]), Lease)
    run.close()


def test_passes_left_early_do_not_fill_the_table(run):
    tenant = run.join(0)
    back: list[int] = []
    for epoch in range(MOST_LEASES + 3):
        lease = tenant.take(epoch, back=back)
        assert (lease.epoch, lease.chunk) == (epoch, 0)
        back = [lease.slot]


class Killed(BaseException):
    """kill -9: nothing more is written, and the kernel gives the lock back."""


class Mortal:
    """The words of a table whose holder is killed before it writes one more than `writes`."""

    def __init__(self, words: Any, writes: int) -> None:
        self.words, self.writes = words, writes

    def __getitem__(self, place: Any) -> Any:
        return self.words[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        if self.writes == 0:
            raise Killed
        self.writes -= 1
        self.words[place] = value

    def release(self) -> None:
        self.words.release()


@pytest.mark.parametrize("scene", ["first of an epoch", "next", "left behind", "back", "last epoch closed"])
@pytest.mark.parametrize("writes", range(9))
def test_kill_at_any_word_of_a_take_loses_nothing(run, scene, writes):
    victim, witness = run.join(0), run.join(1)
    done: list[Chunk] = []
    news: dict[str, list[int]] = {}
    epoch, first = 0, 0
    if scene != "first of an epoch":
        one, two = victim.take(0), victim.take(0)
        done.append((0, one.chunk))  # it counts as done whether the table hears of it or not
        news = {"done": [one.slot], "drawn": [two.slot]}
    if scene == "left behind":
        run.join(2).take(0)
        run.segment.mark(2, DEAD)
    if scene == "back":
        news["back"] = [victim.take(0).slot]
    if scene == "last epoch closed":
        done += chunks(*range(16))
        for number in range(16):
            witness.finish(number)
        epoch = first = 16
        run.segment.mark(0, DEAD)
        done += witness.finish(15)
        victim = run.join(0)
        news = {}
    victim.table._words = Mortal(victim.table._words, writes)
    with contextlib.suppress(Killed):
        victim.take(epoch, **news)
    run.segment.mark(0, DEAD)
    rest = Counter([*done, *witness.finish(first), *witness.finish(first + 1)])
    wanted = set(chunks(first, first + 1))
    assert wanted <= set(rest), f"lost: {wanted - set(rest)}"
    again = sum(rest[chunk] - 1 for chunk in wanted)
    assert again <= 2, "only what the victim held may be done twice"


class Host:
    """What a host grants to workers elsewhere, without the network."""

    def __init__(self, run: Run) -> None:
        self.run, self.tables = run, Tables(run.segment)
        self.is_away = False
        self.answers_lost = 0
        self.may_fail = threading.Event()  # until then, a question to a host that is away goes unanswered
        self.may_fail.set()

    def lender(self, rank: int, terms: Terms | None = None) -> Borrower:
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

        return Borrower(ask, 0, terms or self.run.terms, on_away=lambda: None)


def trained(lender: Borrower, epoch: int) -> list[int]:
    """The chunks of one pass, each done when the next is asked for, but those that nobody has lent."""
    found, done = [], []
    while isinstance(lease := lender.take(epoch, done=done), Lease):
        done = [lease.slot]
        found += [lease.chunk] if lease.slot >= 0 else []
    return found


def test_worker_elsewhere_is_told_the_chunk_size_and_refused_with_other_data(run):
    host = Host(run)
    assert host.lender(0).terms.chunk == 3
    assert host.lender(1, Terms(10, 5, True)).terms.chunk == 3
    with pytest.raises(InvalidArgument, match="All workers must call"):
        host.lender(2, Terms(11, 3, True))


def test_lease_whose_answer_was_lost_is_not_lost(run):
    host = Host(run)
    lender = host.lender(0)
    host.answers_lost = 2
    assert trained(lender, 0) == [0, 1, 2, 3]
    lender.take(-1)
    assert run.table().unfinished().samples == 0


def test_lease_asked_for_ahead_is_given_back_when_its_pass_is_left_or_the_script_ends(run):
    host = Host(run)
    lender, other = host.lender(0), run.join(1)
    first = lender.take(0)
    second = lender.take(1, back=[first.slot])
    assert second == Lease(second.slot, 1, 0)
    lender.take(-1, back=[second.slot])
    assert sorted(other.finish(0) + other.finish(1)) == chunks(0, 1)


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
    assert sorted(run.join(1).finish(0)) == chunks(0)[1:], "what was told done while the host was away is done"


def test_what_a_worker_says_of_leases_before_a_restored_snapshot_is_not_heard(run, monkeypatch):
    dice = iter([0, 1000])
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(dice))
    host = Host(run)
    lender = host.lender(0)
    old = [lender.take(0).slot, lender.take(0).slot]
    lender._ahead[1].result()
    run.resume(run.table().unfinished())
    host.tables = Tables(run.segment)
    run.segment.renew(0)
    run.segment.mark(0, LIVE)  # it comes back under its old name
    old.append(lender.take(0).slot)  # the one that was asked for ahead
    assert lender.take(0).chunk == 0
    lender.take(-1, done=old)
    run.segment.mark(0, DEAD)
    assert sorted(run.join(1).finish(0)) == chunks(0), "nothing counts as done for what was done before"


@pytest.mark.parametrize("seed", range(3))
def test_workers_elsewhere_are_granted_each_chunk_once_at_the_same_time(tmp_path, seed):
    run = Run(tmp_path, Terms(2000, 1, True))
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
    assert first.first_epoch == 0
    first.finish(0)
    first.finish(1)
    lease = first.take(2)
    assert run.table().first_epoch == 2, "one chunk of it is handed out, and not done"
    run.resume(run.table().unfinished())
    assert run.table().first_epoch == 2
    second = run.join(0)
    assert second.finish(2)[0] == (2, lease.chunk)
    assert run.table().first_epoch == 3
