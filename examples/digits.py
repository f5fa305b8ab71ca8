"""A small PyTorch network classifies handwritten digits: the same script alone and on several workers.

    python examples/digits.py                          # alone: plain training
    maniple run -n 2 examples/digits.py                # two workers, one shared model
    maniple run -n 2 --rule downpour --every 1 examples/digits.py --epochs 20

maniple needs three lines: `maniple.join()`, `worker.share(model, optimizer)` and `worker.sampler(x)`. In each epoch the
sampler gives every worker its own part of the images, so that N workers together train on as many images as one worker
alone, in about 1/N of the time. The command line sets rule and pace.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn; nothing is downloaded.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1400 training images, their labels, 397 test images and their labels; the split is fixed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def build(hidden: int) -> nn.Module:
    """Build a network with two hidden layers."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="passes over the images (default: 100)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and worker (default: 16)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the two hidden layers (default: 128)")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; 0: PyTorch's default (default: 1)")
    args = parser.parse_args()

    if args.threads:
        torch.set_num_threads(args.threads)  # a network this small gains nothing from more than one

    worker = maniple.join()  # line 1: connect to the other workers
    torch.manual_seed(worker.seed)
    x, y, x_test, y_test = load()
    model = build(args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    replica = worker.share(model, optimizer)  # line 2: share the model; optimizer.step() now also exchanges

    sampler = worker.sampler(x)  # line 3: divide the images of each epoch among the workers
    batches = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, sampler=sampler)
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(f"{who}: {len(x):,} images, {parameters:,} parameters, threads: {torch.get_num_threads()}", flush=True)
    samples, start = 0, time.perf_counter()
    for epoch in worker.epochs(args.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            samples += len(labels)
            if replica.steps % 20 == 0:
                worker.log(loss=loss)
            if replica.steps % 1000 == 0:
                print(f"{who}: epoch {epoch}, {replica.steps:,} steps, loss {loss:.3f}", flush=True)
    duration = time.perf_counter() - start

    own = accuracy(model, x_test, y_test)  # this worker's replica
    with replica.center():  # without a launcher, the replica is the center
        center = accuracy(model, x_test, y_test)
    worker.log(own_accuracy=own, center_accuracy=center)
    print(
        f"{who}: {samples:,} samples in {duration:.1f} s, "
        f"{samples / duration:,.0f} samples/s, test accuracy {center:.1%} (own replica {own:.1%})"
    )


if __name__ == "__main__":
    main()
