"""A worker that dies in the middle of a round: the others finish its part, whatever it had done of it."""

import threading
from typing import Any

import numpy as np
import pytest

from maniple.center import Segment
from maniple.collectives import reductions as sums
from maniple.collectives import slots as resident
from maniple.collectives.shared_memory import SharedMemoryCollectives
from maniple.errors import CallMismatch, PeerLost, WaitedTooLong

from .collectives_threads import Died, collective_groups, together


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_part_of_a_dead_worker_is_finished_by_the_others(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, ...], steps: int, is_compiled: bool
):
    """It dies after so many steps of its part: 2 per block, after the first of which the block is not yet written."""
    if not is_compiled:
        monkeypatch.setattr(sums, "_kernel", lambda: None)
    monkeypatch.setattr(resident, "block_bytes", lambda: 4096)
    made = collective_groups(segment, 3)
    size = 3 * 1024 * 4 - 100  # four blocks for each
    mine = [collectives.reside({"float32": size, "float64": 10}) for collectives in made]
    values = [np.random.default_rng(rank).normal(size=size).astype(np.float32) for rank in range(3)]
    for one, value in zip(mine, values, strict=True):
        one.flat["float32"][:] = value
        one.flat["float64"][:] = value[:10]
    usual = resident.InPlaceVectors._combine

    def combine(self: resident.InPlaceVectors, views: list[Any], index: int, op: str, weights: list[float]) -> None:
        if index != 1 or dead:
            usual(self, views, index, op, weights)
            return
        dead.append(index)
        owner, vectors = views[1], [view.flat["float32"] for view in views]
        part = sums.bounds(size, 3)[1]
        block = owner.journal[:4096].view(np.float32)
        for number in range(steps // 2):
            low = part[0] + number * block.size
            span = (low, low + block.size)
            sums.SlicePart(vectors, span, block, owner.progress, base=number, is_compiled=False).combine(op, weights)
        if steps % 2:  # the block is made, and half of it has been written to one of them
            low = part[0] + steps // 2 * block.size
            sums.combine(op, [v[low : low + block.size] for v in vectors], weights, block)
            owner.progress[0] += 1
            vectors[0][low : low + block.size // 2] = block[: block.size // 2]
        raise Died

    dead: list[int] = []
    monkeypatch.setattr(resident.InPlaceVectors, "_combine", combine)

    def act(rank: int) -> Any:
        try:
            return mine[rank].all_reduce("mean", weight=weights[rank])
        except Died:
            made[rank].close()  # as the kernel does when a process ends
            raise

    results = together([lambda rank=rank: act(rank) for rank in range(3)])
    assert isinstance(results[1], Died)
    expected = sum(w * v.astype(np.float64) for w, v in zip(weights, values, strict=True)) / sum(weights)
    for rank in (0, 2):
        assert results[rank].ranks == (0, 1, 2) and results[rank].weight == sum(weights)
        np.testing.assert_allclose(mine[rank].flat["float32"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine[rank].flat["float64"], expected[:10], rtol=1e-6)
    assert mine[0].flat["float32"].tobytes() == mine[2].flat["float32"].tobytes()
    after = together([lambda rank=rank: mine[rank].all_reduce("sum") for rank in (0, 2)])
    assert [found.ranks for found in after] == [(0, 2), (0, 2)]
    for rank in (0, 2):
        made[rank].close()


@pytest.mark.parametrize("where", ["waiting", "come", "end"])
def test_round_given_up_by_a_worker_is_finished_by_the_others_and_closed_to_it(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, where: str
):
    """An exception falls between a worker's coming to the round and its part of it, or after that."""
    made = collective_groups(segment, 3)
    mine = [collectives.reside({"float32": 3000}) for collectives in made]
    for rank, one in enumerate(mine):
        one.flat["float32"][:] = rank + 1

    def fail(*_: Any) -> None:
        raise Died

    gone, usual = threading.Event(), resident.InPlaceVectors._combine

    def combine(self: resident.InPlaceVectors, views: list[Any], index: int, *rest: Any) -> None:
        if index == 1:
            made[1].membership.on_wait = fail
        else:
            assert gone.wait(20)
        usual(self, views, index, *rest)

    if where == "come":
        monkeypatch.setattr(mine[1], "_find_views", fail)
    elif where == "end":
        monkeypatch.setattr(resident.InPlaceVectors, "_combine", combine)
    else:
        made[1].membership.on_wait = fail

    def give_up() -> Any:
        try:
            mine[1].all_reduce("mean")
        except Died:
            assert made[1].membership.is_in  # to the others it is still there
        finally:
            gone.set()
        try:
            mine[1].all_reduce("mean")
        finally:
            made[1].close()

    def come(rank: int) -> Any:
        assert where != "waiting" or gone.wait(20)
        return [mine[rank].all_reduce("mean") for _ in range(2)]

    first, error, third = together([lambda: come(0), give_up, lambda: come(2)])
    assert isinstance(error, PeerLost)
    assert "worker 1 has given up in the middle of a round of collectives-0" in str(error) and "--restarts" in str(
        error
    )
    for rank, (whole, after) in ((0, first), (2, third)):
        assert whole.ranks == (0, 1, 2) and after.ranks == (0, 2)
        assert (mine[rank].flat["float32"] == 2).all()  # its values are in the mean, and its part of it was made
        made[rank].close()


def test_call_is_made_again_without_one_who_dies_in_it(segment: Segment):
    made = collective_groups(segment, 3)
    x = [np.full(100_000, rank + 1.0) for rank in range(3)]

    outs = [np.empty_like(v) for v in x]
    together(
        [
            lambda: made[0].all_reduce(x[0], outs[0], "sum"),
            made[1].close,
            lambda: made[2].all_reduce(x[2], outs[2], "sum"),
        ]
    )
    assert (outs[0] == 4).all() and (outs[2] == 4).all()
    made[0].close()
    made[2].close()


def test_different_calls_raise_on_all_sides(segment: Segment):
    made = collective_groups(segment, 2)
    x = np.zeros(4)
    results = together([lambda: made[0].all_reduce(x, x.copy(), "sum"), lambda: made[1].broadcast(x.copy(), root=0)])
    assert all(isinstance(result, CallMismatch) for result in results)
    results = together(
        [lambda: made[0].all_reduce(x, x.copy(), "sum"), lambda: made[1].all_reduce(x[1:], x[1:], "sum")]
    )
    assert all(isinstance(result, CallMismatch) for result in results)
    for collectives in made:
        collectives.close()


def test_one_who_does_not_come_is_named(segment: Segment):
    made = collective_groups(segment, 2, deadline_s=0.3)
    (error,) = together([made[0].barrier])
    assert isinstance(error, WaitedTooLong)
    assert "for worker 1 in barrier" in str(error) and "limit 0.3 s" in str(error)
    for collectives in made:
        collectives.close()


def test_member_that_waits_in_another_group_is_not_waited_for(segment: Segment):
    """Worker 0 is at a barrier of group b, worker 1 at one of group a: that of a continues without worker 0."""
    b = [SharedMemoryCollectives(segment, "b", rank=r, world=2, deadline_s=20) for r in range(2)]
    a = [SharedMemoryCollectives(segment, "a", rank=r, world=2, deadline_s=20, calls=b[r].elastic) for r in range(2)]
    together([collectives.membership.join for collectives in a])
    together([collectives.membership.join for collectives in b])

    def second() -> tuple[int, ...]:
        a[1].barrier()
        alone = a[1].ranks
        b[1].barrier()
        return alone

    def first() -> tuple[int, ...]:
        b[0].barrier()
        return ()

    assert together([first, second])[1] == (1,)

    def go_on() -> None:
        while a[1].ranks == (1,):
            a[1].barrier()
        a[1].barrier()

    assert together([a[0].barrier, go_on]) == [None, None]  # it comes back by itself
    assert a[0].ranks == a[1].ranks == (0, 1)
    for collectives in (*a, *b):
        collectives.close()
