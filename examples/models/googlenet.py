"""GoogLeNet at the size of CIFAR-10: nine inception modules, with batch normalisation.

    python -m maniple.model examples/models/googlenet.py:GoogLeNet --model-arg width=8     # alone
    maniple run -n 2 --model examples/models/googlenet.py:GoogLeNet --model-arg data=cifar10.npz

Szegedy et al. 2014, "Going deeper with convolutions". A convolution and a pooling replace the first layers, which
reduce images of 224 x 224 pixels to 28 x 28, and there are no auxiliary classifiers. `width=64` gives the paper's
numbers of channels.
"""

import torch
from images import ImageModel
from torch import Tensor, nn

# Channels of each module in 64ths of `width`: 1 x 1; 3 x 3 reduce, 3 x 3; 5 x 5 reduce, 5 x 5; after pooling. The
# modules of a row work on images of one size.
MODULES = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
        *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128)),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def convolution(before: int, after: int, size: int) -> nn.Sequential:
    """Build a convolution that keeps the size of the image, with batch normalisation."""
    layer = nn.Conv2d(before, after, size, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU())


class Inception(nn.Module):
    """Convolutions of three sizes and a pooling, side by side."""

    def __init__(self, before: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pooled = channels
        self.branches = nn.ModuleList(
            [
                convolution(before, one, 1),
                nn.Sequential(convolution(before, reduce3, 1), convolution(reduce3, three, 3)),
                nn.Sequential(convolution(before, reduce5, 1), convolution(reduce5, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(before, pooled, 1)),
            ]
        )
        self.channels = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def googlenet(width: int = 16) -> nn.Module:
    """Build the network, with `width` / 64 of the paper's channels."""
    channels = 3 * width
    layers: list[nn.Module] = [convolution(3, channels, 3), nn.MaxPool2d(3, 2, 1)]
    for stage in MODULES:
        for sizes in stage:
            layers.append(module := Inception(channels, tuple(max(1, size * width // 64) for size in sizes)))
            channels = module.channels
        layers.append(nn.MaxPool2d(3, 2, 1))
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, 10))


class GoogLeNet(ImageModel):
    """GoogLeNet for `maniple run --model`."""

    network = staticmethod(googlenet)
