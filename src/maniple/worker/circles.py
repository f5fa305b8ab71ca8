"""The circles of one worker: one for its own calls, one for each replica whose rule meets there."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maniple.adapters import Adapter, gpu_of
from maniple.circle.choice import Offer, agree, choose_circle, open_circle
from maniple.contracts import Circle
from maniple.errors import InvalidArgument, say
from maniple.place import Place
from maniple.record import Events, Folder
from maniple.rules import Rule
from maniple.worker.seat import Seat

if TYPE_CHECKING:
    from maniple.circle.shared import Shared

_CALLS = "circle-calls"


class Circles:
    """Opens circles, and lets them know of each other."""

    def __init__(self, place: Place, seat: Seat | None, events: Events, on_wait: Callable[[], None]) -> None:
        self._place, self._seat, self._events, self._on_wait = place, seat, events, on_wait
        self._opened: dict[str, Circle] = {}
        self._replicas: list[Shared] = []
        self._is_told = False

    @property
    def calls(self) -> Circle:
        """The circle of the script's own calls."""
        return self._opened.get(_CALLS) or self.open(_CALLS)

    def open(self, name: str) -> Circle:
        """The circle `name`, as the workers' place allows."""
        engine = choose_circle(self._place)
        return self._open(name, engine)

    def open_for(self, name: str, model: Adapter, rule: Rule, *, obstacle: str = "") -> Circle:
        """The circle of a model that is shared: gradients on GPUs of one machine meet over NCCL, where that can be.

        Values that are averaged every few steps pass through host memory, and meet there.
        """
        place, engine = self._place, choose_circle(self._place)
        is_open = engine == "shared" and place.circle is None and place.world > 1
        if not is_open or rule.meets != "gradients" or rule.quorum:
            return self._open(name, engine)
        assert self._seat is not None and self._seat.segment is not None
        gpu, why = gpu_of(model.device)
        offer = Offer(model.device, gpu, obstacle or why)
        decided = agree(
            place, self._seat.segment, name, offer, restarts=lambda: _asked_restarts(place), on_wait=self._on_wait
        )
        if gpu and decided.reason and place.rank == 0:
            say(f"gradients meet in host memory, not over NCCL: {decided.reason}")
        return self._open(name, decided.engine, self._seat.segment.path)

    def _open(self, name: str, engine: str, folder: Path | None = None) -> Circle:
        if not self._is_told:
            self._is_told = True
            self._tell(engine)
        circle = self._opened[name] = self._make(engine, name, folder)
        circle.report_long_waits(self._report_wait)
        return circle

    @property
    def is_used(self) -> bool:
        """This worker has met others, or meant to."""
        return bool(self._opened)

    def _report_wait(self, whom: Sequence[int], waited_s: float, is_over: bool) -> None:
        self._events.write("waited" if is_over else "waiting", **{"for": list(whom), "seconds": waited_s})

    def close(self) -> None:
        """Leave all circles."""
        for circle in self._opened.values():
            circle.close()

    def _make(self, engine: str, name: str, folder: Path | None) -> Circle:
        return self._make_shared(name) if engine == "shared" else open_circle(self._place, name, folder)

    def _make_shared(self, name: str) -> Circle:
        from maniple.circle.shared import Shared

        assert self._seat is not None and self._seat.segment is not None
        place, is_ours = self._place, name == _CALLS
        circle = Shared(
            self._seat.segment,
            name,
            rank=place.rank,
            world=place.world,
            deadline_s=place.circle_deadline_s,
            is_boundary=is_ours,
        )
        circle.reserve(1)  # at least for numbers, however full the memory is when they are first sent around
        circle.roster.on_wait = functools.partial(self._wait_in, circle) if is_ours else self._on_wait
        if not is_ours:  # who waits in the other one for this worker must be seen, also before its first call there
            calls = self.calls
            assert isinstance(calls, Shared)
            circle.roster.others.append(calls.roster)
            self._replicas.append(circle)
        return circle

    def _wait_in(self, calls: "Shared") -> None:
        """This worker waits in the circle of calls, perhaps for one who needs it in that of a replica."""
        from maniple.circle.awaited import see_to_awaited

        for circle in self._replicas:
            see_to_awaited(circle, calls)
        self._on_wait()

    def _tell(self, engine: str) -> None:
        self._events.write("circle", engine=engine, world=self._place.world)
        if self._place.rank == 0 and self._place.world > 1:
            why = f" ({self._place.launcher})" if self._place.launcher else ""
            say(f"{self._place.world} workers meet in the circle {engine}{why}")


def _asked_restarts(place: Place) -> int:
    """How often the launcher may start a worker again, as the run folder says."""
    with suppress(OSError, InvalidArgument):
        asked = Folder(place.run).read().get("asked") if place.run is not None else None
        return int((asked or {}).get("restarts") or 0)
    return 0
