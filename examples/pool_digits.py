"""A small PyTorch network classifies handwritten digits, in a serial program whose steps run on a pool of workers.

    python examples/pool_digits.py                # images in shared memory, shuffled in each epoch
    python examples/pool_digits.py --resident     # each worker keeps and shuffles its part of the images
    python examples/pool_digits.py --serial       # the same steps in this process, with the same results

There is no launcher and no rank: a call takes whole data sets, each worker trains on its part of the rows, and all
workers have the same model after each step. The test set is evaluated in one call too, in slices.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn; nothing is downloaded.
"""

import argparse
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import maniple


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1400 training images, their labels, 397 test images and their labels; the split is fixed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def build(hidden: int) -> nn.Module:
    """Build a network with two hidden layers, with fixed initial values."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over the images."""
    return nn.functional.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def batches(count: int, size: int, epoch: int) -> list[np.ndarray]:
    """Return batches of row numbers, in a different order for each epoch; the last batch may be smaller."""
    order = np.random.default_rng(epoch).permutation(count)
    return [order[start : start + size] for start in range(0, count, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--resident", action="store_true", help="each worker keeps its part of the images")
    way.add_argument("--serial", action="store_true", help="run in this process only, for comparison")
    parser.add_argument("--workers", type=int, help="number of workers (default: one per core)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step of all workers (default: 64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the two hidden layers (default: 128)")
    args = parser.parse_args()

    x, y, x_test, y_test = load()
    with maniple.Pool(args.workers) as pool:
        print(f"{len(x):,} images, {pool.n} workers", flush=True)
        train = pool.train_function(build(args.hidden), loss, "momentum", lr=args.lr)
        test = pool.function(accuracy, scatter=("x", "y"), reduce="mean")
        step, check = (train.serial, test.serial) if args.serial else (train, test)
        if args.resident:
            x, y = pool.scatter(x), pool.scatter(y)
            rows, size, select = min(pool.lengths(x)), max(1, args.batch_size // pool.n), "batch_s"
        else:
            x, y = pool.data(x), pool.data(y)
            rows, size, select = len(x), args.batch_size, "batch"

        for epoch in range(args.epochs):
            start = time.perf_counter()
            losses = [step(x, y, **{select: batch}) for batch in batches(rows, size, epoch)]
            duration = time.perf_counter() - start
            right = check(train.model, x_test, y_test, num_slices=4)  # all test images in one call
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}, test accuracy {right:.2%}, {duration:.2f} s", flush=True)


if __name__ == "__main__":
    main()
