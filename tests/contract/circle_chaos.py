"""A worker of a circle in shared memory, for tests: makes rounds, and writes down what came out of each.

    python circle_chaos.py SEGMENT RANK WORLD ROUNDS SIZE QUORUM

A round's vector holds `rank + 1` in all places, weighted by 1. One line per round: the number of its last meeting, who
was in it, and the smallest and largest value. A worker that enters late writes what it got in its parcel: the count of
rounds of the others.
"""

import sys
import time
from pathlib import Path
from typing import Any

from maniple.center import Segment
from maniple.center.segment import LEFT, LIVE
from maniple.circle.absence import PassedOver
from maniple.circle.shared import Shared


def main() -> None:
    path, *numbers = sys.argv[1:]
    rank, world, rounds, size, quorum = map(int, numbers)
    segment = Segment(Path(path))
    segment.mark(rank, LIVE)
    circle = Shared(segment, "circle-0", rank=rank, world=world, deadline_s=30, is_boundary=False)
    resident = circle.reside({"float32": size})
    flat = resident.flat["float32"]
    made = 0

    def parcel(meeting: int) -> None:
        path = circle.parcel(meeting)
        path.with_suffix(".part").write_text(str(made))
        path.with_suffix(".part").rename(path)

    def enter() -> int:
        while True:
            circle.roster.leave()
            try:
                if circle.enter() and (told := circle.await_parcel()) is not None:
                    return int(told.read_text())
                return made
            except (PassedOver, FileNotFoundError):
                continue

    def say(*words: Any) -> None:
        print(*words, flush=True)

    circle.roster.on_newcomers = parcel
    made = enter()
    say("entered", made)
    while made < rounds:
        circle.greet()
        flat[:] = rank + 1
        options = {"quorum": quorum} if quorum else {}
        try:
            found = resident.all_reduce("sum", weight=1.0, **options)
        except PassedOver:
            made = enter()
            say("again", made)
            continue
        circle.forget_parcel()
        made += 1
        say("round", circle.roster.meeting, ",".join(map(str, found.ranks)), flat.min(), flat.max())
        if quorum and rank == world - 1:
            time.sleep(0.01)
    circle.close()
    segment.mark(rank, LEFT)


main()
