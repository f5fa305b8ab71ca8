"""Cost of a viewer for training, and time to the first content of the page for a large run.

cost    two workers train, in alternating turns with and without a viewer that follows the page's updates. Samples per
        second of both, in one run: medians and their ratio. The viewer reads what a browser reads; a browser draws on
        the viewer's machine
page    the record of 64 workers with 10,000 rows each: seconds until the page has its first complete content, its
        size, and the peak memory
"""

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import report, wait_for

MANIPLE = Path(sys.executable).with_name("maniple")
WORKERS, ROWS = 64, 10_000
SCRIPT = """
import sys, time
import numpy as np, maniple
worker = maniple.join()
x = np.random.default_rng(worker.rank).normal(size=(256, 256)).astype("float32")
params = {"w": np.zeros((256, 256), "float32")}
replica = worker.share(params, rule=maniple.EASGD(0.5))
replica.samples = 32
while not worker.should_stop:
    for _ in range(5):
        y = x @ params["w"] + x
    params["w"] += 1e-6 * y
    replica.step()
    worker.log(loss=float(abs(y[0, 0])))
"""


def main() -> None:
    """Print the tables and write them to results/watch_cost.json and results/watch_page.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a turn in seconds")
    parser.add_argument("--turns", type=int, default=12, help="number of turns of each kind")
    parser.add_argument("--only", choices=["cost", "page"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "cost":
            write_record(Path(folder) / "large")
            report("watch_page", f"the page of {WORKERS} workers x {ROWS} rows", [first_news(Path(folder) / "large")])
        if options.only != "page":
            rows = cost(Path(folder), options.seconds, options.turns)
            report("watch_cost", "training watched and not", rows, seconds=options.seconds, turns=options.turns)


def cost(folder: Path, seconds: float, turns: int) -> list[dict[str, object]]:
    """Return the samples per second of two workers, with and without a viewer, and the page's CPU use."""
    (folder / "train.py").write_text(SCRIPT)
    command = [str(MANIPLE), "run", "-n", "2", "--web", "--name", "cost", "--snapshot-every", "0", "train.py"]
    events, log = folder / "runs/cost/events", folder / "printed"
    with log.open("w") as printed:
        run = subprocess.Popen(command, cwd=folder, stdout=printed, stderr=printed)
    rates: dict[str, list[float]] = {"not watched": [], "watched": []}
    used: dict[str, list[float]] = {kind: [] for kind in rates}
    try:
        wait_for(lambda: all(newest(events, rank) for rank in range(2)))
        address = re.findall(r"page: (http\S+)", log.read_text())[0]
        pid = page_pid(run.pid)
        for turn in range(turns + 1):
            for kind, found in rates.items():
                rate, cores = measured(events, seconds, pid, address if kind == "watched" else None)
                if turn:
                    found.append(rate)
                    used[kind].append(cores)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    ratios = [watched / alone for alone, watched in zip(rates["not watched"], rates["watched"], strict=True)]
    return [
        {
            "case": kind,
            "samples/s": median,
            "of not watched": median / medians["not watched"],
            "median of ratios": statistics.median(ratios) if kind == "watched" else None,
            "cores used by the page": statistics.median(used[kind]),
        }
        for kind, median in medians.items()
    ]


def page_pid(launcher: int) -> int:
    """Return the pid of the process that serves the page of a run."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return next(pid for pid in pids if b"maniple.watch" in Path(f"/proc/{pid}/cmdline").read_bytes())


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measured(events: Path, seconds: float, page: int, address: str | None) -> tuple[float, float]:
    """Return the samples per second of both workers together, and the cores that the page's process used."""
    viewer = None if address is None else subprocess.Popen([sys.executable, "-c", VIEWER, address])
    try:
        time.sleep(1.5)  # the viewer starts, and first receives the complete content
        before, begin, used = [newest(events, rank) for rank in range(2)], time.monotonic(), cpu_s(page)
        time.sleep(seconds)
        cores = (cpu_s(page) - used) / (time.monotonic() - begin)
        after = [newest(events, rank) for rank in range(2)]
    finally:
        if viewer is not None:
            viewer.kill()
            viewer.wait()
    pairs = zip(before, after, strict=True)
    return sum((b["samples"] - a["samples"]) / (b["elapsed"] - a["elapsed"]) for a, b in pairs), cores


VIEWER = """
import os, sys, urllib.request
os.nice(19)
address, _, token = sys.argv[1].partition("/?token=")
request = urllib.request.Request(address + "/updates", headers={"Authorization": "Bearer " + token})
with urllib.request.urlopen(request) as news:
    while news.readline():
        pass
"""


def newest(events: Path, rank: int) -> dict[str, float] | None:
    """Return the newest `progress` row of a worker."""
    path = events / f"worker-{rank}.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200_000))
        rows = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"event":"progress"')]
    return json.loads(rows[-1]) if rows else None


def first_news(run: Path) -> dict[str, object]:
    """Return the duration of the first update in a new process, and its size."""
    code = (
        "import sys, time, resource\n"
        "from maniple.monitor import RunState\nfrom maniple.record import RunFolder\nfrom pathlib import Path\n"
        "from maniple.watch.updates import Updates\n"
        "idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "begin, cpu = time.perf_counter(), time.process_time()\n"
        "story = RunState(RunFolder(Path(sys.argv[1])))\nstory.refresh()\nread = time.perf_counter()\n"
        "news = Updates().next(story, {})\nend = time.perf_counter()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(read - begin, end - read, time.process_time() - cpu, len(news), idle, peak)"
    )
    found = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
        found.append([float(word) for word in done.stdout.split()])
    read, told, cpu, size, idle, peak = (statistics.median(column) for column in zip(*found, strict=True))
    rows = sum(path.stat().st_size for path in (run / "events").iterdir())
    return {
        "record MB": rows / 1e6,
        "read s": read,
        "told s": told,
        "ready s": read + told,
        "of a processor s": cpu,
        "news MB": size / 1e6,
        "memory MB": peak / 1e3,
        "of it for the story": (peak - idle) / 1e3,
    }


def write_record(run: Path, workers: int = WORKERS, rows: int = ROWS, begin: float | None = None) -> None:
    """Write the record of a synthetic run: workers of unequal speed, of which one dies and comes back."""
    (run / "events").mkdir(parents=True)
    begin = time.time() - rows / 4 if begin is None else begin
    about = {
        "asked": {"script": "train.py", "workers": workers},
        "node": "node-01",
        "exit_code": 0,
        "lineage": "0" * 16,
    }
    (run / "run.json").write_text(json.dumps(about | {"started": begin}))
    host = [{"event": "start", "timestamp": begin - 1, "workers": workers}]
    for rank in range(workers):
        host.append({"event": "joined", "timestamp": begin, "worker": rank, "node": "node-01", "live": rank + 1})
        with (run / "events" / f"worker-{rank}.jsonl").open("w") as file:
            for row in worker_rows(rank, rows, begin):
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
    host.append({"event": "exit", "timestamp": begin + rows / 5, "worker": workers - 1, "exit_code": -9, "died": True})
    (run / "events" / "host.jsonl").write_text("".join(json.dumps(row) + "\n" for row in host))


def worker_rows(rank: int, rows: int, begin: float):
    """Yield the rows of one worker: of four rows, two are exchanges, one is a log, one is progress."""
    chance = random.Random(rank)
    speed, spent, waited = chance.uniform(0.7, 1.3), 0.0, 0.0
    head = {"worker": rank, "node": f"node-{rank // 8:02}"}
    yield {"event": "join", "timestamp": begin, **head}
    yield {"event": "share", "timestamp": begin, "rule": "EASGD(alpha='auto')", "pace": "Every(10)", "worker": rank}
    for number in range(1, rows // 4 + 1):
        at, step = number * 1.0, int(20 * number * speed)
        spent += chance.uniform(0.01, 0.12)
        waited += chance.uniform(0.0, 0.1)
        when = begin + at
        for _ in range(2):
            yield {
                "event": "exchange",
                "timestamp": when,
                "step": step,
                "duration": 0.03,
                "bytes": 80_000,
                "staleness": 9,
            }
        loss = 2.5 * math.exp(-number / 700) + 0.3 + chance.gauss(0, 0.06)
        yield {"event": "log", "timestamp": when, "worker": rank, "step": step, "loss": loss}
        yield {
            "event": "progress", "timestamp": when, "step": step, "samples": 64 * step, "elapsed": at,
            "sync_share": spent / at, "exchange": spent, "data": waited, "others": 0.0, "exchanges": 2 * number,
            "rounds": 0, "bytes": 160_000 * number, "staleness": chance.uniform(20, 90), "ages": [0, 0, 0, 0, 0, 1, 1],
            "cpu": 0.9 * at * speed, "memory": int(4e8 + 1e7 * chance.random()),
        }  # fmt: skip


if __name__ == "__main__":
    main()
