"""Training over slow lines: seconds to a loss, and how much of the time is spent computing, for each rule and for DDP.

    python benchmarks/link --quick                   # a smoke run of a minute
    python benchmarks/link                           # 2 machines, three lines: 25 minutes on 2 cores
    python benchmarks/link --hosts 4 --lines slow    # 4 machines, two of them on each core; one line
    python benchmarks/link --contestants DDP "DiLoCo overlap int4"

Each machine is a network namespace with one worker of one thread. A switch in user space connects them and gives every
machine a line with a rate each way and a round trip: `lan` 1 Gbit/s and 5 ms, `slow` 100 Mbit/s and 20 ms, `home`
10 Mbit/s and 40 ms. Needs Linux, root, `ip` and `nsenter`.

The task: a transformer of 4.9 million parameters predicts the next byte of --text, by default the sources of Python's
standard library, which every machine has. Each worker has its own batches, 4 rows of 64 bytes, and AdamW with one
learning rate for all contestants. A step takes 0.1 s on one core, for gradients of 19.5 MB: 200 MB/s of gradients to
communicate if each step shares them. A GPU computes much more for each byte that it shares with the same batch per
parameter, and much more per second: GPT-2 of 124 million parameters makes 0.5 GB of gradients in 0.1 to 0.4 s.

    one process     as many independent processes, bound to the cores as the workers are: the baseline of every ratio
    DDP, BSP        the gradients' mean at each step
    EASGD           asynchronous, every 10 steps; worker 0 shares the host's machine and memory, as with torchrun
    LocalSGD, DiLoCo    every --every steps; overlap: while training continues; int4: with 4 bits per value

Seconds to the loss: of the replicas' mean (EASGD: of the center) on a fixed set of validation rows, the median of three
consecutive copies of the parameters, interpolated; they are evaluated afterwards. The clock starts when all workers are
ready.
A contestant that would take longer than --limit is stopped, and the seconds are *extrapolated*: steps to the loss where
it, or the other one of DDP and BSP, reached the loss on another line, times the seconds per step here.
Computing: CPU seconds of a worker's process, of its communication too, per second, relative to one process.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from train_bytes import JOIN_S, Settings, evaluate, validation_rows

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from tests.cluster.conftest import HOSTS, Network  # noqa: E402

from measure import report  # noqa: E402 - found by the line above

CORES = sorted(os.sched_getaffinity(0))
VALIDATION_ROWS = 64
END_S = 120.0  # for workers to leave and the host to save: the last exchange takes 16 s over 10 Mbit/s
HOST_S = 2.0  # in which a host whose workers are gone ends by itself
ALONE, DDP = "one process", "DDP"


@dataclass(frozen=True)
class Line:
    """The line of each machine."""

    rate_mbit: float
    round_trip_ms: float

    def __str__(self) -> str:
        return f"{self.rate_mbit:g} Mbit/s, {self.round_trip_ms:g} ms"


LINES = {"lan": Line(1000, 5), "slow": Line(100, 20), "home": Line(10, 40)}


@dataclass(frozen=True)
class Contestant:
    """A way to train, and the variables that choose it."""

    way: str
    rule: str = ""
    wire: str = ""
    overlap: bool = False
    every: int = 1  # steps between exchanges
    is_asynchronous: bool = False
    same_steps: str = ""  # the contestant that computes the same

    def variables(self, folder: Path) -> dict[str, str]:
        """What torchrun would not set."""
        if self.way != "maniple":
            return {}
        found = {"MANIPLE_RULE": self.rule, "MANIPLE_RUNS": str(folder / "runs"), "LOCAL_RANK": "0"}
        found |= {"LOCAL_WORLD_SIZE": "1", "MANIPLE_SNAPSHOT_EVERY": "0"}
        found |= {"MANIPLE_WIRE": self.wire} if self.wire else {}
        return found | ({"MANIPLE_OVERLAP": "1"} if self.overlap else {})


def contestants(every: int) -> dict[str, Contestant]:
    """All contestants; `every` is the period of the rules that average seldom."""
    diloco = Contestant("maniple", f"diloco:every={every}", every=every)
    return {
        ALONE: Contestant("plain"),
        DDP: Contestant("ddp", same_steps="BSP"),
        "BSP": Contestant("maniple", "bsp", same_steps=DDP),
        "EASGD": Contestant("maniple", "easgd", every=10, is_asynchronous=True),
        "LocalSGD": Contestant("maniple", f"localsgd:k={every}", every=every),
        "DiLoCo": diloco,
        "DiLoCo overlap": replace(diloco, overlap=True),
        "DiLoCo overlap int4": replace(diloco, wire="int4", overlap=True),
    }


def measure(contestant: Contestant, settings: Settings, network: Network, hosts: int) -> dict[str, Any]:
    """Train once: the loss at each copy, steps per second, and the share of time on the CPU."""
    settings = replace(
        settings, way=contestant.way, is_asynchronous=contestant.is_asynchronous, slack=2 * contestant.every + 2
    )
    with tempfile.TemporaryDirectory(prefix="maniple-link-") as text:
        folder = Path(text)
        train(folder, contestant, settings, network, hosts)
        steps = [json.loads((folder / f"steps-{rank}.json").read_text()) for rank in range(hosts)]
        load = {"load": os.getloadavg()[0]}  # of the last minute, before the copies are evaluated
        return curve_of(folder, contestant, settings, steps) | speed_of(contestant, steps) | load


def train(folder: Path, contestant: Contestant, settings: Settings, network: Network, hosts: int) -> None:
    """Start a worker on each machine, as torchrun would, and wait until all have ended."""
    common = os.environ | contestant.variables(folder) | {"WORLD_SIZE": str(hosts), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": network.address(1), "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
    common |= {"MANIPLE_NAME": f"link-{secrets.token_hex(4)}"}
    command = [sys.executable, str(HERE / "train_bytes.py"), str(folder), json.dumps(asdict(settings))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "log").open("wb") as log:
            for rank in range(hosts):
                words = [*network.prefix(rank + 1), *command]
                env = common | {"RANK": str(rank)}
                processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True))
        deadline = time.monotonic() + JOIN_S + settings.limit_s * 3 + END_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
        if any(codes) or None in codes:
            raise RuntimeError(f"the workers ended with {codes}:\n{(folder / 'log').read_text()[-3000:]}")
    finally:
        end(processes)
        end_host(network)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the workers that still run, each of which leads a session. Their host saves the center and ends with them."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, order)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)


def end_host(network: Network) -> None:
    """Wait until no process is left on the machines: a host that is killed leaves its center in memory.

    A host whose workers have all finished ends with them. One that is left is told to save and end, since it waits a
    minute for workers that might come back.
    """
    names = [Path(network.prefix(host)[1].removeprefix("--net=")).name for host in range(1, HOSTS + 1)]
    asked_to_end: set[str] = set()
    begin = time.monotonic()
    while time.monotonic() < begin + END_S:
        left = {pid for name in names for pid in pids_in(name)}
        if not left:
            return
        for pid in left - asked_to_end if time.monotonic() > begin + HOST_S else ():
            with contextlib.suppress(OSError):  # it has just ended
                if b"maniple.cli" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGTERM)
                    asked_to_end.add(pid)
        time.sleep(0.2)


def pids_in(namespace: str) -> list[str]:
    """The processes in a network namespace."""
    return subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    ).stdout.split()


def curve_of(folder: Path, contestant: Contestant, settings: Settings, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The loss of the replicas' mean, or of the center, at each copy, with its step and its seconds."""
    rows = validation_rows(settings, VALIDATION_ROWS)
    sharers = 1 if contestant.is_asynchronous or contestant.way == "plain" else len(steps)
    curve: list[tuple[int, float, float]] = []
    for step in range(settings.copy_every, len(steps[0]["ends"]) + 1, settings.copy_every):
        copies = [folder / f"copy-{rank}-{step}.npy" for rank in range(sharers)]
        if all(path.exists() for path in copies):
            mean = np.mean([np.load(path) for path in copies], axis=0)
            seconds = max(found["ends"][step - 1] for found in steps[:sharers])
            curve.append((step, seconds, round(evaluate(settings, mean, rows), 4)))
    return {"curve": curve}


def speed_of(contestant: Contestant, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps per second of a worker, the mean of all; over whole periods, without the first, if there are two."""

    def rate(ends: list[float]) -> float:
        periods = len(ends) // contestant.every
        if periods < 2:
            return len(ends) / ends[-1]
        last = periods * contestant.every
        return (last - contestant.every) / (ends[last - 1] - ends[contestant.every - 1])

    made = [found for found in steps if found["ends"]]
    return {
        "steps_per_s": sum(rate(found["ends"]) for found in made) / len(steps),
        "cpu_share": statistics.mean(found["cpu_s"] / found["ends"][-1] for found in made),
        "steps": [len(found["ends"]) for found in steps],
    }


def reach(curve: list[tuple[int, float, float]], target: float) -> tuple[float, float] | None:
    """Step and seconds at which the median of three consecutive losses falls to the target, interpolated."""
    losses = [loss for _, _, loss in curve]
    middle = [statistics.median(losses[max(0, i - 1) : i + 2]) for i in range(len(losses))]
    curve = [(step, seconds, loss) for (step, seconds, _), loss in zip(curve, middle, strict=True)]
    before = None
    for now in curve:
        if now[2] <= target:
            if before is None:
                return now[:2]
            share = (before[2] - target) / max(1e-9, before[2] - now[2])
            return before[0] + share * (now[0] - before[0]), before[1] + share * (now[1] - before[1])
        before = now
    return None


def table(found: dict[tuple[int, str, str], dict[str, Any]], target: float, all_: dict[str, Contestant]):
    """One row for each contestant on each line, in seconds, ratios and shares."""
    rows: list[dict[str, Any]] = []
    for (hosts, line, name), result in found.items():
        alone = found.get((hosts, "", ALONE))
        same = [name, all_[name].same_steps]
        others = [reach(one["curve"], target) for (h, _, n), one in found.items() if h == hosts and n in same]
        own, elsewhere = reach(result["curve"], target), next((one for one in others if one), None)
        seconds, how = (own[1], "measured") if own else (None, "not reached")
        if own is None and elsewhere is not None and not all_[name].is_asynchronous:
            seconds, how = elsewhere[0] / result["steps_per_s"], "extrapolated"
        rows.append({
            "hosts": hosts, "line": line or "none", "contestant": name,
            "s to loss": seconds, "how": how, "steps to loss": (own or elsewhere or [None])[0],
            "steps/s": result["steps_per_s"],
            "of one process": result["steps_per_s"] / alone["steps_per_s"] if alone else None,
            "computing": result["cpu_share"] / alone["cpu_share"] if alone else None,
            "last loss": result["curve"][-1][2] if result["curve"] else None, "load": result["load"],
        })  # fmt: skip
    for row in rows:
        ddp = next((one["s to loss"] for one in rows if one["contestant"] == DDP and _place(one) == _place(row)), None)
        row["faster than DDP"] = ddp / row["s to loss"] if ddp and row["s to loss"] else None
    return rows


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["hosts"], row["line"]


def free_port() -> int:
    """A port that is free now; the machines' own are as free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def text_of(path: Path | None) -> Iterator[str]:
    """The file to learn from: the given one, or the sources of the standard library, without its tests."""
    if path is not None:
        yield str(path.resolve())
        return
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            file.write(source.read_bytes())
        file.flush()
        yield file.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model on one line: does it run?")
    parser.add_argument("--hosts", type=int, nargs="+", choices=range(2, HOSTS + 1), default=[2])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--contestants", nargs="+", choices=contestants(1), default=list(contestants(1)))
    parser.add_argument("--text", type=Path, help="a file to learn from (default: the standard library's sources)")
    parser.add_argument("--every", type=int, default=50, help="steps between exchanges of LocalSGD and DiLoCo (50)")
    parser.add_argument("--steps", type=int, default=300, help="of each worker, at most (300)")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of training for each row, at most (100)")
    parser.add_argument("--target", type=float, default=3.55, help="loss to reach, in bits per byte (3.55)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size: dict[str, Any] = {"width": 256, "layers": 6, "context": 64, "batch": 4}
    if args.quick:
        size = {"width": 64, "layers": 2, "context": 32, "batch": 4}
        args.lines, args.steps, args.limit, args.every, args.target = args.lines[:1], 40, 10.0, 10, 6.5
    for number in (signal.SIGINT, signal.SIGTERM):  # both end what was started, and show the rows so far
        signal.signal(number, signal.default_int_handler)
    all_ = {name: one for name, one in contestants(args.every).items() if name in args.contestants}
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    with text_of(args.text) as text:
        settings = Settings(
            way="", text=text, steps=args.steps, limit_s=args.limit, copy_every=max(5, args.steps // 15), slack=0,
            core_count=len(CORES), is_asynchronous=False, lr=1e-3, seed=args.seed, **size,
        )  # fmt: skip
        begin, is_complete = time.monotonic(), False
        with contextlib.suppress(KeyboardInterrupt):
            for hosts, line, name in cases(args.hosts, args.lines, all_):
                network = Network()
                try:
                    if line:
                        network.shape(rate_mbit=LINES[line].rate_mbit, round_trip_s=LINES[line].round_trip_ms / 1000)
                    found[hosts, line, name] = measure(all_[name], settings, network, hosts)
                    outcome = f"{found[hosts, line, name]['steps_per_s']:6.2f} steps/s"
                except RuntimeError as error:  # the others are measured all the same
                    outcome = f"failed: {str(error).strip().splitlines()[-1]}"
                finally:
                    network.close()
                minutes = (time.monotonic() - begin) / 60
                print(f"{minutes:5.1f} min  {hosts} hosts  {line or 'no line':<8} {name:<22} {outcome}", flush=True)
            is_complete = True
    rows = table(found, args.target, contestants(args.every))
    facts = {
        "lines": {name: str(LINES[name]) for name in args.lines},
        "model": size,
        "every": args.every,
        "target": args.target,
        "text": str(args.text or "standard library"),
    }
    curves = {f"{hosts} {line} {name}": one["curve"] for (hosts, line, name), one in found.items()}
    if rows:
        report("link-quick" if args.quick else "link", "Training over slow lines", rows, **facts)
        beside = HERE.parent / "results" / "link-curves.json"
        beside.write_text(json.dumps({"of": "[step, seconds, bits per byte]", "curves": curves}, indent=1))
    sys.exit(0 if is_complete else 130)


def cases(hosts: list[int], lines: list[str], all_: dict[str, Contestant]) -> Iterator[tuple[int, str, str]]:
    """What is measured, in order: one process first, which needs no line."""
    for count in hosts:
        for name in all_:
            for line in [""] if name == ALONE else lines:
                yield count, line, name


if __name__ == "__main__":
    main()
