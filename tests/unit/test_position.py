"""Positions of workers with fixed shares: where each continues when it comes back, or when the run is resumed."""

import msgspec
import pytest

from maniple.sampler import position
from maniple.sampler.position import Position


def at(rank: int, *, world: int = 2, done: int = 0, saved: float = 0.0, is_common: bool = False) -> Position:
    return Position(rank, world, is_common, steps=done, own_steps=done, samplers={0: (1, done, 100)}, saved=saved)


def test_a_position_replaces_the_one_before_and_is_read_back(tmp_path):
    assert position.read(tmp_path) == []
    for done in (1, 2):
        at(0, done=done).write(tmp_path)
    at(1, done=5).write(tmp_path)
    assert position.read(tmp_path) == [at(0, done=2), at(1, done=5)]


def test_a_worker_continues_at_its_own_position_or_where_all_are():
    alone = [at(0, done=1), at(1, done=2)]
    assert position.of_worker(alone, 1) == alone[1] and position.of_worker(alone, 2) is None
    together = [at(0, done=4, saved=1.0, is_common=True), at(1, done=3, saved=2.0, is_common=True), at(2, saved=3.0)]
    assert position.common(together) == together[1], "the newest counts"
    assert position.of_worker(together, 7) == together[1]


@pytest.mark.parametrize("world", [0, 2])
def test_as_many_workers_continue_where_each_of_them_was(tmp_path, world):
    before = [at(0, done=1), at(1, done=2)]
    assert position.commit_positions(tmp_path, before, world) is None
    assert position.read(tmp_path) == before


def test_another_number_of_workers_continues_where_the_last_one_was(tmp_path):
    before = [at(0, done=9), at(1, done=2)]
    common = position.commit_positions(tmp_path, before, 3)
    assert common == msgspec.structs.replace(before[1], is_common=True)
    assert position.read(tmp_path) == [common]


def test_a_resumed_run_starts_again_the_workers_that_were_given_up(tmp_path):
    position.give_up(tmp_path, 1)
    assert position.remaining(tmp_path, 3) == [0, 2]
    position.commit_positions(tmp_path, [at(0, world=3), at(2, world=3)], 3)
    assert position.remaining(tmp_path, 3) == [0, 1, 2]


def test_a_pass_is_divided_among_the_same_workers_by_all(tmp_path):
    assert position.divided(tmp_path, 0, 1, 3) == (0, 1, 2)
    position.give_up(tmp_path, 1)
    assert position.divided(tmp_path, 0, 1, 3) == (0, 1, 2), "as the first that began this pass has seen it"
    assert position.divided(tmp_path, 0, 2, 3) == (0, 2) == position.divided(tmp_path, 1, 1, 3)


def test_divisions_of_passes_long_ago_are_removed(tmp_path):
    for epoch in range(50):
        position.divided(tmp_path, 0, epoch, 2)
    assert len(list(tmp_path.iterdir())) == 8


def test_memory_that_is_gone_leaves_all_workers_their_share(tmp_path):
    assert position.divided(tmp_path / "gone", 0, 0, 2) == (0, 1)
    position.give_up(tmp_path / "gone", 1)


def test_one_worker_notices_for_all_that_the_script_looks_at_a_batch(tmp_path):
    assert not position.is_looked_at(tmp_path)
    assert position.is_looked_at(tmp_path, has_looked=True)
    assert position.is_looked_at(tmp_path)
