"""The member table of collectives: who belongs to a barrier, who is missing there, and whether the calls match."""

from collections.abc import Iterator

import pytest

from maniple.collectives.call import CollectiveCall
from maniple.collectives.member_table import CAPACITY, MemberTable
from maniple.errors import InvalidArgument


@pytest.fixture
def table(tmp_path) -> Iterator[MemberTable]:
    table = MemberTable(tmp_path / "table")
    for rank in range(3):
        table.add_row(rank)
        table.claim_row(rank, 0)
    yield table
    table.close()


def test_members_of_a_barrier_are_those_admitted_before_it_and_not_removed(table):
    table.first[0], table.first[1] = 1, 5
    table.until[0] = 7
    assert [table.members(barrier) for barrier in (1, 4, 5, 6, 7)] == [[0], [0], [0, 1], [0, 1], [1]]
    assert [table.is_member(rank) for rank in range(3)] == [False, True, False]


def test_a_member_is_missing_until_it_has_arrived(table):
    table.first[0] = table.first[1] = 1
    table.arrived[0] = 2
    assert (table.missing(2), table.missing(3)) == ([1], [0, 1])


def test_a_row_is_claimed_anew_by_a_process_that_belongs_to_no_barrier_yet(table):
    table.first[1], table.until[1], table.arrived[1] = 1, 4, 3
    table.claim_row(1, 1)
    assert (table.incarnation[1], table.members(2), table.arrived[1]) == (2, [], 3)


def test_join_requests_are_numbered(table):
    for rank in (2, 0):
        table.request_join(rank)
    assert [table.join_request[rank] for rank in range(3)] == [2, 0, 1]


def test_a_call_is_read_as_it_was_announced_and_kept_for_one_barrier_more(table):
    calls = [CollectiveCall("all_reduce", "float32", 10, "mean", weight=2.5), CollectiveCall("barrier")]
    for barrier, call in enumerate(calls, start=6):
        table.announce(1, barrier, call, barrier, 3)
    assert [table.call(1, barrier) for barrier in (6, 7)] == [calls[0]._replace(number=6), calls[1]._replace(number=7)]
    assert [table.slot[1, barrier & 1] for barrier in (6, 7)] == [6, 7]


def test_calls_are_the_same_whatever_their_weights(table):
    call = CollectiveCall("all_reduce", "float32", 10, "mean")
    for rank, weight in enumerate((1.0, 7.0)):
        table.announce(rank, 1, call._replace(weight=weight), 0, 0)
    table.announce(2, 1, call._replace(size=11), 0, 0)
    assert table.are_same([0, 1], 1) and not table.are_same([0, 1, 2], 1)


def test_a_dead_worker_arrives_with_its_last_call(table):
    call = CollectiveCall("all_reduce", "float32", 10)
    table.announce(1, 4, call, 3, 0)
    table.arrive_for(1, 5)
    assert table.arrived[1] == 5
    assert (table.call(1, 5), table.slot[1, 1]) == (call._replace(number=5), 3)


def test_all_processes_see_one_table_and_who_of_them_is_alive(table, tmp_path):
    other = MemberTable(tmp_path / "table")
    other.show_life(2)
    other.first[2] = 1
    assert table.is_alive(2) and not table.is_alive(1) and table.members(1) == [2]
    other.close()
    assert not table.is_alive(2)


def test_a_rank_beyond_the_table_is_refused_with_a_remedy(table):
    with pytest.raises(InvalidArgument, match=f"ranks below {CAPACITY}.*--collectives torch"):
        table.add_row(CAPACITY)
    assert list(table.ranks) == [0, 1, 2]
