"""Membership of collectives in shared memory, while workers die, rejoin, are passed over, or give up."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maniple.center import Segment
from maniple.collectives.call import PassedOver
from maniple.collectives.member_table import FOREVER
from maniple.collectives.shared_memory import SharedMemoryCollectives
from maniple.errors import PeerLost
from tests.waiting import await_

from .collectives_threads import Begun, Died, collective_groups, die, open_collectives, together


class Member:
    """A worker whose newcomers begin with its count of rounds."""

    def __init__(self, collectives: SharedMemoryCollectives, wire: str = "float32") -> None:
        self.collectives, self.count = collectives, 0
        self._vectors = collectives.reside({"float32": 10}, wire=wire)
        self.membership = collectives.membership

    def write_state(self, path: Path, _: int) -> None:
        path.write_text(f"{self.count}\n")

    def enter(self) -> str:
        """How it was: "first", "admitted" with the state of the others, or "alone"."""
        if not self.membership.join(self.write_state):
            return "first"
        path = self.membership.await_state()
        if path is None:
            return "alone"
        await_(lambda: path.read_text().endswith("\n"))
        self.count = int(path.read_text())
        return "admitted"

    def round(self, *, quorum: int = 0) -> tuple[int, ...]:
        """One round; gives who was in it."""
        self.membership.provide_state()
        self._vectors.flat["float32"][:] = self.collectives.rank + 1
        options = {"quorum": quorum} if quorum else {}
        ranks = self._vectors.all_reduce("sum", **options).ranks
        assert set(self._vectors.flat["float32"].tolist()) == {sum(rank + 1.0 for rank in ranks)}
        self.count += 1
        return ranks

    def go_on(self, whom: tuple[int, ...], *, quorum: int = 0) -> None:
        """Rounds until one with all of these."""
        while self.round(quorum=quorum) != whom:
            pass

    @property
    def is_requesting(self) -> bool:
        table, rank = self.membership.table, self.collectives.rank
        return table.join_request[rank] > 0 and table.first[rank] == 0


def members(segment: Segment, world: int, **options: Any) -> list[Member]:
    """As many workers, all of them members; others may come later."""
    made = [newcomer(segment, rank, world, **options) for rank in range(world)]
    assert together([one.enter for one in made]) == ["first"] * world
    return made


def newcomer(segment: Segment, rank: int, world: int, **options: Any) -> Member:
    return Member(open_collectives(segment, rank, world, admit_after_calls=False), **options)


def close(*those: Member) -> None:
    for one in those:
        one.collectives.close()


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_newcomers_are_admitted_after_a_round_with_the_state_of_the_others(segment: Segment, wire: str):
    old = members(segment, 2, wire=wire)
    together([lambda one=one: [one.round() for _ in range(3)] for one in old])
    new = newcomer(segment, 2, 2, wire=wire)

    def come() -> str:
        how = new.enter()
        new.round()
        return how

    *_, how = together([*(lambda one=one: one.go_on((0, 1, 2)) for one in old), come])
    assert how == "admitted" and new.count == old[0].count == old[1].count > 3
    close(*old, new)


def test_first_comers_wait_for_a_newcomer_but_not_for_the_late(segment: Segment):
    """With 2 of 4 workers: 2 is late, and 3 has been let in but does not come at once."""
    *early, late = members(segment, 3)
    new = newcomer(segment, 3, 3)
    entering = Begun(new.enter)
    await_(lambda: new.is_requesting)
    together([one.round for one in (*early, late)])

    looks: set[int] = set()
    for one in early:
        one.collectives.membership.on_wait = lambda rank=one.collectives.rank: looks.add(rank)
    going = [Begun(lambda one=one: one.round(quorum=2)) for one in early]
    await_(lambda: looks == {0, 1} or all(one.is_over for one in going))
    assert entering.result() == "admitted"
    assert new.round(quorum=2) == (0, 1, 3)
    assert [one.result() for one in going] == [(0, 1, 3)] * 2

    with pytest.raises(PassedOver):
        late.round(quorum=2)
    late.collectives.membership.leave()
    returning = Begun(lambda: (late.enter(), late.round(quorum=4)))
    together([lambda one=one: one.go_on((0, 1, 2, 3), quorum=4) for one in (*early, new)])
    assert returning.result() == ("admitted", (0, 1, 2, 3))
    assert len({one.count for one in (*early, late, new)}) == 1
    close(*early, late, new)


def test_one_who_wakes_when_the_others_are_rounds_ahead_has_had_its_round(segment: Segment):
    """Its round was whole. What the others say in later ones, to which it was not waited for, is not about it."""
    *early, late = members(segment, 3)
    membership, usual = late.membership, late.membership.table.members

    def oversleep(barrier: int) -> list[int]:
        if membership.barrier == 2:  # the end of the first round
            await_(lambda: all(membership.table.arrived[rank] == 4 for rank in (0, 1)))  # that of the second
        return usual(barrier)

    membership.table.members = oversleep
    going = Begun(lambda: late.round(quorum=3))
    found = together([lambda one=one: [one.round(quorum=quorum) for quorum in (3, 2)] for one in early])
    assert found == [[(0, 1, 2), (0, 1)]] * 2
    assert going.result() == (0, 1, 2)
    with pytest.raises(PassedOver):
        late.round()
    close(*early, late)


def test_nobody_is_passed_over_while_it_still_reads_what_the_others_show(segment: Segment):
    """Worker 2 sleeps in a call, after which the others make rounds that do not wait for it."""
    *early, late = members(segment, 3)
    membership, usual = late.membership, late.membership.table.members
    looks: set[int] = set()

    def act(one: Member) -> list[int]:
        found = one.collectives.all_gather(np.array([one.collectives.rank]))
        if one is not late:
            one.round(quorum=2), one.round(quorum=2)
        return [int(x[0]) for x in found]

    def oversleep(barrier: int) -> list[int]:
        if membership.barrier == 1:
            await_(lambda: looks == {0, 1} or all(membership.table.arrived[rank] > 4 for rank in (0, 1)))
        return usual(barrier)

    membership.table.members = oversleep
    for one in early:
        one.collectives.membership.on_wait = lambda one=one: (
            one.collectives.membership.barrier > 1 and looks.add(one.collectives.rank)
        )
    assert together([lambda one=one: act(one) for one in (*early, late)]) == [[0, 1, 2]] * 3
    close(*early, late)


def test_a_partner_that_dies_in_an_exchange_leaves_the_other_without_its_array(segment: Segment):
    """Before the last piece is shown: half an array is none. The other pair has both of its own."""
    mine = collective_groups(segment, 4, admit_after_calls=False)
    arrive, x = mine[1].membership.arrive, np.ones(3 << 20)  # 24 MB, shown in 6 pieces

    def fall(*args: Any, **options: Any) -> tuple[int, ...]:
        if mine[1].membership.barrier == 3:
            raise Died
        return arrive(*args, **options)

    mine[1].membership.arrive = fall

    def act(rank: int) -> Any:
        try:
            return mine[rank].exchange_pairs(rank * x, rank ^ 1)
        except Died:
            die(mine[1])
            return "died"

    found = together([lambda rank=rank: act(rank) for rank in range(4)])
    assert found[0] is None and found[1] == "died"
    assert (found[2] == 3).all() and (found[3] == 2).all() and found[2].size == x.size
    gone = together([lambda rank=rank: mine[rank].exchange_pairs(x, rank ^ 1) for rank in (0, 2, 3)])
    assert gone[0] is None and gone[1] is not None
    for one in mine:
        one.close()


def test_one_who_was_passed_over_neither_lets_in_nor_greets(segment: Segment):
    """Worker 0 does not know it yet; its state and its count of meetings are not those of the others."""
    old = members(segment, 2)
    new = newcomer(segment, 2, 2)
    entering = Begun(new.enter)
    await_(lambda: new.is_requesting)
    memberships = [one.collectives.membership for one in old]
    admit = [membership.admit for membership in memberships]
    written: list[tuple[int, int]] = []
    for rank, membership in enumerate(memberships):
        membership.admit = lambda _: None
        membership._write_state = lambda _, barrier, rank=rank: written.append((rank, barrier))
    together([one.round for one in old])
    table, meeting = memberships[0].table, memberships[0].barrier + 1
    table.until[0] = meeting

    admit[0]((0, 1))
    assert new.is_requesting
    admit[1]((0, 1))
    assert table.first[2] == meeting
    memberships[0].provide_state()
    assert written == []
    memberships[1].provide_state()
    assert written == [(1, meeting)]

    table.until[2] = meeting  # while it waits for the others' state
    table.futex.ring()
    assert isinstance(entering.result(), PassedOver)
    close(*old, new)


def test_successor_of_a_dead_worker_is_not_dismissed_in_its_place(segment: Segment):
    """Worker 0 sees that worker 1 is dead; before it can say so, worker 2 has, and the row has a new holder."""
    made = collective_groups(segment, 3)
    table = made[0].membership.table
    usual, seen = table.lock, []
    successor: list[SharedMemoryCollectives] = []
    going: list[Begun] = []

    @contextmanager
    def lock() -> Generator[None]:
        if not seen:
            seen.append(table.is_alive(1))
            going.append(Begun(made[2].barrier))
            segment.renew(1)
            successor.append(open_collectives(segment, 1, 3))
            going.append(Begun(successor[0].barrier))
            await_(lambda: table.incarnation[1] == segment.incarnation(1) + 1)
        with usual():
            yield

    table.lock = lock
    die(made[1])
    made[0].barrier()
    assert seen == [False] and table.until[1] == FOREVER
    assert going[0].result() is None

    def go_on(collectives: SharedMemoryCollectives) -> None:
        while 1 not in collectives.ranks:
            collectives.barrier()
        collectives.barrier()

    together([lambda: go_on(made[0]), lambda: go_on(made[2])])
    assert going[1].result() is None
    for collectives in (made[0], made[2], successor[0]):
        collectives.close()


def test_round_numbers_never_decrease_and_a_group_is_founded_anew_only_once(segment: Segment):
    """All have died. The next process goes on alone, with a higher meeting; later it enters as everybody does."""
    (old,) = members(segment, 1)
    for _ in range(5):
        old.round(quorum=1)
    newest = old.collectives.membership.barrier
    die(old.collectives)
    segment.renew(0)
    first, second = newcomer(segment, 0, 1), newcomer(segment, 1, 1)
    assert first.enter() == "alone" and first.collectives.membership.barrier >= newest
    entering = Begun(lambda: (second.enter(), second.round()))
    together([lambda: first.go_on((0, 1))])
    assert entering.result() == ("admitted", (0, 1))

    first.collectives.membership.leave()  # as between two epochs, or when it was passed over
    assert second.round() == (1,)
    first.count = 0
    returning = Begun(lambda: (first.enter(), first.round()))
    together([lambda: second.go_on((0, 1))])
    assert returning.result() == ("admitted", (0, 1))
    assert first.count == second.count
    close(first, second)


def test_a_worker_that_gave_up_in_a_round_is_refused_in_the_next(segment: Segment):
    """What it has given stays whole; it cannot know what the others made of it."""
    made = collective_groups(segment, 2)
    mine = [collectives.reside({"float32": 10}) for collectives in made]

    def give_up() -> None:
        raise Died

    made[1].membership.on_wait = give_up
    mine[1].flat["float32"][:] = 5
    assert isinstance(together([lambda: mine[1].all_reduce("sum")])[0], Died)
    x = np.ones(3)
    for act in (lambda: mine[1].all_reduce("sum"), made[1].barrier, lambda: made[1].all_reduce(x, x, "sum")):
        with pytest.raises(
            PeerLost, match=r"worker 1 has given up in the middle of a round of collectives-0.*--restarts"
        ):
            act()
    made[1].close()
    (found,) = together([lambda: mine[0].all_reduce("sum")])
    assert found.ranks == (0, 1) and set(mine[0].flat["float32"].tolist()) == {5.0}
    assert mine[0].all_reduce("sum").ranks == (0,)
    made[0].close()


def test_two_newcomers_whose_members_die_before_sending_their_state_go_on_without(segment: Segment):
    """They have been let in, and wait for a state that nobody has any more."""
    (member,) = members(segment, 1)
    newcomers = [newcomer(segment, rank, 1) for rank in (1, 2)]
    entering = [Begun(one.enter) for one in newcomers]
    await_(lambda: all(one.is_requesting for one in newcomers))
    member.round()
    die(member.collectives)
    assert [one.result() for one in entering] == ["alone", "alone"]
    assert together([one.round for one in newcomers]) == [(1, 2)] * 2
    close(*newcomers)


def test_of_two_newcomers_whose_members_die_before_they_are_admitted_one_founds_the_group_anew(segment: Segment):
    (member,) = members(segment, 1)
    member.round()
    newcomers = [newcomer(segment, rank, 1) for rank in (1, 2)]
    entering = [Begun(lambda one=one: (one.enter(), one.go_on((1, 2)))) for one in newcomers]
    await_(lambda: all(one.is_requesting for one in newcomers))
    die(member.collectives)
    assert {one.result()[0] for one in entering} == {"alone", "admitted"}
    assert newcomers[0].count == newcomers[1].count
    close(*newcomers)


def test_one_who_was_passed_over_learns_it_from_a_call_by_pieces(segment: Segment):
    """The calls of synchronised norms, averaged momentum and half precision."""
    made = collective_groups(segment, 2, admit_after_calls=False)
    made[0].membership.table.until[1] = made[1].membership.barrier + 1
    x = np.ones(3, np.float32)
    for act in (
        lambda: made[1].all_reduce(x, x, "sum"),
        lambda: made[1].all_reduce(x, x, "mean", wire="bfloat16"),
        lambda: made[1].all_gather(x),
        lambda: made[1].reside({"float32": 3}, wire="bfloat16").all_reduce("mean"),
    ):
        with pytest.raises(PassedOver):
            act()
    for collectives in made:
        collectives.close()
