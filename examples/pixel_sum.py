"""A linear model learns to sum the pixels of an image, with a custom rule and a feed. NumPy only.

    python examples/pixel_sum.py                                    # alone; another process makes the batches
    maniple run -n 2 --feed 'examples/pixel_sum.py --produce' examples/pixel_sum.py
    maniple run -n 2 --producers 2 --feed 'examples/pixel_sum.py --produce' examples/pixel_sum.py --lr 0.1

This file has two roles. With `--produce` it generates random images and their sums, and pushes them in batches;
without, it is a worker that takes batches from the shared queue. The correct weights are known, all 1, so the remaining
error of the model is known too.
"""

import argparse
from collections.abc import Iterator

import numpy as np

import maniple

SIDE = 8


class Nudge(maniple.Rule):
    """Elastic averaging, implemented by hand: replica and center each move a share of the way to the other."""

    def __init__(self, share: float = 0.4) -> None:
        self.share = share

    def mix(self, x, c, state):  # noqa: ARG002 - for rules with state
        step = self.share * (x - c)
        return x - step, c + step


def batches(seed: int, count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of random images and their sums, with a little noise."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        images = random.random((size, SIDE, SIDE), np.float32)
        yield images, images.sum((1, 2)) + 0.01 * random.standard_normal(size, np.float32)


def produce(args: argparse.Namespace) -> None:
    """Push this producer's share of the batches. The feed ends when the script ends."""
    feed = maniple.Feed(high_water=16)
    for images, sums in batches(feed.index, args.batches // feed.count, args.batch_size):
        feed.push(images, sums)


def train(args: argparse.Namespace) -> None:
    """Train on batches until the feed ends."""
    worker = maniple.join()
    weights = np.zeros(SIDE * SIDE, np.float32)
    replica = worker.share({"weights": weights}, rule=Nudge())
    is_fed = worker.world > 1
    source = worker.feed() if is_fed else maniple.Prefetch(batches(0, args.batches, args.batch_size))

    taken, who = 0, f"worker {worker.rank} of {worker.world}"
    print(f"{who}: {len(weights)} weights, batches {'from a feed' if is_fed else 'made here'}", flush=True)
    for images, sums in source:
        pixels = images.reshape(len(images), -1)
        error = pixels @ weights - sums
        weights -= args.lr * pixels.T @ error / len(error)
        replica.samples = len(images)
        replica.step()
        taken += 1
        if taken % 100 == 0:
            worker.log(loss=float((error**2).mean()))
        if taken % 1000 == 0:
            print(f"{who}: {taken:,} batches, loss {(error**2).mean():.1e}", flush=True)

    with replica.center():
        off = np.abs(weights - 1).max()
    print(f"{who}: {taken} batches, weights of the center are off by {off:.3f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--produce", action="store_true", help="run as a producer instead of a worker")
    parser.add_argument("--batches", type=int, default=4000, help="total batches of all producers (4000)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (32)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (0.05)")
    args = parser.parse_args()
    (produce if args.produce else train)(args)


if __name__ == "__main__":
    main()
