"""Known relations: four workers on the digits, in one process, end where the rules are known to end.

A network 64-32-10 on 1,400 of scikit-learn's digits, 4 shards, batch 32, 300 steps per worker, rate 0.1, workers in
random order. EASGD hardly depends on the period and beats a worker that is alone with its shard; Downpour learns
fastest at 1 step and diverges at 64.
"""

import numpy as np
import pytest

from maniple.contracts import ExchangeInfo
from maniple.rules import EASGD, Downpour, Rule

datasets = pytest.importorskip("sklearn.datasets")
SHAPES = [(64, 32), (32,), (32, 10), (10,)]
CUTS = np.cumsum([0] + [int(np.prod(shape)) for shape in SHAPES])


def parts(flat: np.ndarray) -> list[np.ndarray]:
    return [flat[a:b].reshape(shape) for a, b, shape in zip(CUTS, CUTS[1:], SHAPES, strict=False)]


def loss_and_gradient(flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    w1, b1, w2, b2 = parts(flat)
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores -= scores.max(1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(1, keepdims=True)
    loss = float(-np.log(p[np.arange(len(y)), y] + 1e-30).mean())
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w2.T) * (hidden > 0)
    gradient = [x.T @ back, back.sum(0), hidden.T @ p, p.sum(0)]
    return loss, np.concatenate([g.ravel() for g in gradient])


def train(rule: Rule, period: int, seed: int, *, workers: int = 4, alone: bool = False) -> tuple[float, float]:
    """The test loss of the center, and the mean distance of the workers from it, relative to its size."""
    rng = np.random.default_rng(seed)
    x, y = datasets.load_digits(return_X_y=True)
    order = rng.permutation(len(y))
    x, y = ((x[order] - x.mean()) / x.std()).astype("float32"), y[order]
    scale = [np.sqrt(2 / 64), 0, np.sqrt(2 / 32), 0]
    c = np.concatenate([(rng.normal(size=s) * k).ravel() for s, k in zip(SHAPES, scale, strict=True)]).astype("float32")
    replicas = [c.copy() for _ in range(workers)]
    states = [{name: c.copy() for name in rule.worker_vectors} for _ in range(workers)]
    shards = np.array_split(np.arange(1400), workers)
    turns = rng.permutation(np.repeat(np.arange(1 if alone else workers), 300))
    made = np.zeros(workers, int)
    with np.errstate(all="ignore"):
        for w in turns:
            batch = rng.choice(shards[w], 32)
            replicas[w] -= np.float32(0.1) * loss_and_gradient(replicas[w], x[batch], y[batch])[1]
            made[w] += 1
            if made[w] % period == 0:
                rule.exchange(replicas[w], c, states[w], ExchangeInfo(step=int(made[w]), live=workers))
        spread = float(np.mean([np.linalg.norm(r - c) for r in replicas]) / np.linalg.norm(c))
        return loss_and_gradient(c, x[1400:], y[1400:])[0], spread


def mean_loss(rule: Rule, period: int, *, alone: bool = False) -> float:
    return float(np.mean([train(rule, period, seed, alone=alone)[0] for seed in (1, 2, 3)]))


def test_easgd_beats_a_worker_alone_with_its_shard_and_hardly_depends_on_the_period():
    alone = mean_loss(EASGD(0.0, center_alpha=1.0), 1, alone=True)  # the center is the one worker's copy
    often, seldom, rarely = (mean_loss(EASGD(), period) for period in (1, 10, 64))
    assert often < 0.9 * alone
    assert seldom < 1.15 * often
    assert rarely < 1.6 * often


def test_easgd_keeps_the_workers_near_the_center_but_not_on_it():
    spreads = [train(EASGD(), period, seed=1)[1] for period in (1, 10, 64)]
    assert 0.003 < spreads[0] < spreads[1] < spreads[2] < 0.25


def test_downpour_learns_fastest_at_one_step_and_diverges_at_many():
    assert mean_loss(Downpour(), 1) < 0.75 * mean_loss(EASGD(), 1)
    assert mean_loss(Downpour(), 64) > 1
