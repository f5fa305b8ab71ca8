"""The four experiments of `make reproduce`: data that every machine has or can generate, a model, and a target.

    digits        an MLP on the digits of scikit-learn; SGD with momentum
    images        a CNN on distorted digits, or on MNIST, Fashion-MNIST or CIFAR-10; SGD with momentum
    reviews       an LSTM on generated reviews, or on IMDB (Platoon's example); Adam
    characters    a causal transformer on the sources of the standard library; AdamW

`--data FOLDER` replaces generated data by the files `mnist.npz`, `fashion_mnist.npz`, `cifar10.npz` or `imdb.npz` in
it (docs/data.md says how to make them). The data and the order of the samples do not depend on the number of workers.
"""

import importlib
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CHARACTERS = 128  # ASCII; other characters are replaced
EPOCHS = {"digits": 12, "images": 8, "reviews": 3, "characters": 1}


@dataclass(frozen=True)
class Task:
    """One experiment. `metric` of the test set is "accuracy", or "loss" where accuracy would be too coarse."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    lr: float  # of one worker; the grid multiplies it
    batch: int  # of one process, and of each worker unless its share is said
    epochs: int
    metric: str
    target: float

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """The metric of the test set, in batches that fit into the cache."""
        model.eval()
        total = 0.0
        for x, y in zip(self.x_test.split(256), self.y_test.split(256), strict=True):
            right = model(x).argmax(-1) == y if self.metric == "accuracy" else self.loss(model, x, y)
            total += right.float().mean().item() * len(x)
        model.train()
        return total / len(self.x_test)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam with its defaults."""
    return torch.optim.Adam(model.parameters(), lr=lr)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with its defaults."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def digits(_: Path | None) -> Task:
    """20,000 slightly distorted digits of 12 x 12 pixels."""
    x, y, x_test, y_test = _distorted(20_000, size=12, turn=0.3, noise=0.2)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(144, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    parts = x.flatten(1), y, x_test.flatten(1), y_test
    return Task(*parts, build, sgd, lr=0.025, batch=16, epochs=EPOCHS["digits"], metric="accuracy", target=0.93)


def images(data: Path | None) -> Task:
    """12,000 strongly distorted digits of 20 x 20 pixels, or the images of a file."""
    parts = _image_files(data) if data is not None else _distorted(12_000, size=20, turn=0.7, noise=0.2)
    channels, size = parts[0].shape[1], parts[0].shape[2]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * (size // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    targets = {"mnist": 0.985, "fashion_mnist": 0.88, "cifar10": 0.5}
    target = targets[data.stem] if data is not None else 0.91
    return Task(*parts, build, sgd, lr=0.03, batch=32, epochs=EPOCHS["images"], metric="accuracy", target=target)


def reviews(data: Path | None) -> Task:
    """16,000 generated reviews, positive if they have more positive than negative words; or those of IMDB."""
    parts, words = (_review_file(data), 10_000) if data is not None else (_generated_reviews(), 201)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, 64, padding_idx=0)
            self.lstm = nn.LSTM(64, 64, batch_first=True)
            self.output = nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.lstm(self.embedding(x))
            mask = (x != 0).unsqueeze(2)
            return self.output((states * mask).sum(1) / mask.sum(1).clamp(min=1))

    # Its loss shows progress that the accuracy of 4,000 reviews, a number with much chance in it, shows late.
    metric, target = ("accuracy", 0.80) if data is not None else ("loss", 0.15)
    return Task(*parts, Reader, adam, lr=0.02, batch=32, epochs=EPOCHS["reviews"], metric=metric, target=target)


def characters(_: Path | None) -> Task:
    """800,000 characters of the standard library's sources, in rows of 64."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)[:800_000]
    codes = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    rows = codes.unfold(0, 65, 64)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    train, test = rows[:-1000], rows[-1000:]

    class Reader(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.characters = nn.Embedding(CHARACTERS, width)
            self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
            self.output = nn.Linear(width, CHARACTERS)
            self.register_buffer("later", torch.ones(64, 64, dtype=torch.bool).triu(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.layers(self.characters(x) + self.positions, self.later, is_causal=True))

    parts = train[:, :-1].contiguous(), train[:, 1:].contiguous(), test[:, :-1].contiguous(), test[:, 1:].contiguous()
    return Task(*parts, Reader, adamw, lr=0.01, batch=16, epochs=EPOCHS["characters"], metric="loss", target=1.7)


def network(name: str, width: int, batch: int) -> Task:
    """One of examples/models on 5,120 random images, for the time of a pass over them; there is nothing to learn."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "models"))
    build = getattr(importlib.import_module(name), name)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5120, 3, 32, 32, generator=generator), torch.randint(0, 10, (5120,), generator=generator)
    parts = x, y, x[:64], y[:64]
    return Task(*parts, lambda: build(width=width), sgd, lr=0.001, batch=batch, epochs=1, metric="loss", target=0)


TASKS: dict[str, Callable[[Path | None], Task]] = {
    "digits": digits,
    "images": images,
    "reviews": reviews,
    "characters": characters,
}
# Batches as in Parallel-training's table; widths with which a pass takes seconds on a CPU.
TIMED: dict[str, Callable[[Path | None], Task]] = {
    "alexnet": lambda _: network("alexnet", 16, 128),
    "googlenet": lambda _: network("googlenet", 8, 32),
    "vgg": lambda _: network("vgg", 8, 32),
    "resnet": lambda _: network("resnet", 8, 32),
}
FILES = {"images": ("mnist", "fashion_mnist", "cifar10"), "reviews": ("imdb",)}


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    flat, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(flat[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return x, torch.tensor(labels[order])


def _distorted(count: int, *, size: int, turn: float, noise: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate by up to `turn`, scale and shift the digits at random, and add noise; the test has other originals."""
    x, y = _digits()
    generator = torch.Generator().manual_seed(1)

    def distort(first: int, last: int, count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(first, last, (count,), generator=generator)
        angle = (2 * torch.rand(count, generator=generator) - 1) * turn
        scale = 0.8 + 0.5 * torch.rand(count, generator=generator)
        rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
        shift = (torch.rand(count, 2, 1, generator=generator) - 0.5) * turn
        affine = torch.cat([rotation * scale.view(-1, 1, 1), shift], 2)
        grid = nn.functional.affine_grid(affine, [count, 1, size, size], align_corners=False)
        image = nn.functional.grid_sample(x[which], grid, align_corners=False)
        return image + noise * torch.randn(image.shape, generator=generator), y[which]

    return *distort(0, 1400, count), *distort(1400, len(y), 4_000)


def _image_files(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(path) as arrays:
        found = {name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def shaped(images: np.ndarray) -> Tensor:
        x = torch.tensor(images, dtype=torch.float32) / 255 - 0.5
        return x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()

    labels = (torch.tensor(found[name].astype(np.int64)).flatten() for name in ("y_train", "y_test"))
    y_train, y_test = labels
    return shaped(found["x_train"]), y_train, shaped(found["x_test"]), y_test


def _generated_reviews() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reviews of 20 to 50 words out of 200; the weight of a word follows from its number, and is to be learned."""
    rng = np.random.default_rng(2)
    weights = np.concatenate([[0.0], rng.normal(size=200)])

    def generate(count: int) -> tuple[Tensor, Tensor]:
        words = rng.integers(1, 201, (count, 50))
        words[np.arange(50) >= rng.integers(20, 51, count)[:, None]] = 0
        # A negation, word 1, turns the weight of the next word round: the order matters.
        signs = np.where(np.roll(words, 1, axis=1) == 1, -1, 1)
        return torch.from_numpy(words), torch.from_numpy(((weights[words] * signs).sum(1) > 0).astype(np.int64))

    return *generate(16_000), *generate(4_000)


def _review_file(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(path) as arrays:
        found = {key: arrays[key] for key in arrays.files if key != "vocab"}

    def read(part: str, count: int) -> tuple[Tensor, Tensor]:
        tokens, lengths, labels = (found[f"{part}_{name}"] for name in ("tokens", "lengths", "labels"))
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        words = np.zeros((count, 50), np.int64)
        for row, start, length in zip(words, starts, lengths, strict=False):
            kept = min(int(length), 50)
            row[:kept] = tokens[start : start + kept]
        return torch.from_numpy(words), torch.from_numpy(labels[:count].astype(np.int64))

    return *read("train", min(20_000, len(found["train_labels"]))), *read("test", 2_000)
