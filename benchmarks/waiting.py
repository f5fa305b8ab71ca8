"""Ways to wait at a barrier in shared memory: spinning, yielding, or sleeping on a futex.

Processes repeat a barrier: each increments its own row and waits until all rows have the same count. The contestants
differ only in the wait:

    awake    spin
    yield    spin with sched_yield, so that other processes on this core run first
    asleep   sleep at once on a futex
    bell     ours (maniple.memory.locks): spin with sched_yield for up to 1 ms, then sleep
    bell 5   the same with 5 ms, as in collectives with a core for each worker

The cases are: two processes without any work; two processes, of which one works 5 ms and the other waits for it; twice
as many processes as cores, each with 1 ms of work. Each contestant takes its turn in each round; figures are medians.
`over` is the time of a barrier beyond the work, in microseconds; `busy` is the share of a core that the first process,
which arrives early in the second case, uses.

    python benchmarks/waiting.py [--rounds 9]
"""

import argparse
import mmap
import os
import signal
import statistics
import time
from typing import Any

import numpy as np

from maniple.memory.locks import Futex
from measure import report

CORES = len(os.sched_getaffinity(0))
PATIENCE_S = 0.2  # maximum sleep; the cost of a lost wake-up
DEADLINE_S = 60  # then the kernel ends a process that is stuck at a barrier
WAYS = ("awake", "yield", "asleep", "bell", "bell 5")
AWAKE_S = {"asleep": 0.0, "bell": 1e-3, "bell 5": 5e-3}
CASES: list[tuple[str, list[float], int]] = [  # milliseconds of work of each process, number of barriers
    ("2, no work", [0, 0], 2000),
    ("2, one works 5 ms", [0, 5], 60),
    (f"{2 * CORES} on {CORES} cores, 1 ms each", [1] * (2 * CORES), 150),
]


class Meeting:
    """Rows of counters and a futex, in memory that forked processes share."""

    def __init__(self, way: str, count: int) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self.rows = np.frombuffer(self._memory, np.int64)[8 : 8 + count]
        self._bell, self._way = Futex(self._memory, 0), way

    def come(self, rank: int, k: int) -> None:
        self.rows[rank] = k
        self._bell.ring()
        while True:
            rings = self._bell.count
            if self.rows.min() >= k:
                return
            self._wait(rings)

    def _wait(self, rings: int) -> None:
        if self._way == "yield":
            os.sched_yield()
        elif self._way != "awake":
            self._bell.wait(rings, PATIENCE_S, awake_s=AWAKE_S[self._way])


def attend(meeting: Meeting, rank: int, work_ms: float, times: int) -> tuple[float, float]:
    """Pass the barrier repeatedly; return the wall seconds and the CPU seconds."""
    if rank < CORES == len(meeting.rows):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    meeting.come(rank, 1)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for k in range(2, times + 2):
        work(work_ms / 1e3)
        meeting.come(rank, k)
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def work(seconds: float) -> None:
    """Use this many seconds of CPU time."""
    end = time.process_time() + seconds
    while seconds and time.process_time() < end:
        pass


def play(way: str, works: list[float], times: int) -> tuple[float, float]:
    """Return the seconds per barrier, and the share of a core that rank 0 has used."""
    meeting, results = Meeting(way, len(works)), np.frombuffer(mmap.mmap(-1, 4096))
    pids: list[int] = []
    for rank, work_ms in enumerate(works):
        if (pid := os.fork()) == 0:
            signal.alarm(DEADLINE_S)
            results[2 * rank : 2 * rank + 2] = attend(meeting, rank, work_ms, times)
            os._exit(0)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise RuntimeError(f"{way}: a process has waited for more than {DEADLINE_S} s, or failed")
    return float(results[0]) / times, float(results[1] / results[0])


def measure(case: str, works: list[float], times: int, rounds: int) -> dict[str, Any]:
    """Measure one row: all contestants in turn."""
    least = max(*works, sum(works) / CORES) / 1e3
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(play(way, works, times))
    over = {f"{way}: over": 1e6 * (statistics.median(a for a, _ in found[way]) - least) for way in WAYS}
    busy = {f"{way}: busy": statistics.median(b for _, b in found[way]) for way in WAYS}
    return {"processes": case, **over, **busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = [measure(*case, options.rounds) for case in CASES]
    report("waiting", "Waiting for others: microseconds over the work, and the share of a core", rows)


if __name__ == "__main__":
    main()
