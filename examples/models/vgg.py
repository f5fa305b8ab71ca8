"""VGG-16 at the size of CIFAR-10: thirteen convolutions of 3 x 3 pixels in five stages, with batch normalisation.

    python -m maniple.model examples/models/vgg.py:VGG --model-arg width=8     # alone
    maniple run -n 2 --model examples/models/vgg.py:VGG --model-arg data=cifar10.npz --model-arg width=64

Simonyan and Zisserman 2014, "Very deep convolutional networks for large-scale image recognition". After five poolings
one pixel is left of 32 x 32, so one linear layer suffices. `width=64` gives the paper's numbers of channels.
"""

from images import ImageModel
from torch import nn

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # channels, in multiples of `width`, and convolutions


def vgg(width: int = 16) -> nn.Module:
    """Build the network; `width` is the number of channels of the first stage."""
    layers: list[nn.Module] = []
    channels = 3
    for factor, convolutions in STAGES:
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(factor * width), nn.ReLU()]
            channels = factor * width
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class VGG(ImageModel):
    """VGG-16 for `maniple run --model`."""

    network = staticmethod(vgg)
