"""What the model classes of this folder share: small colour images in ten classes, and the methods of the contract.

`--model-arg NAME=VALUE` changes the settings of `ImageModel`; docs/data.md says how to make `cifar10.npz`:

    maniple run -n 2 --model examples/models/resnet.py:ResNet --model-arg width=8 --model-arg data=cifar10.npz

Without `data`, images are generated: each class has a pattern of coloured patches, shifted, mirrored and noisy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maniple import schedules
from maniple.model import top_errors


def read(path: str | Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Return up to `count` random images of a file, as floats centred at 0, and their labels."""
    with np.load(path) as arrays:
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    chosen = np.random.default_rng(0).permutation(len(y))[:count]  # the same ones on every worker
    images = torch.from_numpy(x[chosen].transpose(0, 3, 1, 2).astype(np.float32) / 64 - 2)
    return images, torch.from_numpy(y[chosen].astype(np.int64))


def generate(part: str, count: int) -> tuple[Tensor, Tensor]:
    """Generate images: the pattern of a class, shifted by up to 4 pixels, randomly mirrored, plus noise."""
    patterns = np.random.default_rng(0).normal(size=(10, 3, 4, 4)).repeat(10, 2).repeat(10, 3)
    rng = np.random.default_rng({"train": 1, "test": 2}[part])  # the same images on every worker
    labels = rng.integers(0, 10, count)
    images = rng.normal(size=(count, 3, 32, 32)).astype(np.float32)
    for image, label, (i, j) in zip(images, labels, rng.integers(0, 9, (count, 2)), strict=True):
        image += patterns[label, :, i : i + 32, j : j + 32][:, :, :: rng.choice((-1, 1))]
    return torch.from_numpy(images), torch.from_numpy(labels)


class Images:
    """Numbered batches: `n_batch_train` of training images, then `n_batch_val` of a fifth as many test images."""

    def __init__(self, path: str | None, count: int, batch_size: int) -> None:
        parts = [read(path, *one) if path else generate(*one) for one in (("train", count), ("test", count // 5))]
        self.x, self.y = (torch.cat(both) for both in zip(*parts, strict=True))
        self.order, self.batch_size, self.train = torch.arange(len(self.y)), batch_size, len(parts[0][1])
        self.n_batch_train, self.n_batch_val = self.train // batch_size, -(-len(parts[1][1]) // batch_size)

    def shuffle_images(self, epoch: int) -> None:
        """Mix the training images of all batches: equally on every worker, and in a run that is resumed."""
        self.order[: self.train] = torch.from_numpy(np.random.default_rng(epoch).permutation(self.train))

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        test = count - self.n_batch_train
        start = count * self.batch_size if test < 0 else self.train + test * self.batch_size
        rows = self.order[start : start + self.batch_size]
        return self.x[rows], self.y[rows]


class ImageModel:
    """A model class without a network; derived classes set `network`, and `lr` where it differs."""

    network: Callable[..., nn.Module]
    lr = 0.05

    def __init__(self, config: dict[str, Any]) -> None:
        given = {"data": None, "images": 2000, "batch_size": 32, "epochs": 5, "lr": self.lr, "width": 16}
        if unknown := set(config) - {"worker", "rank", "size", "device", "seed", "verbose", *given}:
            raise ValueError(f"--model-arg {unknown.pop()}=... is unknown. Use one of {', '.join(given)}.")
        given |= config
        torch.manual_seed(config["seed"])
        self.n_epochs, self.device = given["epochs"], config["device"]
        self.data = Images(given["data"], given["images"], given["batch_size"])
        self.params = type(self).network(width=given["width"]).to(self.device)
        self.schedule = schedules.cosine(given["lr"], total=self.n_epochs, end=given["lr"] / 100)
        self.optimizer = torch.optim.SGD(self.params.parameters(), given["lr"], momentum=0.9, weight_decay=5e-4)

    def train_iter(self, count: int, _recorder: Any) -> Tensor:
        x, y = (each.to(self.device) for each in self.data.batch(count))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.params.train()(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def val_iter(self, count: int, _recorder: Any) -> dict[str, Any]:
        x, y = (each.to(self.device) for each in self.data.batch(self.data.n_batch_train + count))
        scores = self.params.eval()(x)
        errors = dict(zip(("top1_error", "top5_error"), top_errors(scores, y), strict=True))
        return {"loss": nn.functional.cross_entropy(scores, y), **errors, "samples": len(y)}

    def adjust_hyperp(self, epoch: int) -> None:
        self.data.shuffle_images(epoch)
        schedules.set_lr(self.optimizer, self.schedule(epoch))

    def cleanup(self) -> None: ...
