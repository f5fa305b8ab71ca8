"""Duration of `maniple plot`, `compare` and `export` for a large run: 64 workers with 10,000 rows each.

    python benchmarks/plot.py [--workers 64] [--events 10000] [--repeats 5]

The run is synthetic (see made_up.py). Seconds are medians over new processes, after a warm-up; memory is the peak of
all of them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made_up import make_up
from measure import report

MANIPLE = Path(sys.executable).with_name("maniple")
COMMANDS = {
    "plot, PNG": ("plot", "RUN", "-o", "plot.png"),
    "plot, SVG": ("plot", "RUN", "-o", "plot.svg"),
    "plot, HTML": ("plot", "RUN", "-o", "plot.html"),
    "compare": ("compare", "RUN", "--target", "0.5"),
    "export, CSV": ("export", "RUN", "--to", "csv", "-o", "table-NEW"),
}


def timed(words: tuple[str, ...], run: Path, number: int) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and peak MB of one command."""
    given = [word.replace("RUN", str(run)).replace("NEW", str(number)) for word in words]
    begin = time.perf_counter()
    process = subprocess.Popen([MANIPLE, *given], cwd=run.parent, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"maniple {' '.join(given)} ended with exit code {process.returncode}")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        run = make_up(Path(folder) / "run", workers=args.workers, events=args.events)
        megabytes = sum(path.stat().st_size for path in run.glob("events/*")) / 1e6
        for number in range(args.repeats + 1):
            for name, words in COMMANDS.items():
                measured = timed(words, run, number)
                if number:
                    found[name].append(measured)
    rows = [
        {
            "command": name,
            "seconds": statistics.median(wall for wall, _, _ in all_),
            "of a processor": statistics.median(used for _, used, _ in all_),
            "peak MB": max(peak for _, _, peak in all_),
        }
        for name, all_ in found.items()
    ]
    report("plot", f"{args.workers} workers with {args.events:,} rows each", rows, megabytes=round(megabytes))


if __name__ == "__main__":
    main()
