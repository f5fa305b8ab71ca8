"""ResNet-20 for CIFAR-10: a convolution, nine residual blocks in three stages, and a linear layer.

    python -m maniple.model examples/models/resnet.py:ResNet --model-arg width=8     # alone
    maniple run -n 2 --model examples/models/resnet.py:ResNet --model-arg data=cifar10.npz

He, Zhang, Ren and Sun 2015, "Deep residual learning for image recognition", section 4.2: the network has 6 `depth` + 2
layers. A shortcut between stages takes every second pixel and adds channels of zeros, which needs no parameters.
"""

from images import ImageModel
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions, whose output is added to their input."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.added = after // before, after - before
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, 1, bias=False),
            *(nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return (self.layers(x) + shortcut).relu()


def resnet(width: int = 16, depth: int = 3) -> nn.Module:
    """Build the network with `width` channels in its first stage and `depth` blocks in each of its three stages."""
    blocks = [Residual(width, width) for _ in range(depth)]
    for channels in (2 * width, 4 * width):
        blocks += [Residual(channels // 2 if i == 0 else channels, channels) for i in range(depth)]
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


class ResNet(ImageModel):
    """ResNet-20 for `maniple run --model`."""

    network = staticmethod(resnet)
