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

from maniple.sampler import Sampler, Terms, chunk_for
from maniple.sampler.lead import Lead
from maniple.sampler.table import MOST_LEASES
from tests.unit.leasing import Run, drawn_at_once


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, Terms(count=10, chunk=3, shuffle=True))  # chunks 0 to 3, the last of 1 sample
    yield run
    run.close()


def samplers(run: Run, count: int, **rest: Any) -> list[Sampler]:
    return [Sampler(run.terms.count, lender=run.join(rank), world=count, seed=(1,), **rest) for rank in range(count)]


@pytest.mark.parametrize("batch", [0, 1, 7, 64])
def test_each_sample_is_drawn_once_per_epoch_by_several_samplers_at_once(tmp_path, batch):
    run = Run(tmp_path, Terms(500, 6, True))
    drawn = drawn_at_once(samplers(run, 4), 3, batch)
    assert sum(drawn, Counter()) == Counter(dict.fromkeys(range(500), 3))
    assert run.table().unfinished().samples == 0
    run.close()


def test_epochs_have_orders_of_their_own_and_a_seed_repeats_them(tmp_path):
    orders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, Terms(50, 7, True))
        (worker,) = samplers(run, 1)
        orders.append([list(worker) for _ in range(3)])
        run.close()
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders[0]}) == 3


def test_without_shuffle_chunks_come_in_the_order_of_the_data(run):
    run.terms = Terms(10, 3, False)
    (worker,) = samplers(run, 1, shuffle=False)
    assert list(worker) == list(range(10))


def test_lease_is_done_when_the_center_has_it_and_not_before(run):
    (worker,) = samplers(run, 1)
    passing = worker.batches(3)
    for _ in range(2):
        next(passing)
        worker.stepped()
    assert run.table().unfinished().leases == [(0, 0), (0, 1)]
    worker.settled()
    next(passing)  # what is settled is told with the next question
    assert run.table().unfinished().leases == [(0, 2)]
    worker.stepped()
    worker.finish(is_early=False)
    late = run.join(1)
    assert late.finish(0) == [(0, 2), (0, 3)]


def test_late_worker_makes_empty_passes_through_epochs_that_are_over(run):
    first, late = samplers(run, 2)
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
    run.terms = Terms(40, 8, True)
    (worker,) = samplers(run, 1)
    for step, _ in enumerate(worker.batches(6), 1):
        if step == steps:
            break
    assert worker.taken == 6 * steps
    sizes = [len(batch) for batch in worker.batches(6)]
    assert set(sizes[:-1]) == {6}
    assert worker.taken == 6 * steps + sum(sizes)


def test_what_is_left_of_a_pass_left_early_is_not_lost(run):
    run.terms = Terms(40, 8, True)
    hasty, other = samplers(run, 2)
    seen = Counter[int]()
    for step, batch in enumerate(hasty.batches(6)):
        seen.update(map(int, batch))
        hasty.stepped()
        hasty.settled()
        if step == 2:
            break  # 18 of 24 samples taken: the third chunk is left in its middle
    passing = hasty.batches(6)
    next(passing)  # its next pass, of epoch 1
    seen.update(other)
    assert set(seen) == set(range(40))
    assert seen.total() <= 40 + 8


def test_samples_that_a_loader_had_drawn_ahead_of_a_pass_left_early_are_not_lost(run):
    run.terms = Terms(60, 4, True)
    hasty, other = samplers(run, 2)
    seen = Counter[int]()
    for step, batch in enumerate(ahead(hasty.batches(4), 3)):
        seen.update(map(int, batch))
        hasty.stepped()
        hasty.settled()
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
        run = Run(Path(folder), Terms(count, chunk, True))
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
    lead, batch, per_step = Lead(), 10, 4
    for step in range(1, 20):  # a loader 6 batches ahead, an optimizer that steps once in 4
        lead.stepped((step * per_step + 6) * batch)
        assert lead.trained <= step * per_step * batch
    assert lead.trained >= 17 * per_step * batch


@given(st.integers(1, 10**7), st.integers(0, 200))
def test_chunks_are_many_enough_for_all_workers_and_not_too_small(count, workers):
    chunk = chunk_for(count, workers)
    assert 1 <= chunk <= 1024
    assert chunk == 1 or count // chunk >= 4 * max(4, workers)


def test_what_a_loader_holds_when_the_script_is_ended_is_not_done(run):
    run.terms = Terms(60, 5, True)
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    loader = ahead(worker.batches(5), 8)
    for _ in range(4):  # 60 samples drawn soon, 20 trained on
        next(loader)
        worker.stepped()
    worker.settled()
    worker.finish(is_early=True)
    left = run.table().unfinished().samples
    assert left >= 40


def test_pass_that_is_left_with_batches_in_the_loader_gives_them_back(run):
    run.terms = Terms(60, 5, True)
    (worker,) = samplers(run, 1, is_shared=lambda: True)
    seen: list[int] = []
    for number in range(4):
        for step, batch in enumerate(ahead(worker.batches(5), 8)):
            seen += batch.tolist()
            worker.stepped()
            if number == 0 and step == 5:  # all is drawn by now
                break
        worker.settled()
    assert Counter(seen)[min(Counter(seen), key=Counter(seen).get)] >= 3


def test_worker_with_a_full_table_trains_on(run, monkeypatch):
    run.terms = Terms(MOST_LEASES + 50, 1, False)
    (worker,) = samplers(run, 1, shuffle=False)
    worker.stepped()  # it trains, and never exchanges
    monkeypatch.setattr("maniple.sampler.sampler._MOST_OPEN", 10**9)
    assert sum(1 for _ in worker) == MOST_LEASES + 50
