"""Throughput of a feed, compared with the memory bandwidth.

One producer pushes batches to two workers, which are processes that only take batches: through shared memory, and over
TCP on loopback. Interleaved with it in the same run: the copies that every queue needs, in one process and without a
queue, in and out of shared memory, through 8 slots in turn (as many as the queue has) and through one.
The time of a round is from the first push until all batches are taken. GB/s is bytes of batches per second.

    python benchmarks/feed.py [--sizes 0.02 2 20]
"""

import argparse
import mmap
import os
import secrets
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maniple.center import Segment
from maniple.controller import Controller
from maniple.environment import Environment, shared_memory
from maniple.feed.local_feed import Batches, LocalConsumer, LocalProducer
from maniple.feed.remote_feed import RemoteConsumer, RemoteProducer
from maniple.feed.ring import FeedBatch, Ring
from maniple.host.server import Server
from measure import report

WORKERS, SLOTS = 2, 8
TOKEN = "of the benchmark"


def fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def bare(x: np.ndarray, slots: list[np.ndarray], own: np.ndarray, count: int) -> None:
    """Copy a batch in and out, without a queue."""
    for i in range(count):
        slot = slots[i % len(slots)]
        np.copyto(slot, x)
        np.copyto(own, slot)


def drain(source: LocalConsumer | RemoteConsumer) -> None:
    for _ in Batches("bench", source):
        pass


def serve(environment: Environment, listener: socket.socket) -> None:
    Server(environment.replace(token=TOKEN), Controller()).run([listener])


class Contest:
    """One feed with its workers, over one transport."""

    def __init__(self, segment: Path, name: str, environment: Environment | None) -> None:
        def work() -> None:
            drain(LocalConsumer(segment, name) if environment is None else RemoteConsumer(environment, name))

        self.pids = [fork(work) for _ in range(WORKERS)]
        self.sink: LocalProducer | RemoteProducer
        if environment is None:
            self.sink = LocalProducer(Environment(segment=segment, producer=0), name, SLOTS)
        else:
            self.sink = RemoteProducer(environment, name, SLOTS)
        self.ring = Ring(segment, name)

    def run(self, x: np.ndarray, count: int) -> None:
        """Push `count` batches, and wait until the workers have taken them."""
        for _ in range(count):
            self.sink.put(FeedBatch.of([x]))
        while any(self.ring.table.state[:SLOTS].tolist()):
            time.sleep(1e-4)

    def close(self) -> None:
        self.sink.end(None)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.sink.close()
        self.ring.close()


def measure(megabytes: float, rounds: int) -> dict:
    """Measure one row: batches of one size."""
    x = np.random.default_rng(1).random(int(megabytes * 1e6 / 4), np.float32)
    count = int(min(1000, max(20, 400 / megabytes)))
    slots = [np.frombuffer(mmap.mmap(-1, x.nbytes), np.float32) for _ in range(SLOTS)]
    own = np.empty_like(x)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for part in ("events", "center", "logs"):
            (run / part).mkdir()
        segment = Segment.create(shared_memory(), secrets.token_hex(8), run)
        listener = socket.create_server(("127.0.0.1", 0))
        server = fork(lambda: serve(Environment(segment=segment.path, run=run, world=0), listener))
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            near = Contest(segment.path, "near", None)
            far = Contest(segment.path, "far", Environment(address=address, token=TOKEN))
            seconds = interleave(
                {
                    "feed": lambda: near.run(x, count),
                    "bare": lambda: bare(x, slots, own, count),
                    "bare, 1 slot": lambda: bare(x, slots[:1], own, count),
                    "TCP": lambda: far.run(x, count),
                },
                rounds,
            )
            near.close()
            far.close()
        finally:
            os.kill(server, 9)
            os.waitpid(server, 0)
            segment.remove()
    speed = {name: [count * x.nbytes / 1e9 / value for value in values] for name, values in seconds.items()}
    middle = {name: statistics.median(values) for name, values in speed.items()}

    def ratio(a: str, b: str) -> float:
        return statistics.median(one / other for one, other in zip(speed[a], speed[b], strict=True))

    return {
        "MB": megabytes,
        **{f"{name} GB/s": value for name, value in middle.items()},
        "microseconds": 1e6 * statistics.median(seconds["feed"]) / count,
        "feed / bare": ratio("feed", "bare"),
        "feed / bare, 1 slot": ratio("feed", "bare, 1 slot"),
        "TCP / bare": ratio("TCP", "bare"),
    }


def interleave(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round, after a warm-up; ratios are computed within a round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, act in contestants.items():
            begin = time.perf_counter()
            act()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.02, 2, 20], help="sizes of a batch in MB")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    rows = [measure(size, options.rounds) for size in options.sizes]
    report("feed", "A feed: 1 producer, 2 workers", rows, slots=SLOTS, rounds=options.rounds)


if __name__ == "__main__":
    main()
