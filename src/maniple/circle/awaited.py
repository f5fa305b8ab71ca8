"""Awaited: those who knock at one circle while all who belong to it wait for them in another."""

from maniple.circle.shared import Shared


def see_to_awaited(circle: Shared, other: Shared) -> None:
    """Called while this worker waits in circle `other`: let those in who knock here, and make newcomers' parcels.

    Nobody who belongs here makes a call here before the awaited ones have come there, so all find them in the next one.
    """
    here = circle.roster
    if not here.is_current or not here.meeting:
        return
    table, meeting = here.table, here.meeting
    news = [r for r in range(table.height) if table.knocked(r) and not table.first(r) and _is_awaited(other, r)]
    if news:
        with table.alone():
            belonging = [r for r in here.members() if r == here.rank or table.is_alive(r)]
            if all(table.count(r) == meeting and _has_come(other, r) for r in belonging):
                for rank in news:
                    if not table.first(rank):
                        table.admit(rank, meeting + 1)
        table.bell.ring()
    circle.greet()


def _is_awaited(circle: Shared, rank: int) -> bool:
    """This worker does not go on in `circle` before that one has come."""
    roster = circle.roster
    if roster.is_in:
        return rank in roster.members(roster.meeting) and not _has_come(circle, rank)
    return not roster.table.is_founded and rank < circle.world and not _has_come(circle, rank)


def _has_come(circle: Shared, rank: int) -> bool:
    roster = circle.roster
    if roster.is_in:
        return roster.table.count(rank) >= roster.meeting
    return rank == roster.rank or (roster.table.holder(rank) >= 0 and roster.table.is_alive(rank))
