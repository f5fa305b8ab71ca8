"""Collectives in shared memory while members die, rejoin and come late: what all of them saw must agree."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maniple.center import Segment
from maniple.memory.segment import DEAD
from tests.waiting import PATIENCE_S, await_

PROGRAM = Path(__file__).with_name("collectives_chaos.py")


class Ring:
    """The processes of one group, and what they have recorded."""

    def __init__(self, segment: Segment, folder: Path, world: int, *, rounds: int, size: int, quorum: int = 0) -> None:
        self.segment, self.folder, self.world = segment, folder, world
        self._args = [str(world), str(rounds), str(size), str(quorum)]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = 0

    def start(self, rank: int) -> None:
        self.segment.renew(rank)
        self._starts += 1
        with (self.folder / f"{self._starts:03d}-{rank}").open("wb") as file:
            command = [sys.executable, str(PROGRAM), str(self.segment.path), str(rank), *self._args]
            self.processes[rank] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait()
        self.segment.mark(rank, DEAD)

    def said(self) -> dict[str, list[list[str]]]:
        """The whole lines of each process, one after the other; one that is killed may leave a part of one."""
        whole = {path.name: path.read_text().rpartition("\n")[0] for path in sorted(self.folder.iterdir())}
        return {name: [line.split() for line in text.splitlines()] for name, text in whole.items()}

    def rounds_of(self, rank: int) -> int:
        newest = max(name for name in self.said() if int(name[4:]) == rank)
        return sum(words[0] == "round" for words in self.said()[newest])

    def wait(self) -> None:
        for process in self.processes.values():
            assert process.wait(PATIENCE_S) == 0, self.said()

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def check(said: dict[str, list[list[str]]]) -> dict[int, set[int]]:
    """All who were at a round saw the same workers in it and the sum of their values, whole; gives who was where."""
    seen: dict[int, set[str]] = {}
    for lines in said.values():
        for words in lines:
            assert words[0] in {"entered", "again", "round"}, words
            if words[0] == "round":
                seen.setdefault(int(words[1]), set()).add(" ".join(words[2:]))
    everywhere: dict[int, set[int]] = {}
    for meeting, views in seen.items():
        (view,) = views
        ranks, low, high = view.split()
        everywhere[meeting] = {int(rank) for rank in ranks.split(",")}
        expected = sum(rank + 1 for rank in everywhere[meeting])
        assert float(low) == float(high) == expected, (meeting, view)
    return everywhere


def kill_and_restart(ring: Ring, victim: int, pause_s: float) -> None:
    """Kill a worker in the middle of its rounds, see the others go on, start it again, see it come back."""
    others = [rank for rank in range(ring.world) if rank != victim]

    def has_moved(rank: int, before: int) -> bool:
        return ring.rounds_of(rank) > before or ring.processes[rank].poll() == 0

    await_(lambda: has_moved(victim, 3))
    time.sleep(pause_s)
    ring.kill(victim)
    counts = {rank: ring.rounds_of(rank) for rank in others}
    await_(lambda: all(has_moved(rank, counts[rank]) for rank in others))
    ring.start(victim)
    await_(lambda: has_moved(victim, 0))


@pytest.mark.parametrize("size", [40_000, 3_000_000])
def test_rounds_stay_whole_while_workers_are_killed_and_come_back(segment: Segment, tmp_path: Path, size: int):
    ring = Ring(segment, tmp_path, 3, rounds=1500 if size < 1_000_000 else 250, size=size)
    dice = random.Random(size)
    try:
        for rank in range(3):
            ring.start(rank)
        for _ in range(3):
            kill_and_restart(ring, dice.randrange(3), dice.random() * 0.02)
        ring.wait()
        met = check(ring.said())
        assert {2, 3} <= {len(ranks) for ranks in met.values()}
    finally:
        ring.end()


def test_first_comers_do_not_wait_for_the_last_if_so_few_are_enough(segment: Segment, tmp_path: Path):
    ring = Ring(segment, tmp_path, 3, rounds=60, size=1000, quorum=2)
    try:
        for rank in range(3):
            ring.start(rank)
        ring.wait()
        met = check(ring.said())
        alone = {meeting for meeting, ranks in met.items() if len(ranks) < 2}  # after the others had made all theirs
        assert len(met) - len(alone) >= 60
        assert not alone or min(alone) > max(set(met) - alone)
        assert any(2 not in ranks for ranks in met.values())  # the slow one was passed over,
        assert any(words[0] == "again" for lines in ring.said().values() for words in lines)  # and came again
    finally:
        ring.end()
