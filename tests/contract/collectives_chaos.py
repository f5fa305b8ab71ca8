"""A member of collectives in shared memory, for tests: makes rounds, and records the result of each.

    python collectives_chaos.py SEGMENT RANK WORLD ROUNDS SIZE QUORUM

A round's vector holds `rank + 1` in all places, weighted by 1. One line per round: the number of its last barrier, who
was in it, and the smallest and largest value. A worker that joins late writes the state that it got: the others' count
of rounds.
"""

import sys
import time
from pathlib import Path
from typing import Any

from maniple.center import Segment
from maniple.collectives.call import PassedOver
from maniple.collectives.shared_memory import SharedMemoryCollectives
from maniple.memory.segment import LEFT, LIVE


def main() -> None:
    path, *numbers = sys.argv[1:]
    rank, world, rounds, size, quorum = map(int, numbers)
    segment = Segment(Path(path))
    segment.mark(rank, LIVE)
    collectives = SharedMemoryCollectives(
        segment, "collectives-0", rank=rank, world=world, deadline_s=30, admit_after_calls=False
    )
    resident = collectives.reside({"float32": size})
    flat = resident.flat["float32"]
    made, membership = 0, collectives.membership

    def write_state(path: Path, _: int) -> None:
        path.with_suffix(".part").write_text(str(made))
        path.with_suffix(".part").rename(path)

    def enter() -> int:
        while True:
            membership.leave()
            try:
                if membership.join(write_state) and (received := membership.await_state()) is not None:
                    return int(received.read_text())
                return made
            except (PassedOver, FileNotFoundError):
                continue

    def say(*words: Any) -> None:
        print(*words, flush=True)

    made = enter()
    say("entered", made)
    while made < rounds:
        membership.provide_state()
        flat[:] = rank + 1
        options = {"quorum": quorum} if quorum else {}
        try:
            found = resident.all_reduce("sum", weight=1.0, **options)
        except PassedOver:
            made = enter()
            say("again", made)
            continue
        made += 1
        say("round", membership.barrier, ",".join(map(str, found.ranks)), flat.min(), flat.max())
        if quorum and rank == world - 1:
            time.sleep(0.01)
    collectives.close()
    segment.mark(rank, LEFT)


main()
