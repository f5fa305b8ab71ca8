"""Compare digits.py on one worker and on two: the script of `make demo`.

    python examples/demo.py

Every number in the table is measured by this program. Without maniple, the script runs twice, on one thread and on all
cores, and the workers are compared with the faster of the two. The accuracy of the center is that of the saved file.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from maniple.record import read_events

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "digits.py"


def train_alone(*options: str) -> tuple[float, float]:
    """Run the script without maniple; return samples/s and test accuracy, parsed from its output."""
    child, found = subprocess.Popen([sys.executable, SCRIPT, *options], stdout=subprocess.PIPE, text=True), None
    for line in child.stdout or ():
        print(line, end="", flush=True)
        found = re.search(r"([\d,]+) samples/s, test accuracy ([\d.]+)%", line) or found
    if child.wait() or not found:
        sys.exit(f"demo: {SCRIPT} alone ended with exit code {child.returncode}; what it printed is above.")
    return float(found[1].replace(",", "")), float(found[2]) / 100


def train_together(runs: Path, workers: int, *options: str) -> Path:
    """Run the script on several workers, with their progress on this terminal; return the run folder."""
    name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    command = [sys.executable, "-m", "maniple.cli", "run", "-n", str(workers), "--rule", "easgd"]
    done = subprocess.run([*command, "--name", name, "--runs", runs, SCRIPT, *options], check=False)
    if done.returncode:
        sys.exit(f"demo: maniple run ended with exit code {done.returncode}; its reason is above.")
    return runs / name


def measure(run: Path) -> tuple[float, dict[int, float]]:
    """Return the samples/s of all workers together, and the test accuracy of each worker's replica."""
    rows = [read_events(path) for path in sorted((run / "events").glob("worker-?.jsonl"))]
    last = [[row for row in worker if row["event"] == "progress"][-1] for worker in rows]
    own = {row["worker"]: row["own_accuracy"] for worker in rows for row in worker if "own_accuracy" in row}
    return sum(row["samples"] for row in last) / max(row["elapsed"] for row in last), own


def center_accuracy(run: Path) -> float:
    """Return the test accuracy of the saved center."""
    from safetensors.torch import load_file  # imported here because PyTorch takes seconds to load

    import digits

    parameters = load_file(run / "center" / "center-0.safetensors")
    model = digits.build(hidden=len(parameters["0.bias"]))
    model.load_state_dict(parameters)
    return digits.accuracy(model, *digits.load()[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of workers (2)")
    parser.add_argument("--epochs", type=int, default=100, help="passes over the images (100)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="parent of the run folder (runs)")
    args = parser.parse_args()
    # Ctrl-C also reaches the child, which cleans up and exits. This process ignores it and waits for the child.
    signal.signal(signal.SIGINT, lambda *_: None)

    print("1. alone: python examples/digits.py", flush=True)
    one_thread, accuracy = train_alone("--epochs", str(args.epochs))
    print("2. alone, on all cores, for a quarter as long: python examples/digits.py --threads 0", flush=True)
    all_cores, _ = train_alone("--epochs", str(max(1, args.epochs // 4)), "--threads", "0")
    print(f"3. on {args.workers} workers: maniple run -n {args.workers} --rule easgd examples/digits.py", flush=True)
    run = train_together(args.runs.resolve(), args.workers, "--epochs", str(args.epochs))
    together, own = measure(run)

    table = Table("", "samples/s", "test accuracy", title="one experiment, alone and shared", title_justify="left")
    table.add_row("alone, 1 thread", f"{one_thread:,.0f}", f"{accuracy:.1%}")
    table.add_row("alone, all cores", f"{all_cores:,.0f}", "")
    table.add_row(f"{args.workers} workers: the center", f"{together:,.0f}", f"{center_accuracy(run):.1%}")
    for rank, value in sorted(own.items()):
        table.add_row(f"  worker {rank}'s own replica", "", f"{value:.1%}")
    table.add_row("speed-up over the faster one alone", f"{together / max(one_thread, all_cores):.2f} x", "")
    Console().print(table)
    if (cores := len(os.sched_getaffinity(0))) < args.workers:
        print(f"Cores: {cores}, workers: {args.workers}. Workers that share a core cannot be faster.")
    print(f"run folder: {run}")


if __name__ == "__main__":
    main()
