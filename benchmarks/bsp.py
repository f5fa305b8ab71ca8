"""Synchronous training on 2 processes: DistributedDataParallel, maniple, and 2 unsynchronised processes as the limit.

For an MLP, an LSTM, a small CNN and a transformer (a causal language model with 4 layers on random tokens) in PyTorch,
with one thread per process. All processes start with the same parameters; each rank has its own batches, the same ones
in every contestant. First the losses of 100 steps are compared between DDP and maniple: the mean over both ranks, and
the largest relative difference. Then all contestants, alive at once, take turns of a fixed number of steps. This is
repeated with new processes, because identical processes differ by chance. The speed-up is in samples per second over
one plain process; all ratios are computed within a round, and their median counts. As in speedup.py, every process has
the same settings of the C library's allocator.

    plain           one process without any communication
    DDP             DistributedDataParallel over gloo, with its defaults
    DDP views       the same with gradient_as_bucket_view, static_graph, and without broadcasting buffers
    ours            `maniple run -n 2 --rule bsp`
    bare            a hand-written sum of the gradients in shared memory, without checks: the cost of synchronisation
    limit           two plain processes at once, each on its own core
    ours torch      with --torch: the same with --collectives torch
    ours overlap    with --torch: --collectives torch --rule bsp:overlap=true

    python benchmarks/bsp.py [--models mlp lstm cnn transformer] [--casts 3] [--rounds 8] [--turn 1.0] [--rule bsp]
    python benchmarks/bsp.py --torch
"""

import argparse
import contextlib
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bare import Bare
from cast import DEADLINE_S, Cast, answer
from measure import report
from speedup import ALLOCATOR, CORES, MODELS, TOKENS, WORDS, build

BATCHES = 8  # per rank, used in turn
LOSSES = 100  # steps whose losses are compared
DDP: dict[str, dict[str, bool]] = {
    "DDP": {},
    "DDP views": {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False},
}
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # the option's old name also works in older versions of torch
ALL_MODELS = (*MODELS, "transformer")
KINDS = ["plain", *DDP, "ours", "bare", "limit"]
ENGINES = {
    "ours torch": ["--collectives", "torch"],
    "ours overlap": ["--collectives", "torch", "--rule", "bsp:overlap=true"],
}


class Loop:
    """The training loop of one process, which is the same for all contestants."""

    def __init__(self, kind: str, name: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.kind, self.worker = kind, None
        if kind.startswith("ours"):
            import maniple

            self.worker = maniple.join(own_data=True)
        self.rank = int(os.environ.get("RANK", "0")) if self.worker is None else self.worker.rank
        self.model, x, y = build(name)
        random = torch.Generator().manual_seed(100 + self.rank)
        self.batches = [draw(name, x, y, random) for _ in range(BATCHES)]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss_of = torch.nn.CrossEntropyLoss()
        self.steps = 0
        self.bare: Bare | None = None
        self._join()

    def _join(self) -> None:
        if self.kind in DDP:
            from torch import distributed
            from torch.nn.parallel import DistributedDataParallel

            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            among: Any = {"rank": self.rank, "world_size": 2, "timeout": datetime.timedelta(seconds=DEADLINE_S)}
            distributed.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", **among)
            self.model = DistributedDataParallel(self.model, **DDP[self.kind])
        elif self.kind == "bare":
            self.bare = Bare(os.environ["STORE"], self.rank, list(self.model.parameters()))
        elif self.worker is not None:
            self.worker.share(self.model, self.optimizer)  # the command line sets the rule

    def step(self) -> Any:
        x, y = self.batches[self.steps % BATCHES]
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model(x), y)
        loss.backward()
        if self.bare is not None:
            self.bare.average()
        self.optimizer.step()
        self.steps += 1
        return loss

    def reply(self, what: str, steps: int) -> Any:
        """Return the losses of `steps` steps, or the samples per second over them."""
        if what == "losses":
            return [self.step().item() for _ in range(steps)]
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps * len(self.batches[0][1]) / (time.perf_counter() - begin)


def draw(name: str, x, y, random):
    """Return a random batch with the shapes and dtypes of `x` and `y`."""
    import torch

    if name == "transformer":  # the next tokens are the targets
        tokens = torch.randint(0, TOKENS, (len(x), x.shape[1] + 1), generator=random)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_words = x.dtype == torch.int64
    some = torch.randint(0, WORDS, x.shape, generator=random) if is_words else torch.randn(x.shape, generator=random)
    return some, torch.randint(0, 10, y.shape, generator=random)


def start(folder: Path, kind: str, model: str, rule: list[str]) -> Cast:
    """Start the processes of one contestant."""
    address, count = folder / kind.replace(" ", "-"), 1 if kind == "plain" else 2
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "STORE": f"{address}.store"} | ALLOCATOR | QUIET
    script = [__file__, "--work", kind, model, str(address)]
    if kind.startswith("ours"):
        command = [
            str(Path(sys.executable).with_name("maniple")),
            "run",
            "-q",
            "-n",
            "2",
            "--runs",
            str(folder / "runs"),
        ]
        asked = ENGINES.get(kind, [])
        asked = asked if "--rule" in asked else [*asked, "--rule", *rule]
        return Cast(address, [[*command, *asked, *script]], [env], count)
    envs = [env | {"RANK": str(rank)} for rank in range(count)]
    cast = Cast(address, [[sys.executable, *script]] * count, envs, count)
    if kind in {"limit", "bare"}:  # bind cores, as the launcher does for its workers
        for pid, core in zip(cast.pids, CORES, strict=False):
            os.sched_setaffinity(pid, {core})
    return cast


@contextlib.contextmanager
def started(model: str, rule: list[str], kinds: list[str]) -> Iterator[dict[str, Cast]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contestants: dict[str, Cast] = {}
        for kind in kinds:
            contestants[kind] = start(Path(folder), kind, model, rule)
            stack.callback(contestants[kind].close)
        yield contestants


def losses(cast: Cast) -> list[float]:
    """Return the loss of each of the first steps, as the mean over the ranks."""
    return [statistics.fmean(pair) for pair in zip(*cast.ask("losses", LOSSES), strict=True)]


def difference(some: list[float], others: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))


def play(model: str, options: argparse.Namespace, rates: dict[str, list[float]]) -> float:
    """Run one cast: return the difference of the losses; append the rates of all rounds to `rates`."""
    with started(model, options.rule, list(rates)) as contestants:
        first = {kind: losses(cast) for kind, cast in contestants.items()}
        batch = len(build(model)[2])
        steps = max(1, round(options.turn * contestants["plain"].ask("rate", 20)[0] / batch))
        for round_ in range(options.rounds):
            for kind in rates if round_ % 2 else reversed(rates):
                rates[kind].append(sum(contestants[kind].ask("rate", steps)))
    return max(difference(first[ours], first[kind]) for kind in DDP for ours in first if ours.startswith("ours"))


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row: speed-ups over one plain process, and ratios."""
    rates: dict[str, list[float]] = {kind: [] for kind in [*KINDS, *(ENGINES if options.torch else ())]}
    apart = max(play(model, options, rates) for _ in range(options.casts))

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))

    best = max(DDP, key=lambda kind: ratio(kind, "plain"))
    return {
        "model": model,
        "plain samples/s": statistics.median(rates["plain"]),
        **{kind: ratio(kind, "plain") for kind in rates if kind != "plain"},
        "ours / best DDP": ratio("ours", best),
        "ours / bare": ratio("ours", "bare"),
        "ours / limit": ratio("ours", "limit"),
        "losses apart": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ALL_MODELS, default=ALL_MODELS)
    parser.add_argument("--casts", type=int, default=3, help="number of casts, each with new processes")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contestant per cast")
    parser.add_argument("--turn", type=float, default=1.0, help="length of a turn in seconds of one plain process")
    parser.add_argument(
        "--rule", type=str.split, default=["bsp"], help='rule of ours, as for `maniple run`: "easgd --every 1"'
    )
    parser.add_argument("--torch", action="store_true", help="also measure the torch backend, with and without overlap")
    parser.add_argument("--work", nargs=3, metavar=("KIND", "MODEL", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, model, address = options.work
        answer(address, Loop(kind, model).reply)
        if kind in DDP:
            os._exit(0)  # gloo's threads would wait for their peers
        return
    rows = [measure(model, options) for model in options.models]
    facts = {"casts": options.casts, "rounds": options.rounds, "turn_s": options.turn, "rule": " ".join(options.rule)}
    report("bsp", "Synchronous training on 2 processes: speed-up over one", rows, **facts)


if __name__ == "__main__":
    main()
