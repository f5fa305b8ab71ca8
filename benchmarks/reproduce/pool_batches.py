"""Synkhronos' experiment: how the speed-up of a pool grows with the batch.

A training step of an MLP (784-512-512-10, as for MNIST) on the workers of a pool, and the same step in one process
(`.serial`), in turns, with data in shared memory and rows selected at random.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import maniple

BATCHES = (64, 256, 1024, 4096)
ROWS = 16_384
WORKERS = 2


def build() -> nn.Module:
    """Build the network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(model(x), y)


def speed_ups(seconds: float = 1.0, rounds: int = 7) -> list[dict[str, Any]]:
    """One row for each batch size: images per second of one process and of the pool, and the median of the ratios."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    with maniple.Pool(WORKERS) as pool:
        x = pool.data(torch.from_numpy(rng.random((ROWS, 784), np.float32)))
        y = pool.data(torch.from_numpy(rng.integers(0, 10, ROWS)))
        step = pool.train_function(build(), loss, "sgd", lr=0.001)
        for batch in BATCHES:

            def rate(one: Any, size: int = batch) -> float:
                steps, begin = 0, time.perf_counter()
                while time.perf_counter() - begin < seconds:
                    one(x, y, batch=rng.integers(0, ROWS, size))
                    steps += 1
                return steps * size / (time.perf_counter() - begin)

            pairs = [(rate(step.serial), rate(step)) for _ in range(rounds)]
            serial, together = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratios = statistics.median(b / a for a, b in pairs)
            rows.append({"batch": batch, "workers": WORKERS, "one": serial, "pool": together, "speed-up": ratios})
            print(f"pool, batch {batch:>5}: {ratios:.2f} times one process", flush=True)
    return rows
