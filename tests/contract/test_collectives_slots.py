"""Slots of collectives in shared memory: they stay while a member reads them, and no longer."""

import numpy as np
import pytest

from maniple.center import Segment
from maniple.collectives.shared_memory import SharedMemoryCollectives
from maniple.collectives.slots import Slots, _GrowingSlot
from maniple.errors import SharedMemoryFull

from .collectives_threads import Begun, Died, collective_groups, open_collectives, together


def test_copying_calls_leave_the_slots_of_resident_vectors_alone(segment: Segment):
    """Vectors made before and after the first call, while the calls' own slot grows again and again."""
    made = collective_groups(segment, 2)

    def act(collectives: SharedMemoryCollectives) -> list[float]:
        early = collectives.reside({"float32": 100})
        found = []
        for power in (6, 14, 16, 18):
            x = np.ones(1 << power)
            collectives.all_reduce(x, x, "sum")
            found.append(x.sum() / x.size)
            if power == 6:
                late = collectives.reside({"float32": 100})
        for vectors in (early, late):  # the others look for these slots only now
            vectors.flat["float32"][:] = collectives.rank + 1
            vectors.all_reduce("sum")
            found += set(vectors.flat["float32"].tolist())
        return found

    assert together([lambda one=one: act(one) for one in made]) == [[2, 2, 2, 2, 3, 3]] * 2
    for rank, collectives in enumerate(made):  # two of vectors; the calls' newest, and the one before
        assert len(list(segment.path.glob(f"collectives-0.{rank}.*"))) == 4
        collectives.close()


def test_slots_of_a_dead_worker_stay_until_its_successor_has_entered(segment: Segment):
    """It dies when it has come to a round; its successor is there before the others read what it gave."""
    made = collective_groups(segment, 3)
    mine = [collectives.reside({"float32": 1000}) for collectives in made]
    for rank, vectors in enumerate(mine):
        vectors.flat["float32"][:] = 10.0**rank

    def give_up() -> None:
        raise Died

    made[1].membership.on_wait = give_up
    assert isinstance(together([lambda: mine[1].all_reduce("sum")])[0], Died)
    made[1].close()
    segment.renew(1)
    successor = open_collectives(segment, 1, 3)
    successor.reside({"float32": 1000})
    entering = Begun(successor.membership.join)

    def go_on(rank: int) -> tuple[int, ...]:
        first = mine[rank].all_reduce("sum")
        assert set(mine[rank].flat["float32"].tolist()) == {111.0}
        while made[rank].membership.table.first[1] < 2:  # not yet the successor's
            made[rank].barrier()
        return first.ranks

    assert together([lambda: go_on(0), lambda: go_on(2)]) == [(0, 1, 2)] * 2
    assert entering.result() is True
    left = {path.name for path in segment.path.glob("collectives-0.1.*")}
    assert left == {f"collectives-0.1.{segment.incarnation(1)}.1"}
    for collectives in (made[0], made[2], successor):
        collectives.close()


def test_slot_that_cannot_grow_stays_in_use(segment: Segment, monkeypatch: pytest.MonkeyPatch):
    """Shared memory is full for one call; the slot before it may still be read by others."""
    slot = _GrowingSlot(slots := Slots(segment.path, "slots", 0, 0))
    slot.reserve(1)

    def fail(_size: int) -> None:
        raise SharedMemoryFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "create", fail)
        for _ in range(2):
            with pytest.raises(SharedMemoryFull):
                slot.reserve(1 << 20)
    announced = slot.serial
    slot.reserve(1 << 20)
    assert {path.name for path in segment.path.glob("slots.0.*")} == {
        f"slots.0.0.{n}" for n in (announced, slot.serial)
    }
