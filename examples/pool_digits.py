"""A small PyTorch network classifies handwritten digits, in a serial program whose steps run on a pool of workers.

    python examples/pool_digits.py                  # images in shared memory, shuffled in each epoch
    python examples/pool_digits.py --resident       # each worker keeps and shuffles its part of the images
    python examples/pool_digits.py --serial         # the same steps in this process, with the same results
    python examples/pool_digits.py --data mnist.npz --batch-size 500 --epochs 5

There is no launcher and no rank: a call takes whole data sets, each worker trains on its part of the rows, and all
workers have the same model after each step. `batch` selects rows of the whole set, and each worker copies its own part
of them; `batch_s` selects rows of the part that each worker keeps, with one list for each worker.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn, or MNIST from a file (docs/data.md).
"""

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import maniple


def load(path: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, one per row, with their labels, and test images with theirs; the split is fixed."""
    if path is None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        (x, x_test), (y, y_test) = np.split(images[order] / 16, [1400]), np.split(labels[order], [1400])
    else:
        with np.load(path) as arrays:
            x, x_test = (arrays[name].reshape(-1, 28 * 28) / 255 for name in ("x_train", "x_test"))
            y, y_test = arrays["y_train"], arrays["y_test"]
    return torch.Tensor(x), torch.LongTensor(y), torch.Tensor(x_test), torch.LongTensor(y_test)


def build(inputs: int, hidden: int) -> nn.Module:
    """Build a network with two hidden layers, with fixed initial values."""
    torch.manual_seed(0)
    first = nn.Linear(inputs, hidden)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over the images."""
    return nn.functional.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def batches(count: int, size: int, *seed: int) -> list[np.ndarray]:
    """Return batches of row numbers, in an order drawn from `seed`; the last batch may be smaller."""
    order = np.random.default_rng(seed).permutation(count)
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
    parser.add_argument("--data", type=Path, help="a file of MNIST (default: scikit-learn's digits)")
    args = parser.parse_args()
    x, y, x_test, y_test = load(args.data)
    with maniple.Pool(args.workers) as pool:
        print(f"{len(x):,} images, {pool.n} workers", flush=True)
        train = pool.train_function(build(x.shape[1], args.hidden), loss, "momentum", lr=args.lr)
        test = pool.function(accuracy, scatter=("x", "y"), reduce="mean")
        step, check = (train.serial, test.serial) if args.serial else (train, test)
        x, y = (pool.scatter(x), pool.scatter(y)) if args.resident else (pool.data(x), pool.data(y))
        size = max(1, args.batch_size // pool.n)  # of a worker's part
        for epoch in range(args.epochs):
            start = time.perf_counter()
            if args.resident:  # each worker has its own order of its own rows
                orders = [batches(rows, size, epoch, rank) for rank, rows in enumerate(pool.lengths(x))]
                steps = itertools.zip_longest(*orders, fillvalue=np.arange(0))  # one part may be a row longer
                losses = [step(x, y, batch_s=list(rows)) for rows in steps]
            else:
                losses = [step(x, y, batch=rows) for rows in batches(len(x), args.batch_size, epoch)]
            duration = time.perf_counter() - start
            right = check(train.model, x_test, y_test, num_slices=4)  # all test images in one call
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}, test accuracy {right:.2%}, {duration:.2f} s", flush=True)


if __name__ == "__main__":
    main()
