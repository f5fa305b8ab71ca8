"""The ring of a feed: each batch is taken once, in order, and slots of dead processes are used again."""

from collections.abc import Iterator

import pytest

from maniple.errors import InvalidArgument, SharedMemoryFull
from maniple.feed.ring import EMPTY, FILLING, FULL, TAKING, Ring, read_table
from tests.limits import file_limit


@pytest.fixture
def ring(tmp_path) -> Iterator[Ring]:
    ring = Ring(tmp_path, "train")
    ring.table.high_water[0] = 3
    yield ring
    ring.close()


def push(ring: Ring, number: int, producer: int = 0) -> int:
    slot = ring.reserve()
    assert slot is not None
    ring.buffer(slot, 1)[0] = number
    ring.publish(slot, 1, producer=producer, number=number)
    return slot


def take(ring: Ring) -> int | None:
    slot = ring.take()
    if slot is None:
        return None
    number = int(ring.buffer(slot, 1)[0])
    ring.release(slot)
    return number


def test_batches_come_in_the_order_in_which_their_slots_were_reserved(ring):
    for number in (1, 2, 3):
        push(ring, number)
    assert take(ring) == 1
    push(ring, 4)  # into the first slot
    assert [take(ring) for _ in range(4)] == [2, 3, 4, None]


def test_a_full_ring_has_no_slot(ring):
    for number in (1, 2, 3):
        push(ring, number)
    assert ring.reserve() is None
    take(ring)
    assert ring.reserve() is not None


def test_another_process_sees_a_batch_only_when_it_is_published(ring, tmp_path):
    other = Ring(tmp_path, "train")
    slot = ring.reserve()
    assert (ring.table.states[slot], other.take()) == (FILLING, None)
    ring.publish(slot, 1, producer=0, number=1)
    assert ring.table.states[slot] == FULL
    assert other.take() == slot and ring.take() is None
    assert ring.table.states[slot] == TAKING
    other.close()


def test_a_slot_that_was_being_filled_is_empty_when_its_process_has_died(ring, tmp_path):
    other = Ring(tmp_path, "train")
    for _ in range(2):
        push(ring, 1)
    slot = other.reserve()
    assert ring.reserve() is None
    other.locks.close()  # as the kernel does
    assert ring.reserve() == slot


def test_a_batch_that_was_being_taken_is_there_again_when_its_process_has_died(ring, tmp_path):
    other = Ring(tmp_path, "train")
    push(ring, 7)
    assert other.take() is not None and ring.take() is None
    other.locks.close()
    assert take(ring) == 7


@pytest.mark.parametrize(("act", "state"), [("reserve", EMPTY), ("take", FULL)])
def test_a_slot_that_is_given_back_has_its_state_from_before(ring, act, state):
    if act == "take":
        push(ring, 1)
    slot = getattr(ring, act)()
    ring.give_back()
    ring.give_back()
    assert ring.table.states[slot] == state


def test_the_newest_batch_of_a_producer_and_the_end_of_all_are_known(ring):
    push(ring, 4, producer=1)
    push(ring, 9, producer=2)
    with ring.exclusive:
        assert (ring.newest(1), ring.newest(2), ring.newest(0)) == (4, 9, 0)
        assert not ring.is_empty()
    assert take(ring) == 4 and take(ring) == 9
    with ring.exclusive:
        assert ring.is_empty()
    assert (ring.table.pushed[1], ring.table.pushed[2]) == (4, 9), "how far each producer was is kept"


def test_a_slot_grows_to_its_largest_batch(ring):
    assert ring.reserved_bytes(0) == 0
    ring.buffer(0, 10)[:] = 7
    first = ring.reserved_bytes(0)
    assert ring.buffer(0, first + 1)[:10].tolist() == [7] * 10
    assert ring.reserved_bytes(0) > first
    with file_limit(1000), pytest.raises(SharedMemoryFull, match=r"a batch \(smaller batches or a lower high_water"):
        ring.buffer(1, 10_000)


@pytest.mark.parametrize("name", ["", "a/b", "..", "ä", "x" * 65])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(InvalidArgument, match="cannot name a feed"):
        Ring(tmp_path, name)


def test_a_feed_of_a_run_that_has_ended_says_so(ring, tmp_path):
    assert not ring.is_gone
    with pytest.raises(InvalidArgument, match=r"is gone: its host has ended"):
        Ring(tmp_path / "gone", "train")


def test_a_table_is_read_without_taking_part(ring, tmp_path):
    assert read_table(tmp_path / "feed-other") is None
    assert read_table(ring.folder) is None, "no producer has registered"
    ring.table.producers[0] = 1
    push(ring, 1)
    copy = read_table(ring.folder)
    assert copy is not None and (copy.states, copy.batches[0]) == ([FULL, EMPTY, EMPTY], 1)
