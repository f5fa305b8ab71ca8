"""Does it pay? Seconds and samples to a target for every rule, beside one process and DistributedDataParallel.

    python benchmarks/reproduce              # the fast part: one seed, the main contestants as tuned before, 9 minutes
    python benchmarks/reproduce --full       # tune every contestant by the same grid, then three seeds: 2.5 hours
    python benchmarks/reproduce --places     # a slow worker, and a network of 1 Gbit/s between the workers: 30 minutes
    python benchmarks/reproduce --lengths    # the final quality of shorter and longer runs: 40 minutes
    python benchmarks/reproduce --tables     # the tables of Platoon, Parallel-training and Synkhronos: 15 minutes
    python benchmarks/reproduce --report     # write docs/results.md and its pictures again

Every result is written to docs/results.json (the full part) or benchmarks/results/reproduce.json (the fast part) as
soon as it is measured; a run that was interrupted continues where it stopped. Each contestant has a separate process
session, since Linux gives every session an equal share of the processors. Run it on an otherwise idle machine.

The grid: the learning rate of the task times 1/2, 1 and 2; for workers also with the task's batch divided among them,
times 1/2 and 1; beyond these by factors of 2 while the best is at the edge. Then, for rules with a period, 3 and 30
steps beside the default of 10 (for Downpour, 3 and 10 beside 1); then, for EASGD, alpha = 0.2 beside "auto"; for DDP,
which computes what bsp does and takes its learning rate and batch, processes that are not bound to a core each. One
process is also tried with twice the batch, which is what workers with whole batches have together, with the learning
rate times 1 and 2: a larger batch may pay more than a second worker. Each is chosen on seed 100, which no result uses,
by the samples to the target times the median time of a sample, since one run may meet a slow moment of the machine. One
process on all cores takes the settings of one on one core. The rules that a newcomer would try are also measured
untuned: with the learning rate and the batch of one process, and the rule's own defaults.

The speed of a machine changes from hour to hour, so compare only what was measured together: --again repeats what
is known already, and the report warns of rows that are faster than one process in the same table could explain.
"""

import argparse
import contextlib
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grid_tables import OF_LENGTHS, TUNING_SEED
from pool_batches import speed_ups
from report import ALL_CORES, ALONE, DDP, NEWCOMERS, TWICE, TWICE_ALL_CORES, label_of, write_report
from tasks import FILES, TASKS, TIMED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FULL, FAST = ROOT / "docs" / "results.json", ROOT / "benchmarks" / "results" / "reproduce.json"
LEARNING_RATES, OF_DIVIDED_BATCHES, OF_DOUBLE_BATCHES = (0.5, 1.0, 2.0), (0.5, 1.0), (1.0, 2.0)
MOST_FACTOR = 8.0  # of the learning rate, beyond which the grid is not extended
DEADLINE_S = 600.0
PLACES = ("unequal", "network")
LENGTHS = {"digits": (3, 48), "images": (2, 32), "reviews": (1, 9), "characters": (2, 4)}  # epochs beside the usual
LINK_MBIT, LINK_ROUND_TRIP_S = 1000, 0.0005  # an ordinary local network
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
# One process on all cores, and the one on one core from which it takes its settings.
SINGLE = {ALL_CORES: ALONE, TWICE_ALL_CORES: TWICE}
CONTESTANTS = (ALONE, ALL_CORES, TWICE, TWICE_ALL_CORES, DDP, *PERIODS)
MAIN = (ALONE, ALL_CORES, DDP, "bsp", "localsgd", "easgd")


@dataclass(frozen=True)
class Setting:
    """What one contestant trains with."""

    lr: float = 1.0  # times the task's
    split: bool | None = None  # divide the task's batch among the workers, so that all workers together have it
    every: int | None = None
    alpha: str | None = None
    unbound: bool | None = None  # the processes of DDP are not bound to a core each


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
    place: str = ""  # "unequal": worker 1 takes twice as long for each step; "network": each worker is a machine

    @property
    def key(self) -> str:
        """The name of its result."""
        setting = ",".join(f"{name}={value}" for name, value in asdict(self.setting).items() if value is not None)
        key = f"{self.group}/{self.contestant}/{self.workers}/{setting}/{self.seed}"
        return key + (f"/{self.epochs} epochs" if self.epochs else "") + (f"/{self.place}" if self.place else "")

    @property
    def label(self) -> str:
        """The name of its row and of its settings."""
        return label_of(self.contestant, self.workers)

    @property
    def group(self) -> str:
        """The task and its data, whose contestants are compared with each other."""
        return self.task + (f" ({Path(self.data).stem})" if self.data else "")


class Results:
    """The measured curves, in a file that is complete after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}, "chosen": {}}
        self.runs: dict[str, Any] = known["runs"]
        self.chosen: dict[str, Any] = known["chosen"]  # the settings of the tuned contestants of each task

    def add(self, case: Case, found: dict[str, Any]) -> None:
        """Store a result."""
        self.runs[case.key] = asdict(case) | found
        self.save()

    def save(self) -> None:
        """Write the file, beside the old one first."""
        machine = {"cores": len(CORES), "python": sys.version.split()[0], "load": os.getloadavg()[0]}
        self.path.parent.mkdir(exist_ok=True)
        beside = self.path.with_suffix(".new")
        runs = ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in self.runs.items())  # a line each
        head = f'{{"machine": {json.dumps(machine)},\n"chosen": {json.dumps(self.chosen)},\n'
        beside.write_text(f'{head}"runs": {{\n{runs}\n}}}}\n')
        beside.replace(self.path)


def command_of(
    case: Case, out: Path, runs: Path, master: str = "127.0.0.1"
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """The commands of a case, and the variables of each; `master` is the address of worker 0."""
    script = [str(HERE / "train.py"), case.task, "--seed", str(case.seed), "--lr", str(case.setting.lr)]
    script += ["--out", str(out)] + (["--data", case.data] if case.data else [])
    script += ["--epochs", str(case.epochs)] if case.epochs else []
    script += ["--split"] if case.setting.split else []
    script += ["--slow", "2"] if case.place == "unequal" else []
    if is_single(case.contestant):
        script += ["--threads", str(len(CORES) if case.contestant in SINGLE else 1)]
        script += ["--batches", "2"] if case.contestant in {TWICE, TWICE_ALL_CORES} else []
        return [[sys.executable, *script]], [{}]
    name, _, options = case.contestant.partition(":")
    options = ",".join(filter(None, [options, f"alpha={case.setting.alpha}" if case.setting.alpha else ""]))
    rule, every = f"{name}:{options}" if options else name, case.setting.every
    if case.contestant == DDP or case.place == "network":  # a process on each machine, as torchrun starts them
        shared = {"MASTER_ADDR": master, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(case.workers)}
        if case.place == "network":  # else gloo takes the address of this machine's name, which no other reaches
            shared |= {"GLOO_SOCKET_IFNAME": "eth0"}
        if case.contestant != DDP:
            shared |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MANIPLE_RULE": rule, "MANIPLE_RUNS": str(runs)}
            shared |= {"MANIPLE_PACE": f"every:{every}"} if every is not None else {}
        command = [sys.executable, *script, "--way", "ddp" if case.contestant == DDP else "maniple"]
        return [command] * case.workers, [shared | {"RANK": str(rank)} for rank in range(case.workers)]
    maniple = [str(Path(sys.executable).with_name("maniple")), "run", "--quiet", "-n", str(case.workers)]
    maniple += ["--rule", rule, "--runs", str(runs), "--seed", str(case.seed)]
    maniple += ["--every", str(every)] if every is not None else []
    return [[*maniple, *script, "--way", "maniple"]], [{}]


def is_single(contestant: str) -> bool:
    """Whether a contestant is one process without workers."""
    return contestant in SINGLE or contestant in SINGLE.values()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def network_of(case: Case) -> Iterator[tuple[str, list[list[str]]]]:
    """The address of worker 0, and what runs the command of each worker on its machine."""
    if case.place != "network":
        yield "127.0.0.1", [[]] * case.workers
        return
    sys.path.append(str(ROOT))
    from tests.cluster.conftest import Network

    network = Network()
    try:
        network.shape(rate_mbit=LINK_MBIT, round_trip_s=LINK_ROUND_TRIP_S)
        yield network.address(1), [network.prefix(host) for host in range(1, case.workers + 1)]
    finally:
        network.close()


def measure(case: Case) -> dict[str, Any]:
    """Train once; return the curve, and the seconds and samples to the target (None if it was not reached)."""
    with tempfile.TemporaryDirectory() as text, network_of(case) as (master, prefixes):
        folder = Path(text)
        out = folder / "curve.json"
        commands, variables = command_of(case, out, folder / "runs", master)
        with (folder / "log").open("w") as log:
            processes = [
                subprocess.Popen(
                    [*prefix, *command], env=os.environ | own, stdout=log, stderr=log, start_new_session=True
                )
                for prefix, command, own in zip(prefixes, commands, variables, strict=False)
            ]
        if len(processes) == len(CORES) and not case.setting.unbound:  # as `maniple run` binds its workers
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

    def __init__(self, results: Results, *, is_again: bool = False) -> None:
        self.results, self._is_again, self._start = results, is_again, time.monotonic()
        self._measured: set[str] = set()

    def run(self, case: Case) -> dict[str, Any]:
        """Return the result of a case, measured now or before."""
        if case.key not in (self._measured if self._is_again else self.results.runs):
            begin = time.monotonic()
            self.results.add(case, measure(case))
            self._measured.add(case.key)
            found = self.results.runs[case.key]
            reached = "not reached" if found["to_target_s"] is None else f"{found['to_target_s']:6.2f} s"
            minutes = (time.monotonic() - self._start) / 60
            final = "diverged" if found["final"] is None else f"{found['metric']} {found['final']:.4f} at the end"
            seconds = time.monotonic() - begin
            print(f"{minutes:5.1f} min  {case.key:<60} {reached:>12}  {final} ({seconds:.0f} s)", flush=True)
        return self.results.runs[case.key]

    def tuned(self, case: Case, same: Setting | None = None) -> Setting:
        """The best setting of a contestant: learning rate first, then period, then alpha.

        `same` has the learning rate and the batch of one that computes the same, and is known to be the best.
        """

        def best(settings: list[Setting]) -> Setting:
            tried = [self.run(replace(case, setting=setting, seed=TUNING_SEED)) for setting in settings]

            def cost(found: dict[str, Any]) -> tuple[float, float]:
                final = float("inf") if found["final"] is None else found["final"]
                samples = found["to_target_samples"] or float("inf")
                seconds = samples * self._seconds_per_sample(found)
                return seconds, -final if found["metric"] == "accuracy" else final

            return Setting(**min(tried, key=cost)["setting"])

        rates = [Setting(lr) for lr in (OF_DOUBLE_BATCHES if case.contestant == TWICE else LEARNING_RATES)]
        if case.workers > 1:
            rates += [Setting(lr, split=True) for lr in OF_DIVIDED_BATCHES]
        chosen = best(rates) if same is None else Setting(same.lr, same.split)
        while same is None and (beyond := beyond_edge(chosen, rates)) is not None:
            rates.append(beyond)
            chosen = best(rates)
        if periods := PERIODS.get(case.contestant):
            chosen = best([chosen, *(replace(chosen, every=every) for every in periods[1:])])
        if case.contestant.startswith("easgd"):
            chosen = best([chosen, replace(chosen, alpha="0.2")])
        if case.contestant == DDP:
            chosen = best([chosen, replace(chosen, unbound=True)])
        return chosen

    def _seconds_per_sample(self, like: dict[str, Any]) -> float:
        """The median over all learning rates: it does not depend on them, and one run may meet a slow moment."""

        def kind(run: dict[str, Any]) -> list[Any]:
            setting = run["setting"]
            names = ("task", "data", "contestant", "workers", "place", "epochs")
            return [*(run[name] for name in names), setting["split"], setting["every"], setting.get("unbound")]

        tuning = [run for run in self.results.runs.values() if run.get("seed") == TUNING_SEED]
        same = [run for run in tuning if kind(run) == kind(like)]
        return statistics.median([run["curve"][-1][0] / run["curve"][-1][1] for run in same if run["curve"]] or [1.0])


def beyond_edge(chosen: Setting, tried: Sequence[Setting]) -> Setting | None:
    """The next learning rate, if the chosen one is the lowest or the highest of those tried with its batch."""
    rates = [setting.lr for setting in tried if setting.split == chosen.split]
    lower, higher = chosen.lr / 2, chosen.lr * 2
    if chosen.lr == min(rates) and lower >= 1 / MOST_FACTOR:
        return replace(chosen, lr=lower)
    return replace(chosen, lr=higher) if chosen.lr == max(rates) and higher <= MOST_FACTOR else None


def play(runner: Runner, options: argparse.Namespace) -> None:
    """Measure all cases; the seeds of all contestants of a task are interleaved."""
    for task in options.tasks:
        for data in data_of(task, options.data):
            cases = [Case(task, name, 1 if is_single(name) else options.workers, Setting(), 0, data)
                     for name in options.contestants]  # fmt: skip
            known = {} if options.full else runner.results.chosen.get(task, {})  # for files: as for generated data
            chosen = runner.results.chosen.setdefault(cases[0].group, dict(known))
            if options.full:
                for case in sorted(cases, key=lambda one: one.contestant == DDP):
                    same = chosen.get(label_of("bsp", case.workers)) if case.contestant == DDP else None
                    if case.contestant not in SINGLE:
                        chosen[case.label] = asdict(runner.tuned(case, Setting(**same) if same else None))
                for all_cores, one_core in SINGLE.items():
                    chosen[all_cores] = chosen.get(one_core, asdict(Setting()))
                runner.results.save()
            tuned = [replace(case, setting=Setting(**chosen.get(case.label, {}))) for case in cases]
            untuned = [case for case in cases if case.contestant in NEWCOMERS] if options.full else []
            measured = list(dict.fromkeys([*tuned, *untuned]))
            for seed, case in itertools.product(range(options.seeds), measured):
                runner.run(replace(case, seed=seed))


def play_places(runner: Runner, places: Sequence[str], options: argparse.Namespace) -> None:
    """Measure a slow worker and a network, with the settings that were chosen on one machine and equal workers."""
    tasks: list[str] = options.tasks
    for place, seed, task in itertools.product(places, range(options.seeds), tasks):
        chosen = runner.results.chosen.get(str(task), {})
        for name in options.contestants:
            if not is_single(name) and name in chosen:
                runner.run(Case(str(task), name, 2, Setting(**chosen[name]), int(seed), place=str(place)))


def play_lengths(runner: Runner, options: argparse.Namespace) -> None:
    """Train for fewer and more epochs, with the settings that were chosen for the usual number."""
    for seed, task in itertools.product(range(options.seeds), options.tasks):
        chosen = runner.results.chosen.get(str(task), {})
        for epochs, name in itertools.product(LENGTHS[task], OF_LENGTHS):
            workers = 1 if name == ALONE else 2
            runner.run(Case(task, name, workers, Setting(**chosen.get(name, {})), seed, epochs=epochs))


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
    parser.add_argument("--places", nargs="*", choices=PLACES, help="measure a slow worker and a network")
    parser.add_argument("--lengths", action="store_true", help="measure shorter and longer runs")
    parser.add_argument("--tables", action="store_true", help="measure the tables of earlier systems")
    parser.add_argument("--again", action="store_true", help="measure again what is known from an earlier call")
    parser.add_argument("--report", action="store_true", help="only write docs/results.md again")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="all, or the main ones in the fast part")
    parser.add_argument("--workers", type=int, default=2, help="workers of rules and of DDP (2)")
    parser.add_argument("--seeds", type=int, help="3, or 1 in the fast part; 0 only tunes")
    parser.add_argument("--data", type=Path, help="a folder with mnist.npz, cifar10.npz, imdb.npz ... to use instead")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the case that is being measured too
    options.contestants = options.contestants or list(
        CONTESTANTS if options.full or options.places is not None else MAIN
    )
    is_full = options.full or options.tables or options.lengths or options.report or options.places is not None
    options.seeds = (3 if is_full else 1) if options.seeds is None else options.seeds
    if options.data is not None and not any(data_of(task, options.data) for task in options.tasks):
        names = ", ".join(f"{name}.npz" for task in options.tasks for name in FILES.get(task, ()))
        parser.error(f"--data {options.data} has none of the files {names or '(these tasks read no files)'}")
    results = Results(FULL if is_full else FAST)
    if not is_full:
        results.chosen = Results(FULL).chosen  # what the full part has chosen; no settings of this machine's own
    if not options.report:
        known = f"{len(results.runs)} runs are known" + (" (--again repeats them)" if results.runs else "")
        print(f"results: {results.path.relative_to(ROOT)}; {known}", flush=True)
        if options.workers > len(CORES):
            print(f"{options.workers} workers share {len(CORES)} cores: they cannot be faster than {len(CORES)}.")
        runner = Runner(results, is_again=options.again)
        if options.tables:
            play_tables(runner, options.seeds)
        elif options.lengths:
            play_lengths(runner, options)
        elif options.places is not None:
            play_places(runner, options.places or PLACES, options)
        else:
            play(runner, options)
    write_report(results.runs, results.chosen, to_docs=is_full)


if __name__ == "__main__":
    main()
