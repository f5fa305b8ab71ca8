"""How much DiLoCo learns in its synchronous and its asynchronous forms, from the same samples.

    python benchmarks/diloco.py                    # 4 workers, 3 seeds
    python benchmarks/diloco.py --rounds 100       # longer runs

All workers are simulated in one process with the library's own rules, so no timing and no network plays a role: each
makes `--every` steps of AdamW on its own batches of Python sources, then exchanges. Asynchronous workers are equally
fast and begin at different times, so that between two exchanges of one worker each of the others makes one. The order
that published runs found (Forgather's replication of asynchronous DiLoCo): synchronous, then delayed Nesterov with
N = 2 p, then with N = p; momentum at each single arrival diverges.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from measure import report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from char_transformer import Reader, cut, standard_library
from maniple import DiLoCo
from maniple.contracts import ExchangeInfo, State
from maniple.rules.diloco import outer_step

CONTEXT, WIDTH, LAYERS, BATCH = 32, 48, 2, 16


class Worker:
    """A model with its optimizer, as a flat vector for the rule."""

    def __init__(self, text: torch.Tensor, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        self.model = Reader(CONTEXT, WIDTH, LAYERS)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self._text, self._random = text, torch.Generator().manual_seed(1000 * seed + rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            which = torch.randint(0, len(self._text), (BATCH,), generator=self._random)
            self._optimizer.zero_grad()
            self.model(self._text[which]).backward()
            self._optimizer.step()

    def read(self) -> np.ndarray:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy().copy()

    def write(self, x: np.ndarray) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), self.model.parameters())


def in_rounds(rule: DiLoCo, workers: list[Worker], rounds: int, every: int) -> np.ndarray:
    """Synchronous training; returns the center."""
    states: list[State] = [{"center": (x := worker.read()), "momentum": np.zeros_like(x)} for worker in workers]
    for _ in range(rounds):
        offers = []
        for worker, state in zip(workers, states, strict=True):
            worker.train(every)
            rule.offer(worker.read(), state, offer := np.empty_like(state["center"]))
            offers.append(offer)
        total = np.mean(offers, axis=0)
        for worker, state in zip(workers, states, strict=True):
            x = worker.read()
            rule.accept(x, total.copy(), state, ExchangeInfo(live=len(workers)))
            worker.write(x)
    return states[0]["center"]


def one_by_one(exchange: Callable[..., object], workers: list[Worker], rounds: int, every: int) -> np.ndarray:
    """Asynchronous training: in each round, each worker exchanges once, a p-th of the period after the one before."""
    c = workers[0].read()
    at_center: State = {"momentum": np.zeros_like(c), "gathered": np.zeros_like(c), "arrivals": np.zeros(1)}
    seen = [c.copy() for _ in workers]
    shares = np.diff(np.linspace(0, every, len(workers) + 1).astype(int))
    for turn in range(rounds):
        for w, worker in enumerate(workers):
            for other in workers:
                other.train(int(shares[w]))
            if turn == 0 and w < len(workers) - 1:
                continue  # no worker has made a whole period yet
            x = worker.read()
            with np.errstate(all="ignore"):
                exchange(x, c, {"center": seen[w]} | at_center)
            worker.write(x)
    return c


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=int, default=20, help="local steps between two exchanges (20)")
    parser.add_argument("--rounds", type=int, default=40, help="exchanges of each worker (40)")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, test = cut(standard_library()[:2_000_000], CONTEXT)
    test = test[:500]
    p, info = args.workers, ExchangeInfo(live=args.workers)

    def naive(x: np.ndarray, c: np.ndarray, state: State) -> None:
        old = state["center"]
        x -= old
        outer_step(x, c, state, lr=0.7, momentum=0.9, buffer=1)
        old[:] = x

    def delayed(buffer: int) -> Callable[[list[Worker]], np.ndarray]:
        rule = DiLoCo(args.every, sync=False, buffer=buffer)
        return lambda workers: one_by_one(
            lambda x, c, state: rule.exchange(x, c, state, info), workers, args.rounds, args.every
        )

    forms: dict[str, Callable[[list[Worker]], np.ndarray]] = {
        "synchronous": lambda workers: in_rounds(DiLoCo(args.every), workers, args.rounds, args.every),
        "delayed Nesterov, N = 2 p": delayed(2 * p),
        "delayed Nesterov, N = p": delayed(p),
        "delayed Nesterov, N = 4 p": delayed(4 * p),
        "momentum at each arrival": lambda workers: one_by_one(naive, workers, args.rounds, args.every),
    }
    found: dict[str, list[float]] = {name: [] for name in forms}
    for seed in range(args.seeds):
        for name, form in forms.items():
            workers = [Worker(train, seed, rank) for rank in range(p)]
            workers[0].write(form(workers))
            with torch.no_grad():
                loss = float(workers[0].model(test))
            found[name].append(loss if math.isfinite(loss) else math.inf)
            print(f"seed {seed}: {name}: {loss:.3f} bits per character", flush=True)
    rows = []
    for name, losses in found.items():
        spread = statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else math.nan
        half = 4.303 * spread / math.sqrt(len(losses)) if len(losses) == 3 else 2 * spread / math.sqrt(len(losses))
        rows.append(
            {
                "form": name,
                "bits per character": statistics.fmean(losses),
                "95 % interval +-": half,
                "seeds": ", ".join(f"{loss:.2f}" for loss in losses),
            }
        )
    report("diloco", f"DiLoCo, {p} workers, H = {args.every}, {args.rounds} exchanges of each", rows)


if __name__ == "__main__":
    main()
