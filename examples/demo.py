"""Does it pay here? Train rotated_digits.py alone and on two workers, to the same accuracy: the script of `make demo`.

    python examples/demo.py

Every number is measured now, from the first training step on. The workers are compared with the faster of two runs
without maniple, on one thread and on all cores.
"""

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAYS = 1.1  # a smaller speed-up may be noise


class Result(NamedTuple):
    """What the script prints at its end."""

    target_s: float  # infinite if the target was not reached
    accuracy: float
    seconds: float


def train(*command: str | Path) -> Result:
    """Run a command with its output on this terminal, and return what the script has measured."""
    child, found = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), None
    for line in child.stdout or ():
        print(line, end="", flush=True)
        found = re.search(r"% after ([\d.]+|inf) s; ([\d.]+)% after ([\d.]+) s", line) or found
    if child.wait() or not found:
        sys.exit(f"demo: {' '.join(map(str, command))} ended with exit code {child.returncode}; the reason is above.")
    return Result(float(found[1]), float(found[2]) / 100, float(found[3]))


def saved_accuracy(run: Path) -> float:
    """The test accuracy of the center that a run has saved: of the model that its user gets."""
    from safetensors.torch import load_file

    import rotated_digits  # imported here because PyTorch takes seconds to load

    model = rotated_digits.build()
    model.load_state_dict(load_file(run / "center" / "center-0.safetensors"))
    return rotated_digits.accuracy(model, *rotated_digits.load(2_000, 1400, 1797, seed=2).tensors)


def verdict(alone: list[Result], together: Result, workers: int) -> str:
    """Say in one or two sentences whether it pays."""
    fastest = min(one.target_s for one in alone)
    if math.isinf(fastest):
        who = "No run has" if math.isinf(together.target_s) else f"Only the {workers} workers have"
        return f"{who} reached the target, so no speed-up is known. Try more --epochs."
    if math.isinf(together.target_s):
        return f"It does not pay here: one process has reached the target, {workers} workers have not."
    speedup = fastest / together.target_s
    fact = f"{workers} workers reach the target {speedup:.2f} times as fast as the faster one alone"
    return f"It pays: {fact}." if speedup >= PAYS else f"It does not pay here: {fact}. Are there {workers} idle cores?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of workers (2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the 20,000 images (8)")
    parser.add_argument("--target", type=float, default=0.925, help="test accuracy whose time is measured (0.925)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="parent of the run folder (runs)")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C also reaches the child, which cleans up and exits
    script = [ROOT / "examples" / "rotated_digits.py", "--epochs", str(args.epochs), "--target", str(args.target)]
    run = args.runs.resolve() / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    print("1. alone: python examples/rotated_digits.py", flush=True)
    one_thread = train(sys.executable, *script)
    print("2. alone, on all cores: python examples/rotated_digits.py --threads 0", flush=True)
    all_cores = train(sys.executable, *script, "--threads", "0")
    print(f"3. on {args.workers} workers: maniple run -n {args.workers} examples/rotated_digits.py", flush=True)
    maniple = [sys.executable, "-m", "maniple.cli", "run", "-n", str(args.workers), "--runs", run.parent]
    maniple += ["--name", run.name, "--target", f"accuracy>={args.target:g}"]
    together = train(*maniple, *script)._replace(accuracy=saved_accuracy(run))
    title = f"seconds to a test accuracy of {args.target:.1%}, and the accuracy after {args.epochs} epochs"
    table = Table("", "seconds to target", "accuracy at the end", "seconds in all", title=title, title_justify="left")
    rows = {"alone, 1 thread": one_thread, "alone, all cores": all_cores, f"{args.workers} workers": together}
    for name, one in rows.items():
        reached = "not reached" if math.isinf(one.target_s) else f"{one.target_s:.2f}"
        table.add_row(name, reached, f"{one.accuracy:.1%}", f"{one.seconds:.2f}")
    Console().print(table)
    print(verdict([one_thread, all_cores], together, args.workers), f"run folder: {run}", sep="\n")


if __name__ == "__main__":
    main()
