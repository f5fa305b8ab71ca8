"""A recurrent network reads handwritten digits row by row: asynchronous SGD as in Legion.

    python examples/rnn.py                                  # alone
    maniple run -n 2 examples/rnn.py                        # on two local workers
    maniple serve --name digits                             # or: only a host ...
    maniple join runs/digits examples/rnn.py                # ... and any number of workers that join it

An exchange averages a worker's parameters with the center's, and the worker continues from the average:
`ASGD(0.5, 0.5)`. Exchanges take at most a quarter of the time, regardless of the network's speed: `RateLimit(0.25)`.
Workers join and leave, so each stops after its own training time, and not after a number of passes: `StopAfter`.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn; nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1400 training images, their labels, 397 test images and their labels; the split is fixed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


class Reader(nn.Module):
    """A GRU that reads one row of pixels at a time, and a linear classifier of its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(8, width, batch_first=True)
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.gru(images)
        return self.output(states[:, -1])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="training time of each worker in seconds (20)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker (32)")
    parser.add_argument("--lr", type=float, default=0.003, help="Adam's learning rate (0.003)")
    parser.add_argument("--width", type=int, default=64, help="width of the GRU's state (64)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # a network this small gains nothing from more
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    x, y, x_test, y_test = load()
    model = Reader(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    replica = worker.share(
        model,
        optimizer,
        rule=maniple.ASGD(0.5, 0.5),
        pace=maniple.RateLimit(0.25),
        stop=maniple.StopAfter(args.seconds),
    )

    batches = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, sampler=worker.sampler(x))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"worker {worker.rank}: {len(x):,} images, {parameters:,} parameters, threads: 1", flush=True)
    while not worker.should_stop:
        for images, labels in batches:  # ends early if the worker should stop
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()  # also exchanges, if an exchange is due
            worker.log(loss=loss)
            if replica.steps % 500 == 0:
                print(f"worker {worker.rank}: {replica.steps:,} steps, loss {loss:.3f}", flush=True)

    with replica.center():  # without a launcher, the replica is the center
        shared = accuracy(model, x_test, y_test)
    print(
        f"worker {worker.rank}: {replica.steps:,} steps, {replica.sync_share:.0%} of the time in exchanges, "
        f"test accuracy of the center {shared:.1%}"
    )


if __name__ == "__main__":
    main()
