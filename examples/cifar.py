"""A convolutional network classifies small photographs into ten classes. The same script runs under every rule.

    python examples/cifar.py                                              # alone, on generated pictures
    maniple run -n 2 examples/cifar.py --data cifar10.npz --pictures 5000 --epochs 10
    maniple run -n 2 --rule bsp examples/cifar.py --network resnet --width 8

The networks are those of the folder `models`, without their classes: a script with its own loop needs the module only.
Without --data, pictures are generated: each class has a pattern of coloured patches, which is shifted, mirrored and
noisy. With --data, they come from a NumPy file with `x_train` (bytes: picture, row, column, colour), `y_train` and the
same for `_test`, such as CIFAR-10 (Krizhevsky 2009) or a part of it; docs/data.md says how to make it.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple

sys.path.append(str(Path(__file__).parent / "models"))
from images import generate, read


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of pictures that are classified correctly."""
    right = (model.eval()(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("net", "alexnet", "googlenet", "vgg", "resnet")
    parser.add_argument("--network", choices=names, default="net", help="a file of the folder models (net)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer, or in proportion (16)")
    parser.add_argument("--data", type=Path, help="a file of pictures (default: generated ones)")
    parser.add_argument("--pictures", type=int, default=2000, help="training pictures; a fifth as many to test (2000)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the pictures (3)")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per step and worker (32)")
    parser.add_argument("--lr", type=float, default=0.002, help="Adam's learning rate (0.002)")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; 0: the environment's default (1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    train, test = (
        read(args.data, part, count) if args.data else generate(part, count)
        for part, count in (("train", args.pictures), ("test", args.pictures // 5))
    )
    model = getattr(importlib.import_module(args.network), args.network)(width=args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    replica = worker.share(model, optimizer)
    batches = DataLoader(TensorDataset(*train), batch_size=args.batch_size, sampler=worker.sampler(train[0]))
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(
        f"{who}: {len(train[0]):,} pictures, {parameters:,} parameters, threads: {torch.get_num_threads()}", flush=True
    )
    for epoch in worker.epochs(args.epochs):
        for pictures, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            if replica.steps % 20 == 0:
                worker.log(loss=loss, epoch=epoch)
                print(f"{who}: epoch {epoch}, {replica.steps:,} steps, loss {loss:.2f}", flush=True)
        with replica.center():  # the shared parameters
            shared = accuracy(model, *test)
        print(f"{who}: epoch {epoch} is over, test accuracy of the center {shared:.1%}", flush=True)


if __name__ == "__main__":
    main()
