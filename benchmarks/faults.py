"""Time lost to faults: a stopped worker, a network that goes silent, a crowded server, a worker that is killed.

    stop     Three local workers exchange 16 MB by EASGD after each step of 20 ms. One is stopped (SIGSTOP) inside an
             exchange, under a lock and half-way through a write, for 30 or 70 s (--stops). Given are the longest pause
             between two steps of the other workers, the ratio of their exchanges per second during the stop to those
             before it, and whether the run failed.
    cut      A worker on another machine exchanges 1 MB; for 15 s (--cut) the network between the machines drops all
             packets. Given are the longest pause between two steps, and the time from the end of the cut to the end of
             the first exchange after it. With and without a link of 10 Mbit/s, on which an
             exchange takes 1.7 s. Needs root.
    clients  1 to 200 clients (--clients) push 4 KB to one array, or to one each, for 6 s (--push): pushes per second,
             the time of the slowest 1 %, and the server's processor time per push.
    restart  `maniple run --restarts`: from `kill -9` of a worker, with a NumPy and with a torch model of 16 MB, to the
             end of the first exchange of its successor. Given too are the time until the successor calls `share()`,
             which is mostly imports, and the time that `share()` takes.

Medians and the worst of all repetitions. All four faults take about 50 minutes; an estimate is printed at the start.

    python benchmarks/faults.py [--faults stop cut clients restart] [--repeats 10] [--stops 30 70] [--cut 15]
    python benchmarks/faults.py --repeats 1 --stops 5 --cut 3 --clients 1 8 --push 1
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maniple import Client
from maniple.record import Row, read_events
from measure import report, wait_for

sys.path.append(str(Path(__file__).parents[1]))  # for the virtual network of the tests

MANIPLE = str(Path(sys.executable).with_name("maniple"))
STEP_S = 0.02
AFTER_STOP_S = 5.0  # for which the others are watched after a stop
CLIENT_PROCESSES = 4
WARM_UP_S = 1.5  # of pushes, in which the server loads its kernels
DEADLINE_S = 180.0
FAULTS = ("stop", "cut", "clients", "restart")
OVERHEAD_S = {"stop": 8.0, "cut": 6.0, "clients": 5.0, "restart": 7.0}  # to start and to end a case, for the estimate

# Writes begin and end of share(), and the time of each step, to files; ends when the file `end` appears.
TRAIN = f"""
import os, signal, sys, time
from pathlib import Path
import numpy as np
import maniple

class StopsInside(maniple.EASGD):
    def exchange(self, x, c, memory, moment):
        half = x.size // 2
        first = super().exchange(x[:half], c[:half], memory, moment)
        if worker.rank == 1 and Path("stop").exists():
            Path("stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        second = super().exchange(x[half:], c[half:], memory, moment)
        refused = [first, None if second is None else second + half]
        refused = [positions for positions in refused if positions is not None]
        return np.concatenate(refused) if refused else None

kind, parameters, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
worker = maniple.join(own_data=True)
rule = (StopsInside if kind == "stop" else maniple.EASGD)(0.1)
if kind == "torch":
    import torch
    model = torch.nn.ParameterList(torch.zeros(size) for _ in range(parameters))
    trained = [model, torch.optim.SGD(model.parameters(), lr=0.1)]
else:
    trained = [{{f"p{{i}}": np.zeros(size, np.float32) for i in range(parameters)}}]
begin = time.time()
replica = worker.share(*trained, rule=rule, pace=maniple.Every(1))
with open(f"shares-{{worker.rank}}", "a") as shares:
    print(begin, time.time(), file=shares)
with open(f"steps-{{worker.rank}}", "a") as steps:
    while not Path("end").exists():
        time.sleep({STEP_S})
        replica.step()
        print(time.time(), file=steps, flush=True)
"""


class Training:
    """A run of the script above in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "run"
        (folder / "train.py").write_text(TRAIN)

    def rows(self, rank: int | str, event: str) -> list[Row]:
        """The rows of one kind that a worker, or the "host", has written."""
        path = self.run / "events" / f"{rank if isinstance(rank, str) else f'worker-{rank}'}.jsonl"
        return [row for row in read_events(path) if row["event"] == event] if path.exists() else []

    def pids(self, rank: int) -> list[int]:
        """The processes that a worker has had."""
        return [row["pid"] for row in self.rows("host", "started") if row["worker"] == rank]

    def exchanges_between(self, rank: int, begin: float, end: float) -> int:
        """The exchanges of a worker in a time. After many rows, one row stands for those `skipped` before it too."""
        rows = [row for row in self.rows(rank, "exchange") if begin < row["start"] + row["duration"] < end]
        return sum(1 + row.get("skipped", 0) for row in rows)

    def exchange_ends(self, rank: int) -> list[float]:
        """When the exchanges of a worker ended."""
        return [row["start"] + row["duration"] for row in self.rows(rank, "exchange")]

    def shares(self, rank: int) -> list[tuple[float, float]]:
        """When the processes of a worker called share(), and when it returned."""
        lines = (self.folder / f"shares-{rank}").read_text().splitlines()
        return [(float(begin), float(end)) for begin, end in map(str.split, lines)]

    def await_exchanges(self, ranks: range, count: int = 20) -> None:
        """Wait until each worker of `ranks` has made `count` exchanges."""
        wait_for(lambda: all(len(self.rows(rank, "exchange")) >= count for rank in ranks))

    def longest_pause(self, rank: int, begin: float, end: float) -> float:
        """The longest time between two steps of a worker, of which one at least was made in this time."""
        path = self.folder / f"steps-{rank}"
        times = [begin, *(float(line) for line in path.read_text().split() if begin <= float(line) <= end), end]
        return max(after - before for before, after in pairwise(times))

    def end(self, process: "subprocess.Popen[Any]") -> int:
        """Let the workers end, and return the exit code of the launcher."""
        (self.folder / "end").touch()
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait(DEADLINE_S)


@contextlib.contextmanager
def local_run(*arguments: str) -> Iterator[tuple[Training, "subprocess.Popen[Any]"]]:
    """Start a run on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder))
        command = [MANIPLE, "run", "--runs", "runs", "--name", "run", "--quiet", *arguments]
        with (Path(folder) / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield training, process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(DEADLINE_S)


def stopped(stop_s: float) -> dict[str, float]:
    """Stop a worker inside an exchange."""
    with local_run("-n", "3", "train.py", "stop", "4", str(1 << 20)) as (training, process):
        training.await_exchanges(range(3))
        (training.folder / "stop").touch()
        wait_for(lambda: not (training.folder / "stop").exists())
        begin = time.time()
        wait_for_end(begin + stop_s, process)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(training.pids(1)[-1], signal.SIGCONT)
        end = time.time()
        wait_for_end(end + AFTER_STOP_S, process)
        until = time.time() if process.poll() is None else end
        code = training.end(process)
        others = (0, 2)
        first = min(training.exchange_ends(rank)[0] for rank in others)
        before = sum(training.exchanges_between(rank, 0.0, begin) for rank in others) / (begin - first)
        during = sum(training.exchanges_between(rank, begin, end) for rank in others) / (end - begin)
        return {
            "longest pause, s": max(training.longest_pause(rank, begin, until) for rank in others),
            "exchanges/s, of before": during / before,
            "failed": float(code != 0),
        }


def cut(cut_s: float, rate_mbit: float) -> dict[str, float]:
    """Cut the network between a worker and its host."""
    from tests.cluster.conftest import Network

    with tempfile.TemporaryDirectory() as text:
        folder, network = Path(text), Network()
        training = Training(folder)
        try:
            network.shape(rate_mbit=rate_mbit)
            serve = [MANIPLE, "serve", "--listen", f"{network.address(1)}:0", "--runs", "runs", "--name", "run"]
            network.start(1, *serve, "--quiet", folder=folder, output=folder / "host.log")
            wait_for((training.run / "host.json").exists)
            address = json.loads((training.run / "host.json").read_text())["address"]
            (folder / "token").write_text((training.run / "token").read_text())
            join = [MANIPLE, "join", "--token-file", "token", address, "train.py", "cut", "4", str(1 << 16)]
            worker = network.start(2, *join, folder=folder, output=folder / "worker.log")
            training.await_exchanges(range(1), 3)
            begin = time.time()
            network.cut(2)
            wait_for_end(begin + cut_s, worker)
            network.heal(2)
            healed = time.time()
            wait_for(lambda: any(t > healed for t in training.exchange_ends(0)))
            first = min(t for t in training.exchange_ends(0) if t > healed)
            pause_s = training.longest_pause(0, begin, healed)
            (folder / "end").touch()
            worker.wait(DEADLINE_S)
            return {"longest pause, s": pause_s, "until an exchange, s": first - healed}
        except TimeoutError:
            for log in (folder / "host.log", folder / "worker.log"):
                print(f"{log.name}: {log.read_text() if log.exists() else 'missing'}", file=sys.stderr)
            raise
        finally:
            network.close()


def crowded(count: int, push_s: float, *, is_one_array: bool) -> dict[str, float]:
    """Let clients push at once, for `push_s` seconds."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run, command = folder / "runs" / "run", [MANIPLE, "serve", "--listen", "127.0.0.1:0", "--runs", "runs"]
        host = subprocess.Popen([*command, "--name", "run", "--quiet"], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            wait_for((run / "host.json").exists)
            os.environ["MANIPLE_TOKEN_FILE"] = str(run / "token")  # for the clients' processes, which are started next
            address = json.loads((run / "host.json").read_text())["address"]
            context, processes = multiprocessing.get_context("spawn"), min(count, CLIENT_PROCESSES)
            barrier, results = context.Barrier(count + 1), context.Queue()
            shares = [count // processes + (k < count % processes) for k in range(processes)]
            children = [
                context.Process(target=push_all, args=(address, k, share, push_s, is_one_array, barrier, results))
                for k, share in enumerate(shares)
            ]
            for child in children:
                child.start()
            barrier.wait(DEADLINE_S)
            before, begin = processor_s(host.pid), time.perf_counter()
            durations = np.concatenate([results.get(timeout=DEADLINE_S) for _ in range(processes)])
            used_s, passed_s = processor_s(host.pid) - before, time.perf_counter() - begin
            for child in children:
                child.join(DEADLINE_S)
            return {
                "pushes/s": durations.size / passed_s,
                "p99, s": float(np.quantile(durations, 0.99)),
                "server, us per push": used_s / durations.size * 1e6,
            }
        finally:
            os.environ.pop("MANIPLE_TOKEN_FILE", None)  # else the workers of the next case would use it
            host.terminate()
            host.wait(DEADLINE_S)


def push_all(
    address: str, process: int, count: int, push_s: float, is_one_array: bool, barrier: Any, results: Any
) -> None:
    """Run some of the clients, a thread for each."""
    durations: list[float] = []

    def push(number: int) -> None:
        client, value = Client(address), np.ones(1024, np.float32)
        name = "shared" if is_one_array else f"array-{process}-{number}"
        client.create(name, value)
        warm = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm:
            client.push(name, value)
        barrier.wait(DEADLINE_S)
        end = time.perf_counter() + push_s
        while (begin := time.perf_counter()) < end:
            client.push(name, value)
            durations.append(time.perf_counter() - begin)
        client.close()

    threads = [threading.Thread(target=push, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(np.array(durations))


def restarted(kind: str) -> dict[str, float]:
    """Kill a worker, which is started again."""
    with local_run("-n", "2", "--restarts", "1", "train.py", kind, "4", str(1 << 20)) as (training, process):
        training.await_exchanges(range(2))
        os.kill(training.pids(1)[-1], signal.SIGKILL)
        begin = time.time()
        wait_for(lambda: len(training.pids(1)) > 1 and training.exchange_ends(1)[-1] > begin)
        first = min(t for t in training.exchange_ends(1) if t > begin)
        training.end(process)
        called, returned = training.shares(1)[-1]
        return {
            "until share(), s": called - begin,
            "share(), s": returned - called,
            "until an exchange, s": first - begin,
        }


def processor_s(pid: int) -> float:
    """The processor time of a process and of its children."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(path.parent.name) == pid or int(fields[1]) == pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_for_end(until: float, process: "subprocess.Popen[Any]") -> None:
    """Wait until a time, or until a process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.time()))


Case = Callable[[], dict[str, float]]


def cases_of(fault: str, options: argparse.Namespace) -> dict[str, Case]:
    """The cases of one fault, by name."""
    if fault == "stop":
        return {f"stopped for {stop_s:g} s": partial(stopped, stop_s) for stop_s in options.stops}
    if fault == "cut":
        name = f"cut for {options.cut:g} s"
        return {name: partial(cut, options.cut, 0), f"{name}, link of 10 Mbit/s": partial(cut, options.cut, 10)}
    if fault == "clients":
        return {
            f"{count} clients, {'one array' if is_one else 'one array each'}": partial(
                crowded, count, options.push, is_one_array=is_one
            )
            for is_one in (True, False)
            for count in options.clients
        }
    return {f"killed, {kind}": partial(restarted, kind) for kind in ("numpy", "torch")}


def estimate_s(fault: str, options: argparse.Namespace) -> float:
    """About how long all repetitions of one fault take."""
    count = len(cases_of(fault, options))
    waits_s = {
        "stop": sum(options.stops) + count * AFTER_STOP_S,
        "cut": count * options.cut,
        "clients": count * (WARM_UP_S + options.push),
        "restart": 0.0,
    }
    return options.repeats * (waits_s[fault] + count * OVERHEAD_S[fault])


def main() -> None:
    """Repeat each fault, in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="which ones")
    parser.add_argument("--repeats", type=int, default=10, help="repetitions of each case")
    parser.add_argument("--stops", type=float, nargs="+", default=[30.0, 70.0], help="lengths of a stop, in seconds")
    parser.add_argument("--cut", type=float, default=15.0, help="length of a cut, in seconds")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 50, 200], help="numbers of clients")
    parser.add_argument("--push", type=float, default=6.0, help="how long clients push, in seconds")
    options = parser.parse_args()
    estimates_s = {fault: estimate_s(fault, options) for fault in options.faults}
    for fault, seconds in (estimates_s | {"in all": sum(estimates_s.values())}).items():
        print(f"{fault:8} about {seconds / 60:.0f} min" if seconds >= 90 else f"{fault:8} about {seconds:.0f} s")
    cases = {name: case for fault in options.faults for name, case in cases_of(fault, options).items()}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(options.repeats):
        for name, case in cases.items():
            results[name].append(case())
            values = ", ".join(f"{key} {value:.3g}" for key, value in results[name][-1].items())
            print(f"{number + 1}/{options.repeats} {name}: {values}", flush=True)
    rows: list[dict[str, Any]] = []
    for name, repetitions in results.items():
        for measure in repetitions[0]:
            values = [one[measure] for one in repetitions]
            worst = min(values) if measure.startswith(("pushes", "exchanges")) else max(values)
            rows.append({"fault": name, "measure": measure, "median": statistics.median(values), "worst": worst})
    report("faults", "Time lost to faults", rows, repeats=options.repeats)


if __name__ == "__main__":
    main()
