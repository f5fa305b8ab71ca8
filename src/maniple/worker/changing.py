"""Changing: the settings that a person changes while the run goes on, followed between two steps."""

from collections.abc import Sequence
from typing import Any

from maniple.changes import Changes, follow, own_settings, touches
from maniple.record import Events
from maniple.worker.replica import Replica
from maniple.worker.seat import Seat

_NOTHING = Changes()


class Changing:
    """What this worker has followed so far."""

    def __init__(self, seat: Seat | None, events: Events) -> None:
        self._seat, self._events = seat, events
        self._followed = _NOTHING if seat is None else seat.changes

    def mind(self, replicas: Sequence[Replica]) -> None:
        """Follow what is new. It is called after each step, before the exchange that may come next."""
        if self._seat is not None and (changes := self._seat.changes) is not self._followed:
            before, self._followed = self._followed, changes
            for replica in replicas:
                self._follow(replica, changes.since(before))

    def begin(self, replica: Replica) -> None:
        """Follow with a model that is shared later all that was changed before."""
        self._follow(replica, self._followed.since(_NOTHING))

    def _follow(self, replica: Replica, settings: dict[str, Any]) -> None:
        rule = replica.rule
        if not touches(rule, settings):
            return
        row: dict[str, Any] = {"step": replica.steps, "number": self._followed.number, "settings": settings}
        own = own_settings(rule, settings)
        if schedules := [name for name in own if callable(getattr(rule, name, None))]:
            row["schedules"] = schedules  # of the script, which give way
        try:
            replica.pace = follow(settings, rule, replica.pace)
        except Exception as error:  # of a rule of the user's own, which the host does not know
            row["refused"] = str(error)
        self._events.write("changed", **row, rule=repr(rule), pace=repr(replica.pace))
