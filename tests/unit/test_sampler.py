"""The fixed shares: within a pass, each sample at most once over all workers, equally many for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.errors import InvalidArgument
from maniple.sampler import Shard


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
