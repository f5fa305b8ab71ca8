"""Cost of leases per training step: the same loop over a worker's sampler and over a plain permutation.

    bare    a new permutation in each pass, of which each worker takes its part, like any sampler with one shuffle

    local   workers that share memory with their host; remote: over loopback TCP
    for     `for index in sampler`, with batches collected by hand; batches: `sampler.batches(size)`

The added cost is the CPU time of the training thread, which other programs on the machine hardly affect; the wall time
includes the thread's waits. Steps are empty, so no lease can be requested in the background: for a remote worker this
is the worst case.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import report

MANIPLE = Path(sys.executable).with_name("maniple")
COUNT = 100_000
SCRIPT = """
import json, os, sys, time
import numpy as np, maniple
worker = maniple.join()
count, passes, workers = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sampler = worker.sampler(count)

def fresh():
    return np.random.default_rng([1, len(found)]).permutation(count)[: count // workers]

def by_hand(indices, size):
    batch = []
    for index in indices:
        batch.append(index)
        if len(batch) == size:
            yield batch
            batch = []

def cut(order, size):
    for start in range(0, len(order), size):
        yield order[start : start + size]

def clocks():
    return np.array([time.thread_time(), time.perf_counter()])

def timed(batches, tell):
    begin, steps = clocks(), 0
    for batch in batches():
        steps += 1
        if tell:
            sampler.stepped()
            if steps % 10 == 0:
                sampler.committed()
        if steps % 50 == 0:
            end, until = clocks(), steps  # waiting for others after the last step is not a cost of leases
    return list((end - begin) / until * 1e6) if steps >= 50 else None

open(f"ready-{worker.rank}", "w").close()
while not all(os.path.exists(f"ready-{rank}") for rank in range(workers)):
    time.sleep(0.001)
found = {}
for _ in range(passes):
    for size in (32, 128):
        for name, loops in {
            "for": (lambda: by_hand(fresh().tolist(), size), lambda: by_hand(sampler, size)),
            "batches": (lambda: cut(fresh(), size), lambda: sampler.batches(size)),
        }.items():
            bare, leased = timed(loops[0], False), timed(loops[1], True)
            found.setdefault(f"{name} {size}", []).append((bare, leased))
with open(f"found-{worker.rank}.json", "w") as file:
    json.dump(found, file)
"""


def main() -> None:
    """Print the table and write it to results/leases.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=15)
    passes = parser.parse_args().passes
    rows = []
    for where in (local, remote):
        for workers in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "train.py").write_text(SCRIPT)
                where(Path(folder), workers, ["train.py", str(COUNT), str(passes), str(workers)])
                rows += measured(Path(folder), where.__name__, workers)
    report("leases", "what leases add to a training step", rows, samples=COUNT, passes=passes)


def local(folder: Path, workers: int, script: list[str]) -> None:
    """Run workers that `maniple run` starts."""
    command = [str(MANIPLE), "run", "-q", "-n", str(workers), "--name", "leases", "--snapshot-every", "0", *script]
    subprocess.run(command, cwd=folder, check=True, timeout=300)


def remote(folder: Path, workers: int, script: list[str]) -> None:
    """Run workers that join over loopback TCP."""
    with hosted(folder) as run:
        address = json.loads((run / "host.json").read_text())["address"]
        command = [str(MANIPLE), "join", "--token-file", str(run / "token"), address, *script]
        started = [subprocess.Popen(command, cwd=folder) for _ in range(workers)]
        for worker in started:
            if worker.wait(300):
                raise subprocess.CalledProcessError(worker.returncode, command)


def measured(folder: Path, where: str, workers: int) -> list[dict[str, object]]:
    """Return the medians over all passes of all workers."""
    found = [json.loads(path.read_text()) for path in folder.glob("found-*.json")]
    rows = []
    for loop in found[0]:
        pairs = [pair for one in found for pair in one[loop] if pair[1] is not None]
        (bare, bare_wall), (leased, leased_wall) = (
            [statistics.median(pair[side][clock] for pair in pairs) for clock in (0, 1)] for side in (0, 1)
        )
        rows.append(
            {
                "where": where,
                "workers": workers,
                "loop": loop,
                "bare, us/step": bare,
                "leased, us/step": leased,
                "added, us": leased - bare,
                "% of a 1 ms step": (leased - bare) / 10,
                "added wall, us": leased_wall - bare_wall,
            }
        )
    return rows


@contextlib.contextmanager
def hosted(folder: Path):
    """Start a host, and yield its run folder."""
    host = subprocess.Popen([str(MANIPLE), "serve", "-q", "--name", "leases", "--snapshot-every", "0"], cwd=folder)
    run = folder / "runs" / "leases"
    try:
        deadline = time.monotonic() + 60
        while not (run / "host.json").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the host did not listen within a minute")
            time.sleep(0.05)
        yield run
    finally:
        os.kill(host.pid, signal.SIGTERM)
        host.wait(30)


if __name__ == "__main__":
    main()
