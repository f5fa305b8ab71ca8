"""Samplers that draw by leases: each sample once per epoch, and a lease is done when the center has it."""

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.errors import InvalidArgument
from maniple.memory.segment import DEAD
from maniple.sampler import LeaseTerms, Sampler, lease_size_for
from maniple.sampler.leases import MAX_LEASES
from maniple.sampler.sampler import LoaderLead
from tests.unit.leasing import Run, drawn_at_once


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, LeaseTerms(count=10, lease_size=3, shuffle=True))  # chunks 0 to 3, the last of 1 sample
    yield run
    run.close()


def samplers(run: Run, count: int, **rest: Any) -> list[Sampler]:
    return [Sampler(run.terms.count, lender=run.join(rank), world=count, seed=(1,), **rest) for rank in range(count)]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 7, 64])
def test_each_sample_is_drawn_once_per_epoch_by_several_samplers_at_once(tmp_path, batch, balance):
    run = Run(tmp_path, LeaseTerms(500, 6, True))
    workers = samplers(run, 4, balance=balance)
    drawn = drawn_at_once(workers, 3, batch)
    assert sum(drawn, Counter()) == Counter(dict.fromkeys(range(500), 3))
    assert balance or [one.total() for one in drawn] == [3 * 125] * 4
    assert max(worker.progress for worker in workers) == 3.0
    assert run.table().snapshot().samples == 0
    run.close()


def test_epochs_have_orders_of_their_own_and_a_seed_repeats_them(tmp_path):
    orders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, LeaseTerms(50, 7, True))
        (worker,) = samplers(run, 1)
        orders.append([list(worker) for _ in range(3)])
        run.close()
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders[0]}) == 3


def test_without_shuffle_chunks_come_in_the_order_of_the_data(run):
    run.terms = LeaseTerms(10, 3, False)
    (worker,) = samplers(run, 1, shuffle=False)
    assert list(worker) == list(range(10))


def test_lease_is_done_when_the_center_has_it_and_not_before(run):
    (worker,) = samplers(run, 1)
    passing = worker.batches(3)
    for _ in range(2):
        next(passing)
        worker.stepped()
    assert run.table().snapshot().leased == [(0, 0, 3), (0, 3, 6)]
    worker.committed(worker.mark())
    next(passing)  # what is committed is sent with the next request
    assert run.table().snapshot().leased == [(0, 6, 9)]
    worker.stepped()
    worker.finish(is_early=False)
    late = run.join(1)
    assert late.finish(0) == [(0, environment) for environment in range(6, 10)]


def test_late_worker_makes_empty_passes_through_epochs_that_are_over(run):
    first, late = samplers(run, 2, balance=True)
    for _ in range(2):
        assert len(list(first)) == 10
    assert list(late) == list(late) == []
    assert len(list(late)) == 10
    assert late.epoch == 3


def test_max_epochs_end_a_sampler(run):
    (worker,) = samplers(run, 1, max_epochs=2)
    passes = []
    while not worker.is_finished:
        passes.append(len(list(worker)))
    assert passes == [10, 10]
    assert list(worker) == []


def test_passes_left_early_end_at_the_limit_too(run):
    (worker,) = samplers(run, 1, max_epochs=2)
    passes = 0
    while not worker.is_finished:
        passes += 1
        for _ in worker:
            break
    assert passes == 3  # the third brings nothing
    assert worker.taken == 2


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_batches_after_a_pass_that_was_left_early_are_whole(run, steps):
    run.terms = LeaseTerms(40, 8, True)
    (worker,) = samplers(run, 1)
    for step, _ in enumerate(worker.batches(6), 1):
        if step == steps:
            break
    assert worker.taken == 6 * steps
    sizes = [len(batch) for batch in worker.batches(6)]
    assert set(sizes[:-1]) == {6}
    assert worker.taken == 6 * steps + sum(sizes)


def test_what_is_left_of_a_pass_left_early_is_not_lost(run):
    run.terms = LeaseTerms(40, 8, True)
    hasty, other = samplers(run, 2, balance=True)
    seen = Counter[int]()
    for step, batch in enumerate(hasty.batches(6)):
        seen.update(map(int, batch))
        hasty.stepped()
        hasty.committed(hasty.mark())
        if step == 2:
            break  # 18 of 24 samples taken: the third chunk is left in its middle
    passing = hasty.batches(6)
    next(passing)  # its next pass, of epoch 1
    seen.update(other)
    assert set(seen) == set(range(40))
    assert seen.total() <= 40 + 8


def test_samples_that_a_loader_had_drawn_ahead_of_a_pass_left_early_are_not_lost(run):
    run.terms = LeaseTerms(60, 4, True)
    hasty, other = samplers(run, 2, balance=True)
    seen = Counter[int]()
    for step, batch in enumerate(ahead(hasty.batches(4), 3)):
        seen.update(map(int, batch))
        hasty.stepped()
        hasty.committed(hasty.mark())
        if step == 7:
            break
    passing = hasty.batches(4)
    next(passing)
    seen.update(other)
    assert set(seen) == set(range(60))


def ahead(batches: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """A loader that has drawn `count` batches more than it has handed out."""
    waiting: deque[np.ndarray] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


@given(count=st.integers(1, 200), chunk=st.integers(1, 40), batch=st.integers(1, 20), lead=st.integers(0, 6))
def test_lead_never_claims_a_sample_that_was_not_trained_on(count, chunk, batch, lead):
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), LeaseTerms(count, chunk, True))
        (worker,) = samplers(run, 1)
        for epoch in range(3):
            trained = 0
            for step, indices in enumerate(ahead(worker.batches(batch), lead), 1):
                trained += len(indices)
                worker.stepped()
                claimed = worker._lead.trained - epoch * count
                assert claimed <= trained
                if step > 2 * lead + 2 and count - trained > (lead + 1) * batch:
                    assert claimed == trained, "and it is not too careful either, in the middle of a pass"
        run.close()


def test_lead_counts_steps_over_several_batches():
    lead, batch, per_step = LoaderLead(), 10, 4
    for step in range(1, 20):  # a loader 6 batches ahead, an optimizer that steps once in 4
        lead.stepped((step * per_step + 6) * batch)
        assert lead.trained <= step * per_step * batch
    assert lead.trained >= 17 * per_step * batch


@given(st.integers(1, 6), st.integers(1, 64), st.integers(1, 4))
def test_lead_knows_of_the_first_step_of_a_later_pass(steps, batch, passes):
    lead, base = LoaderLead(), 0
    for number in range(passes):
        for step in range(1, steps + 1):
            lead.stepped(base + step * batch)
            assert lead.trained <= base + step * batch
            if number and steps > 1:
                assert lead.trained == base + step * batch, "a newcomer would be a step behind the others"
        base += steps * batch
        lead.drained(base)


@given(st.integers(1, 10**7), st.integers(0, 200))
def test_chunks_are_many_enough_for_all_workers_and_not_too_small(count, workers):
    chunk = lease_size_for(count, workers)
    assert 1 <= chunk <= 1024
    assert chunk == 1 or count // chunk >= 4 * max(4, workers)


def test_what_a_loader_holds_when_the_script_is_ended_is_not_done(run):
    run.terms = LeaseTerms(60, 5, True)
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    loader = ahead(worker.batches(5), 8)
    for _ in range(4):  # 60 samples drawn soon, 20 trained on
        next(loader)
        worker.stepped()
    worker.committed(worker.mark())
    worker.finish(is_early=True)
    left = run.table().snapshot().samples
    assert left >= 40


def test_pass_that_is_left_with_batches_in_the_loader_gives_them_back(run):
    run.terms = LeaseTerms(60, 5, True)
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    seen: list[int] = []
    for number in range(4):
        for step, batch in enumerate(ahead(worker.batches(5), 8)):
            seen += batch.tolist()
            worker.stepped()
            if number == 0 and step == 5:  # all is drawn by now
                break
        worker.committed(worker.mark())
    assert Counter(seen)[min(Counter(seen), key=Counter(seen).get)] >= 3


def test_worker_with_a_full_table_trains_on(run, monkeypatch):
    run.terms = LeaseTerms(MAX_LEASES + 50, 1, False)
    (worker,) = samplers(run, 1, shuffle=False)
    worker.stepped()  # it trains, and never exchanges
    monkeypatch.setattr("maniple.sampler.sampler._MAX_OPEN", 10**9)
    assert sum(1 for _ in worker) == MAX_LEASES + 50


# Passes of at most one share


def test_no_pass_has_more_samples_than_the_length_of_the_sampler(run):
    fast, slow = samplers(run, 2)
    assert [len(list(fast)) for _ in range(3)] == [len(fast)] * 3 == [5] * 3
    assert [len(list(slow)) for _ in range(3)] == [5] * 3, "what the slow one is to have, nobody has taken"
    assert fast.progress == 1.5, "15 of 10 samples"
    assert slow.progress == 3.0


def test_pass_ends_at_its_share_without_waiting_for_those_who_are_at_theirs(run):
    first, second = samplers(run, 2)
    drawing = iter(second)
    next(drawing)  # it has a lease, and hands on no more of it
    assert len(list(first)) == 5


def test_what_a_dead_worker_has_left_is_taken_in_the_next_pass(run):
    dead, other = samplers(run, 2, is_shared=lambda: True)
    next(dead.batches(2))
    dead.stepped()
    seen = Counter(list(other))
    run.segment.mark(0, DEAD)
    other.stepped()
    seen.update(other)
    assert seen == Counter(range(10)), "all of the first epoch"
    other.finish(is_early=False)
    assert run.table().snapshot().missed == 10


# A script that looks at a batch


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("is_shared_first", [False, True])
@pytest.mark.parametrize("lead", [0, 3, 30])
def test_look_at_a_batch_is_no_epoch_and_all_samples_are_trained_on(run, balance, is_shared_first, lead):
    run.terms = LeaseTerms(40, 4, True)
    shared = [is_shared_first]
    looking, other = samplers(run, 2, balance=balance, is_shared=lambda: shared[0])
    next(ahead(looking.batches(4), lead))  # with 30 batches ahead, the pass is drawn to its end
    shared[0] = True
    seen = Counter[int]()
    for _ in range(2):
        for worker in (looking, other):
            for batch in worker.batches(4):
                seen.update(batch.tolist())
                worker.stepped()
                worker.committed(worker.mark())
    assert looking.epoch == other.epoch == 2
    assert seen == Counter(dict.fromkeys(range(40), 2))
    assert looking.taken + other.taken == 80, "what was looked at does not count"
    for worker in (looking, other):
        worker.finish(is_early=False)
    assert run.table().snapshot().samples == 0


def test_samples_of_a_look_that_nothing_follows_are_given_back(run):
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    assert len(list(worker)) == 10
    worker.finish(is_early=False)
    assert run.table().snapshot().samples == 10


def test_pass_in_which_a_step_was_made_is_an_epoch_though_it_is_left_early(run):
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    for expected in (1, 2, 3):
        next(worker.batches(2))
        worker.stepped()
        assert worker.epoch == expected


def test_script_whose_steps_are_not_known_comes_to_its_end(run):
    (worker,) = samplers(run, 1, is_shared=lambda: True, max_epochs=3)
    passes = 0
    while not worker.is_finished:
        list(worker)
        passes += 1
    assert passes <= 4


def test_worker_that_comes_again_may_look_at_a_batch_though_its_epoch_is_over(run):
    (first,) = samplers(run, 1)
    for _ in range(2):
        list(first)
        first.stepped()
    first.committed(first.mark())
    first.finish(is_early=False)
    looks: list[int] = []
    options = {"is_looked_at": lambda: True, "on_look": lambda: looks.append(1)}
    (again,) = samplers(run, 1, is_shared=lambda: True, **options)
    assert again.first_epoch == 2
    assert len(next(again.batches(4))) == 4
    found = [sum(1 for _ in again) for _ in range(3)]
    assert found == [0, 0, 10] and looks == [1]


# set_epoch


def test_set_epoch_changes_nothing_in_an_ordinary_loop(tmp_path):
    orders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, LeaseTerms(50, 7, True))
        (worker,) = samplers(run, 1)
        orders.append([])
        for epoch in range(3):
            if name == "b":
                worker.set_epoch(epoch)
            orders[-1].append(list(worker))
        run.close()
    assert orders[0] == orders[1]


@pytest.mark.parametrize("balance", [False, True])
def test_set_epoch_begins_with_a_later_epoch_and_never_repeats_one(run, balance):
    worker, other = samplers(run, 2, balance=balance)
    for epoch in (5, 6):
        worker.set_epoch(epoch)
        other.set_epoch(epoch)
        assert sorted([*worker, *other]) == list(range(10))
    assert {epoch for epoch, _ in run.table().snapshot().handed_out} == {5, 6}
    for epoch in range(2):  # a second loop, which counts from 0 again
        worker.set_epoch(epoch)
        assert worker.epoch == 7 + epoch
        assert len(list(worker)) == 5 + 5 * balance
    with pytest.raises(InvalidArgument, match="epoch -1 cannot be set"):
        worker.set_epoch(-1)
