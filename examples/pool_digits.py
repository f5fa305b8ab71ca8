"""Handwritten digits with a small PyTorch network: a serial program whose steps are made by all workers of a pool.

    python examples/pool_digits.py                # images in shared memory, shuffled anew for each epoch
    python examples/pool_digits.py --resident     # each worker keeps its part of the images, and shuffles that
    python examples/pool_digits.py --serial       # the same steps in this process alone: the same figures

There is no launcher, and nobody asks which worker it is: a call takes whole data sets, each worker learns from its part
of the rows, and the model is the same for all of them after each step. The test set is one call too, in slices.

The data are the 1797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.
"""

import argparse
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import maniple


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1400 images to train on with their labels, and 397 others to test on: always the same split."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def build(hidden: int) -> nn.Module:
    """A network with two hidden layers, always the same at the start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What training makes smaller: a mean over images."""
    return nn.functional.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images that the model names correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def batches(count: int, size: int, epoch: int) -> list[np.ndarray]:
    """The numbers of all rows in another order for each epoch, in batches; the last one may be smaller."""
    order = np.random.default_rng(epoch).permutation(count)
    return [order[start : start + size] for start in range(0, count, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--resident", action="store_true", help="each worker keeps its part of the images")
    way.add_argument("--serial", action="store_true", help="in this process alone, for comparison")
    parser.add_argument("--workers", type=int, help="how many (default: one for each core)")
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
