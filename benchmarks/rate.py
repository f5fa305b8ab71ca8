"""Check that a rate limit holds over a network: three workers at one host for a minute, each over a slow link.

    limit     RateLimit(0.25) on a link where an exchange takes about a quarter of a second
    slower    the same on a link of half the speed: half as many exchanges
    traffic   RateLimit(bytes_per_s=...) on the first link

The share is the time spent in exchanges divided by the time since the first step, computed after every exchange.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from maniple.record import read_events
from measure import report, wait_for

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.process.proxy import Proxy  # noqa: E402 - needs the path above

MANIPLE = Path(sys.executable).with_name("maniple")
SPEED = 8e6  # bytes/s of the first link, both directions together
BYTES_PER_S = 500_000
SCRIPT = """
import sys, time
import numpy as np, maniple
worker = maniple.join()
params = {f"p{i}": np.zeros(25_000, "float32") for i in range(10)}
replica = worker.share(params, rule=maniple.EASGD(0.5), pace=eval(sys.argv[1]))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    time.sleep(0.005)
    replica.step()
"""


def main() -> None:
    """Print the table and write it to results/rate.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    cases = {
        "limit": (SPEED, "maniple.RateLimit(0.25)"),
        "slower": (SPEED / 2, "maniple.RateLimit(0.25)"),
        "traffic": (SPEED, f"maniple.RateLimit(bytes_per_s={BYTES_PER_S})"),
    }
    with tempfile.TemporaryDirectory() as folder, hosted(Path(folder)) as run:
        (Path(folder) / "train.py").write_text(SCRIPT)
        address = json.loads((run / "host.json").read_text())["address"]
        proxies = {name: Proxy(address, bytes_per_s=speed) for name, (speed, _) in cases.items()}
        rows = []
        workers = []
        for name, (_, pace) in cases.items():
            command = [MANIPLE, "join", "--token-file", run / "token", proxies[name].address, "train.py", pace]
            workers.append(subprocess.Popen([*map(str, command), str(seconds)], cwd=folder))
            wait_for((run / "events" / f"worker-{len(workers) - 1}.jsonl").exists)
        for worker in workers:
            worker.wait(seconds + 60)
        for rank, name in enumerate(cases):
            rows.append(measured(run, rank, name, seconds))
    report("rate", "a rate limit over slow lines", rows, seconds=seconds)


def measured(run: Path, rank: int, name: str, seconds: float) -> dict[str, object]:
    """Compute the figures of one worker from its rows."""
    rows = read_events(run / "events" / f"worker-{rank}.jsonl")
    begin = next(row["timestamp"] for row in rows if row["event"] == "share")
    exchanges = [row for row in rows if row["event"] == "exchange" and row["start"] < begin + seconds]
    spent, worst = 0.0, 0.0
    weights = [1 + row.get("skipped", 0) for row in exchanges]  # rows of many exchanges are thinned
    for row, weight in zip(exchanges, weights, strict=True):
        spent += weight * row["duration"]
        worst = max(worst, (spent - 0.25 * (row["end"] - begin)) / row["duration"])
    elapsed = exchanges[-1]["end"] - begin
    return {
        "case": name,
        "exchanges": sum(weights),
        "seconds each": spent / sum(weights),
        "share of time": spent / elapsed,
        "most above 0.25, in exchanges": worst,
        "bytes/s": sum(weight * row["bytes"] for row, weight in zip(exchanges, weights, strict=True)) / elapsed,
    }


@contextlib.contextmanager
def hosted(folder: Path):
    """Start a host, and yield its run folder."""
    host = subprocess.Popen([str(MANIPLE), "serve", "-q", "--name", "rate", "--snapshot-every", "0"], cwd=folder)
    run = folder / "runs" / "rate"
    try:
        wait_for((run / "host.json").exists)
        yield run
    finally:
        os.kill(host.pid, signal.SIGTERM)
        host.wait(30)


if __name__ == "__main__":
    main()
