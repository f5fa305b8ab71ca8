"""The fixed shares: within a pass, each sample at most once over all workers, equally many for each."""

import types
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.replica.samples import Samples
from maniple.sampler import Shard
from maniple.sampler.position import Position
from maniple.settings.options import Limits
from maniple.worker import Worker


@st.composite
def worlds(draw) -> tuple[int, int]:
    world = draw(st.integers(1, 9))
    return draw(st.integers(world, 60)), world


def samplers(count: int, world: int, **options) -> list[Shard]:
    return [Shard(count, rank=rank, world=world, **{"seed": (1,)} | options) for rank in range(world)]


@given(worlds(), st.booleans(), st.integers(0, 99))
def test_no_sample_is_taken_twice_in_a_pass_and_fewer_than_a_round_are_left_out(sizes, shuffle, seed):
    count, world = sizes
    workers = samplers(count, world, shuffle=shuffle, seed=(seed,))
    for _ in range(3):
        taken = [index for worker in workers for index in worker]
        assert len(set(taken)) == len(taken) == count - count % world
        assert set(taken) <= set(range(count))


@given(worlds())
def test_length_is_what_is_handed_out_and_all_shares_are_equal(sizes):
    workers = samplers(*sizes)
    lengths = [len(list(worker)) for worker in workers]
    assert lengths == [len(worker) for worker in workers]
    assert len(set(lengths)) == 1


def test_passes_are_shuffled_anew_and_the_seed_repeats_them():
    (first,), (again,), (other,) = (samplers(50, 1, seed=(seed,)) for seed in (1, 1, 2))
    passes = [list(first) for _ in range(3)]
    assert len({tuple(p) for p in passes}) == 3
    assert passes == [list(again) for _ in range(3)]
    assert passes[0] != list(other)


def test_without_shuffle_the_order_is_that_of_the_data():
    assert [list(worker) for worker in samplers(7, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 5]]


def test_pass_that_was_broken_off_does_not_shift_the_next():
    broken, whole = samplers(20, 2)[0], samplers(20, 2)[0]
    next(iter(broken))
    list(whole)
    assert list(broken) == list(whole)


def test_samples_handed_out_are_counted_over_passes():
    (sampler,) = samplers(5, 1)
    list(sampler)
    next(iter(sampler))
    assert sampler.taken == 6
    assert sampler.epoch == 2


def test_iteration_ends_when_the_worker_should_stop():
    taken: list[int] = []
    sampler = Shard(1000, rank=0, world=1, seed=(1,), should_stop=lambda: len(taken) >= 3)
    for index in sampler:
        taken.append(index)
    assert len(taken) == sampler.taken == 128  # it looks every 128 samples


def test_indices_are_plain_integers():
    assert {type(index) for index in samplers(4, 1)[0]} == {int}


def test_fewer_samples_than_workers_are_refused():
    with pytest.raises(InvalidArgument, match="3 samples cannot be shared by 4 workers"):
        samplers(3, 4)


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_shares_for_validation_have_each_sample_once_whether_or_not_they_divide(count, world, shuffle):
    workers = samplers(count, world, shuffle=shuffle, is_whole=True)
    for _ in range(2):
        shares = [list(worker) for worker in workers]
        assert sorted(index for share in shares for index in share) == list(range(count))
        assert [len(share) for share in shares] == [len(worker) for worker in workers]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


# Continued in the middle of an epoch


@given(st.integers(8, 200), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.data())
def test_shares_continue_where_all_workers_were_and_leave_out_no_sample(count, world, later, batch, data):
    before = [Shard(count, rank=rank, world=world, seed=(1,)) for rank in range(world)]
    steps = data.draw(st.integers(0, 2 * -(-(count // world) // batch)))
    seen: list[Counter[int]] = [Counter(), Counter()]
    for shard in before:
        made = 0
        for epoch in range(2):
            for indices in shard.batches(batch):
                if made == steps:
                    break
                seen[epoch].update(indices.tolist())
                made += 1
                shard.stepped()
            else:
                shard.passed()
                continue
            break
    epoch, environment = before[0].position
    assert {shard.position for shard in before} == {(epoch, environment)}, "all are as far"
    after = [Shard(count, rank=rank, world=later, seed=(1,)) for rank in range(later)]
    again: list[Counter[int]] = [Counter(), Counter()]
    for shard in after:
        shard.begin_at(epoch, environment)
        for number in range(2):
            again[number].update(shard)
    for number in range(2):
        both = seen[number] + again[number]
        left_out = count % world + count % later + (later if number == epoch else 0)
        assert count - len(both) <= left_out, "but the remainder that equal shares leave out"
        repeated = sum(both.values()) - len(both)
        assert repeated <= (world * batch if number == epoch else 0), "at most one step, of which it is not certain"


def test_what_a_loader_has_drawn_ahead_is_not_trained_on():
    shard = Shard(1000, rank=0, world=2, seed=(1,))
    drawn = iter(shard)
    for _ in range(3 * 10):  # a loader that is three batches ahead
        next(drawn)
    for _ in range(5):
        for _ in range(10):
            next(drawn)
        shard.stepped()
    assert shard.position == (0, 5 * 10 * 2)


def test_a_shard_begins_elsewhere_only_before_its_first_pass():
    shard = Shard(100, rank=0, world=2, seed=(1,), is_shared=lambda: True)
    next(iter(shard))
    shard.begin_at(7, 10)
    shard.stepped()
    assert shard.position[0] == 0 and shard.first_epoch == 0
    assert len(list(shard)) == 50


# A script that looks at a batch, and set_epoch


@pytest.mark.parametrize("ahead", [1, 50])
def test_look_at_a_batch_is_no_epoch_and_a_share_goes_on_where_it_was(ahead):
    shard, other = (Shard(100, rank=0, world=2, seed=(1,), is_shared=lambda: True) for _ in range(2))
    for one in (shard, other):
        one.begin_at(0, 20)
    looking = iter(shard)
    for _ in range(ahead):
        next(looking, None)
    assert shard.position == (0, 20)
    trained = list(shard)
    assert trained == list(other) and len(trained) == 40
    assert (shard.epoch, shard.taken) == (1, 40)
    shard.stepped()
    assert shard.progress == 1.0


def test_position_of_a_newcomer_counts_though_it_has_looked_at_a_batch():
    shard = Shard(100, rank=0, world=2, seed=(1,), is_shared=lambda: True)
    next(iter(shard))
    shard.begin_at(7, 10)
    shard.set_epoch(7)
    assert shard.first_epoch == 7 and len(list(shard)) == 45 and shard.position == (7, 10)


def test_worker_that_looks_at_a_batch_before_its_loop_has_all_epochs(monkeypatch):
    worker = Worker(Environment())
    sampler = worker.sampler(10)
    monkeypatch.setattr(sampler, "_is_shared", lambda: True)
    next(iter(sampler))
    made = []
    for epoch in worker.epochs(3):
        sampler.set_epoch(epoch)
        next(iter(sampler))
        made.append((epoch, len(list(sampler))))
        sampler.stepped()
    assert made == [(0, 10), (1, 10), (2, 10)] and sampler.epoch == 3


def test_progress_of_a_share_is_that_of_the_epoch():
    shard = Shard(100, rank=0, world=2, seed=(1,))
    for _ in shard.batches(25):
        break
    assert shard.progress == 0.5


def test_fixed_shares_that_are_to_be_balanced_are_refused():
    with pytest.raises(InvalidArgument, match="static=True and balance=True exclude each other"):
        Worker(Environment()).sampler(10, static=True, balance=True)


# worker.epochs


def made_samples(count: int, *, begins: dict[int, tuple[int, int, int]] | None = None) -> Samples:
    samples = Samples(Environment(world=2))
    samples.continue_at(msgspec.to_builtins(Position(0, 1, True, 0, 0, samplers=begins or {}), str_keys=True), 0)
    for validation in (False, True):
        samples.sampler(
            count, lender=None, static=True, balance=False, shuffle=True, chunk=None,
            validation=validation, should_stop=lambda: False, is_shared=lambda: True, on_wait=lambda: None,
        )  # fmt: skip
    return samples


def test_newcomer_continues_where_the_others_were_at_their_last_exchange():
    """It makes the steps up to the next exchange itself, as they have done since the last one."""
    samples, replica = made_samples(40), types.SimpleNamespace(steps=0, steps_since_exchange=0, rounds=0)

    def environment() -> tuple[int, int, int]:
        position = samples.position(replica)
        return (*position["samplers"]["0"][:2], position["steps"])

    assert environment() == (0, 0, 0)
    for epoch in range(3):
        for number, _ in enumerate(samples._samplers[0].batches(5), 1):
            replica.steps += 1
            replica.steps_since_exchange += 1
            samples.step()
            assert environment() == (epoch, 20 * (number > 2), 4 * epoch + 2 * (number > 2))
            if number % 2 == 0:  # the center, or all workers, have it
                replica.rounds += 1
                replica.steps_since_exchange = 0
                samples.exchange(samples.mark())
                assert environment() == ((epoch, 20, 4 * epoch + 2) if number == 2 else (epoch + 1, 0, 4 * epoch + 4))


def test_a_worker_alone_has_all_epochs_and_a_limit_ends_them(monkeypatch):
    with_limit = Worker(Environment(limits=Limits(max_epochs=2)))
    sampler = with_limit.sampler(10)
    made = []
    for epoch in with_limit.epochs(5):
        made.append((epoch, len(list(sampler))))
    assert made == [(0, 10), (1, 10)] and with_limit.should_stop
    worker = Worker(Environment())
    assert list(worker.epochs(3)) == [0, 1, 2] and list(worker.epochs(0)) == []
    with pytest.raises(InvalidArgument, match=r"epochs\(-1\)"):
        next(worker.epochs(-1))


def test_epochs_that_are_over_are_left_out_of_all_loops_and_samplers():
    samples = made_samples(100, begins={0: (4, 20, 100)})
    assert samples.begin_loop(3) == 4, "nothing is left of the first loop"
    assert samples.begin_loop(2) == 1, "and one epoch of the second"
    train, look = samples._samplers
    assert (train.epoch, look.epoch) == (4, 4) and len(list(train)) == 40 and len(list(look)) == 50


def test_the_first_empty_pass_says_why_and_what_to_write(capsys):
    samples = made_samples(100, begins={0: (2, 0, 100)})
    train = samples._samplers[0]
    assert [len(list(train)) for _ in range(3)] == [0, 0, 50]
    said = capsys.readouterr().err
    assert said.count("epochs 0 to 1 are over") == 1 and "worker.epochs(n)" in said


def test_a_data_set_that_has_changed_begins_its_epoch_again_with_a_warning():
    with pytest.warns(UserWarning, match=r"has 90 samples, and had 100 before.*epoch 2 begins again"):
        samples = made_samples(90, begins={0: (2, 20, 100)})
    assert samples._samplers[0].position == (2, 0)


# Samplers that somebody shares out once more


class DistributedSampler:
    """Has the name and the attribute by which torch's own and those derived from it are known."""

    def __init__(self, sampler, num_replicas):
        self.sampler, self.num_replicas = sampler, num_replicas

    def __iter__(self):
        return iter(list(self.sampler)[:: self.num_replicas])


class BatchSamplerShard:
    """The same for Accelerate's."""

    def __init__(self, sampler, num_processes):
        self.sampler, self.num_processes = sampler, num_processes

    def __iter__(self):
        for i, index in enumerate(self.sampler):
            if i % self.num_processes == 0:
                yield index


@pytest.mark.parametrize("wrap", [DistributedSampler, BatchSamplerShard])
def test_share_that_is_shared_out_again_is_refused(wrap):
    def shard(world):
        return Shard(12, rank=0, world=world, seed=(0,))

    with pytest.raises(InvalidArgument, match=f"{wrap.__name__} shares these samples among 2 .*share of 3"):
        list(wrap(shard(3), 2))
    assert len(list(wrap(shard(3), 1))) == 4
    assert len(list(wrap(shard(1), 2))) == 6  # all samples, which only the other library shares out
