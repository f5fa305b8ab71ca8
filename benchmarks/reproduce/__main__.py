"""Does it pay? Seconds and samples to a target for every rule, beside one process and DistributedDataParallel.

    python benchmarks/reproduce              # the fast part: one seed, the main contestants, about 8 minutes
    python benchmarks/reproduce --full       # tune every contestant by the same grid, then three seeds: about 2 hours
    python benchmarks/reproduce --tables     # the tables of Platoon, Parallel-training and Synkhronos: 15 minutes
    python benchmarks/reproduce --report     # write docs/results.md and its pictures again

Every result is written to docs/results.json (the full part) or benchmarks/results/reproduce.json (the fast part) as
soon as it is measured; a run that was interrupted continues where it stopped. Each contestant has a separate process
session, since Linux gives every session an equal share of the processors. Run it on an otherwise idle machine.

The grid: the learning rate of the task times 1/2, 1 and 2, for workers each with the task's batch for every worker
and with that batch divided among them; then, for rules with a period, 3 and 30 steps beside the default of 10 (for
Downpour, 3 and 10 beside 1); then, for EASGD, alpha = 0.2 beside "auto". Each is chosen by the seconds to the target on
seed 100, which no result uses. One process on all cores takes the settings of one on one core.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pool_batches import speed_ups
from report import ALL_CORES, ALONE, DDP, TUNING_SEED, write_report
from tasks import FILES, TASKS, TIMED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FULL, FAST = ROOT / "docs" / "results.json", ROOT / "benchmarks" / "results" / "reproduce.json"
LEARNING_RATES = (0.5, 1.0, 2.0)
DEADLINE_S = 600.0
CORES = sorted(os.sched_getaffinity(0))
# Rules with the periods that are tried, the default first; None: at each step, without a choice.
PERIODS: dict[str, tuple[int, ...] | None] = {
    "bsp": None,
    "localsgd": (10, 3, 30),
    "easgd": (10, 3, 30),
    "asgd": (10, 3, 30),
    "downpour": (1, 3, 10),
    "msync:m=1": None,
    "easgd:sync=true": (10, 3, 30),
    "downpour:sync=true": (1, 3, 10),
}
CONTESTANTS = (ALONE, ALL_CORES, DDP, *PERIODS)
MAIN = (ALONE, ALL_CORES, DDP, "bsp", "localsgd", "easgd")


@dataclass(frozen=True)
class Setting:
    """What one contestant trains with."""

    lr: float = 1.0  # times the task's
    split: bool | None = None  # divide the task's batch among the workers, so that all workers together have it
    every: int | None = None
    alpha: str | None = None


@dataclass(frozen=True)
class Case:
    """One training run."""

    task: str
    contestant: str
    workers: int
    setting: Setting
    seed: int
    data: str = ""
    epochs: int | None = None  # those of the task

    @property
    def key(self) -> str:
        """The name of its result."""
        setting = ",".join(f"{name}={value}" for name, value in asdict(self.setting).items() if value is not None)
        return (
            f"{self.task}{f'({self.data})' if self.data else ''}/{self.contestant}/{self.workers}/{setting}/{self.seed}"
        )


class Results:
    """The measured curves, in a file that is complete after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}

    def add(self, case: Case, found: dict[str, Any]) -> None:
        """Store a result."""
        self.runs[case.key] = asdict(case) | found
        self.save()

    def save(self) -> None:
        """Write the file, beside the old one first."""
        machine = {"cores": len(CORES), "python": sys.version.split()[0], "load": os.getloadavg()[0]}
        self.path.parent.mkdir(exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"machine": machine, "runs": self.runs}, indent=0))
        beside.replace(self.path)


def command_of(case: Case, out: Path, runs: Path) -> tuple[list[list[str]], list[dict[str, str]]]:
    """The commands of a case, and the variables of each."""
    script = [str(HERE / "train.py"), case.task, "--seed", str(case.seed), "--lr", str(case.setting.lr)]
    script += ["--out", str(out)] + (["--data", case.data] if case.data else [])
    script += ["--epochs", str(case.epochs)] if case.epochs else []
    script += ["--split"] if case.setting.split else []
    if case.contestant in {ALONE, ALL_CORES}:
        threads = len(CORES) if case.contestant == ALL_CORES else 1
        return [[sys.executable, *script, "--threads", str(threads)]], [{}]
    if case.contestant == DDP:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.workers)}
        command = [sys.executable, *script, "--way", "ddp"]
        return [command] * case.workers, [shared | {"RANK": str(rank)} for rank in range(case.workers)]
    name, _, options = case.contestant.partition(":")
    options = ",".join(filter(None, [options, f"alpha={case.setting.alpha}" if case.setting.alpha else ""]))
    rule = f"{name}:{options}" if options else name
    command = [
        str(Path(sys.executable).with_name("maniple")),
        "run",
        "--quiet",
        "-n",
        str(case.workers),
        "--rule",
        rule,
    ]
    command += ["--runs", str(runs), "--seed", str(case.seed)]
    if case.setting.every is not None:
        command += ["--every", str(case.setting.every)]
    return [[*command, *script, "--way", "maniple"]], [{}]


def measure(case: Case) -> dict[str, Any]:
    """Train once; return the curve, and the seconds and samples to the target (None if it was not reached)."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        out = folder / "curve.json"
        commands, variables = command_of(case, out, folder / "runs")
        with (folder / "log").open("w") as log:
            processes = [
                subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)
                for command, own in zip(commands, variables, strict=True)
            ]
        if len(processes) == len(CORES):  # bound to a core each, as `maniple run` binds its workers
            for process, core in zip(processes, CORES, strict=True):
                os.sched_setaffinity(process.pid, {core})
        try:
            codes = [process.wait(DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30)
        text = (folder / "log").read_text()
        if any(codes) and "Diverged" in text:  # with a learning rate that is too large for this contestant
            return {"curve": [], "metric": "", "target": 0, "seconds": None} | time_to_target([], "", 0)
        if any(codes) or not out.exists():
            raise RuntimeError(f"{case.key} ended with {codes}:\n{text[-3000:]}")
        found = json.loads(out.read_text())
    return found | time_to_target(found["curve"], found["metric"], found["target"])


def time_to_target(curve: list[list[float]], metric: str, target: float) -> dict[str, Any]:
    """When the median of three consecutive values reaches the target, interpolated between them."""
    sign = 1 if metric == "accuracy" else -1
    values = [sign * value for _, _, value in curve]
    smooth = [statistics.median(values[max(0, i - 1) : i + 2]) for i in range(len(values))]
    at = next((i for i, value in enumerate(smooth) if value >= sign * target), None)
    found: dict[str, Any] = {"to_target_s": None, "to_target_samples": None, "final": curve[-1][2] if curve else None}
    if at is not None:
        share = 1.0 if at == 0 else (sign * target - smooth[at - 1]) / max(1e-12, smooth[at] - smooth[at - 1])
        before = curve[max(0, at - 1)]
        found["to_target_s"] = before[0] + share * (curve[at][0] - before[0])
        found["to_target_samples"] = round(before[1] + share * (curve[at][1] - before[1]))
    return found


class Runner:
    """Measures cases that are not known yet, with progress on the terminal."""

    def __init__(self, results: Results) -> None:
        self.results, self._count, self._start = results, 0, time.monotonic()

    def run(self, case: Case) -> dict[str, Any]:
        """Return the result of a case, measured now or before."""
        if case.key not in self.results.runs:
            begin = time.monotonic()
            self.results.add(case, measure(case))
            self._count += 1
            found = self.results.runs[case.key]
            reached = "not reached" if found["to_target_s"] is None else f"{found['to_target_s']:6.2f} s"
            minutes = (time.monotonic() - self._start) / 60
            final = "diverged" if found["final"] is None else f"{found['metric']} {found['final']:.4f} at the end"
            seconds = time.monotonic() - begin
            print(f"{minutes:5.1f} min  {case.key:<60} {reached:>12}  {final} ({seconds:.0f} s)", flush=True)
        return self.results.runs[case.key]

    def tuned(self, case: Case) -> Setting:
        """The best setting of a contestant: learning rate first, then period, then alpha."""

        def best(settings: list[Setting]) -> Setting:
            def cost(setting: Setting) -> tuple[float, float]:
                found = self.run(replace(case, setting=setting, seed=TUNING_SEED))
                final = float("inf") if found["final"] is None else found["final"]
                return (found["to_target_s"] or float("inf"), -final if found["metric"] == "accuracy" else final)

            return min(settings, key=cost)

        splits = (None,) if case.workers == 1 else (None, True)
        chosen = best([Setting(lr, split) for lr, split in itertools.product(LEARNING_RATES, splits)])
        if periods := PERIODS.get(case.contestant):
            chosen = best([chosen, *(replace(chosen, every=every) for every in periods[1:])])
        if case.contestant.startswith("easgd"):
            chosen = best([chosen, replace(chosen, alpha="0.2")])
        return chosen


def play(runner: Runner, options: argparse.Namespace) -> None:
    """Measure all cases; the seeds of all contestants of a task are interleaved."""
    for task in options.tasks:
        for data in data_of(task, options.data):
            workers = options.workers
            cases = [Case(task, name, 1 if name in {ALONE, ALL_CORES} else workers, Setting(), 0, data)
                     for name in options.contestants]  # fmt: skip
            chosen = {case.contestant: runner.tuned(case) if options.full else Setting()
                      for case in cases if case.contestant != ALL_CORES}  # fmt: skip
            chosen[ALL_CORES] = chosen.get(ALONE, Setting())
            for seed, case in itertools.product(range(options.seeds), cases):
                runner.run(replace(case, setting=chosen[case.contestant], seed=seed))


def play_tables(runner: Runner, seeds: int) -> None:
    """Measure the tables of the systems that came before: times of a fixed number of samples, not of learning."""
    every_10 = Setting(every=10, alpha="0.5")
    for seed in range(seeds):
        runner.run(Case("reviews", ALONE, 1, Setting(), seed, epochs=1))
        for workers in (1, 2, 3, 4):
            runner.run(Case("reviews", "easgd", workers, every_10, seed, epochs=1))
        for task in TIMED:
            runner.run(Case(task, ALONE, 1, Setting(), seed, epochs=1))
            for rule, workers in itertools.product(("bsp", "easgd"), (2, 4)):
                runner.run(Case(task, rule, workers, every_10 if rule == "easgd" else Setting(), seed, epochs=1))
    if "pool" not in runner.results.runs:
        runner.results.runs["pool"] = {"task": "pool", "rows": speed_ups()}
        runner.results.save()


def data_of(task: str, folder: Path | None) -> list[str]:
    """The files that replace generated data; "" for the generated data itself."""
    if folder is None:
        return [""]
    return [str(path) for name in FILES.get(task, ()) if (path := folder / f"{name}.npz").exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="tune all contestants, and use three seeds")
    parser.add_argument("--tables", action="store_true", help="measure the tables of earlier systems")
    parser.add_argument("--report", action="store_true", help="only write docs/results.md again")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="all, or the main ones in the fast part")
    parser.add_argument("--workers", type=int, default=2, help="workers of rules and of DDP (2)")
    parser.add_argument("--seeds", type=int, help="3, or 1 in the fast part")
    parser.add_argument("--data", type=Path, help="a folder with mnist.npz, cifar10.npz, imdb.npz ... to use instead")
    options = parser.parse_args()
    options.contestants = options.contestants or list(CONTESTANTS if options.full else MAIN)
    options.seeds = options.seeds or (3 if options.full or options.tables else 1)
    if options.data is not None and not any(data_of(task, options.data) for task in options.tasks):
        names = ", ".join(f"{name}.npz" for task in options.tasks for name in FILES.get(task, ()))
        parser.error(f"--data {options.data} has none of the files {names or '(these tasks read no files)'}")
    results = Results(FULL if options.full or options.tables or options.report else FAST)
    if not options.report:
        print(f"results: {results.path.relative_to(ROOT)}; {len(results.runs)} runs are known", flush=True)
        if options.workers > len(CORES):
            print(f"{options.workers} workers share {len(CORES)} cores: they cannot be faster than {len(CORES)}.")
        if options.tables:
            play_tables(Runner(results), options.seeds)
        else:
            play(Runner(results), options)
    write_report(results.runs, to_docs=results.path == FULL)


if __name__ == "__main__":
    main()
