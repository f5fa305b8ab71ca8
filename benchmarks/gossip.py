"""Do peers reach what a center reaches? Eight workers on handwritten digits, by EASGD and by each form of gossip.

The workers are replicas of one process that take their steps in random order, with the rules, mailboxes and center that
processes use too: so the result depends on the algorithm alone. All have the same learning rate, the same batches and
as many samples. The loss is that of the center at the end, over all training data.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from maniple import EASGD, Every, Gossip, NoLoCo, Replica, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.collectives.engines import SingleWorker
from maniple.contracts import Array
from maniple.environment import Environment
from maniple.memory.segment import LEFT, LIVE
from maniple.replica import sharing_for
from maniple.replica.context import TrainingContext
from maniple.replica.with_peers import WithPeers
from measure import report

WORKERS, HIDDEN, BATCH, LR = 8, 64, 16, 0.1
Params = dict[str, Array]


class Digits:
    """A network with one hidden layer, and its gradient."""

    def __init__(self) -> None:
        data: Any = load_digits()
        order = np.random.default_rng(0).permutation(len(data.target))
        x, y = data.data[order].astype("f4") / 16, data.target[order]
        self.x, self.y, self.test_x, self.test_y = x[:1440], y[:1440], x[1440:], y[1440:]

    def start(self, seed: int) -> Params:
        """New parameters."""
        rng = np.random.default_rng(seed)
        return {
            "w1": (rng.normal(size=(64, HIDDEN)) / 8).astype("f4"),
            "b1": np.zeros(HIDDEN, "f4"),
            "w2": (rng.normal(size=(HIDDEN, 10)) / 8).astype("f4"),
            "b2": np.zeros(10, "f4"),
        }

    def forward(self, p: Params, x: Array) -> tuple[Array, Array]:
        """The hidden layer, and the probabilities."""
        h = np.maximum(x @ p["w1"] + p["b1"], 0)
        z = h @ p["w2"] + p["b2"]
        e = np.exp(z - z.max(1, keepdims=True))
        return h, e / e.sum(1, keepdims=True)

    def step(self, p: Params, batch: Array) -> None:
        """One step of SGD."""
        x, y = self.x[batch], self.y[batch]
        h, q = self.forward(p, x)
        q[np.arange(len(y)), y] -= 1
        q *= LR / len(y)
        g = (q @ p["w2"].T) * (h > 0)
        p["w2"] -= h.T @ q
        p["b2"] -= q.sum(0)
        p["w1"] -= x.T @ g
        p["b1"] -= g.sum(0)

    def loss(self, p: Params) -> tuple[float, float]:
        """Loss over the training data, and the share of right answers on the rest."""
        q = self.forward(p, self.x)[1]
        right = self.forward(p, self.test_x)[1].argmax(1) == self.test_y
        return float(-np.log(q[np.arange(len(self.y)), self.y] + 1e-12).mean()), float(right.mean())


def train(task: Digits, rule: Rule, *, seed: int, steps: int) -> tuple[float, float]:
    """Train with all workers, `steps` each; loss and accuracy of the center."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        segment = Segment.create(Path(folder), "0123456789abcdef", Path(folder))
        params, replicas = [task.start(seed) for _ in range(WORKERS)], list[Replica]()
        for rank, one in enumerate(params):
            segment.renew(rank)
            center, _ = SharedCenter.open_or_create(segment, "center-0", adapt(one), rank=rank)
            segment.mark(rank, LIVE)
            pace = Every(rule.every)
            sharing = sharing_for(
                rule,
                center,
                pace=pace,
                wire="float32",
                is_alone=False,
                open_collectives=SingleWorker,
                segment=segment,
            )
            context = TrainingContext(Environment(rank=rank, world=WORKERS, own_data=True, seed=seed))
            replicas.append(Replica(adapt(one), sharing, rule=rule, pace=pace, context=context))
            replicas[-1].sharing.begin()
        for replica in replicas:
            if isinstance(replica.sharing, WithPeers):
                replica.sharing.neighbors.look()  # at once: these steps take microseconds
        for _ in range(steps):
            for rank in rng.integers(0, WORKERS, WORKERS):
                task.step(params[rank], rng.integers(0, len(task.y), BATCH))
                replicas[rank].step()
        with replicas[0].center():
            found = task.loss(params[0])
        for rank, replica in enumerate(replicas):
            replica.finish(exchange=False)
            segment.mark(rank, LEFT)
        segment.remove()
    return found


def main() -> None:
    """Print the table and write it to results/gossip.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of each worker")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rules: list[Rule] = [
        EASGD(),
        Gossip(),
        Gossip(alpha=0.25),
        Gossip(q=0.1),
        Gossip(q=0.01),
        Gossip(elastic=False),
        Gossip(0.1, elastic=False),
        NoLoCo(),
        NoLoCo(10),
    ]
    task, rows, first = Digits(), list[dict[str, object]](), 0.0
    for rule in rules:
        found = [train(task, rule, seed=seed, steps=arguments.steps) for seed in range(arguments.seeds)]
        loss = mean(loss for loss, _ in found)
        first = first or loss
        rows.append(
            {
                "rule": repr(rule),
                "loss": round(loss, 5),
                "to EASGD": round(loss / first, 3),
                "losses": " ".join(f"{loss:.4f}" for loss, _ in found),
                "accuracy": round(mean(right for _, right in found), 4),
            }
        )
    report("gossip", f"{WORKERS} workers, {arguments.steps} steps of {BATCH} samples each", rows)


if __name__ == "__main__":
    main()
