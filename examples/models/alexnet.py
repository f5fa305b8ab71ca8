"""AlexNet at the size of CIFAR-10: five convolutions, dropout and two hidden linear layers.

    python -m maniple.model examples/models/alexnet.py:AlexNet             # alone
    maniple run -n 2 --model examples/models/alexnet.py:AlexNet --model-arg data=cifar10.npz

Krizhevsky, Sutskever and Hinton 2012, "ImageNet classification with deep convolutional neural networks". The kernels of
the first layer have 5 x 5 pixels instead of 11 x 11 with a stride of 4, since images have 32 x 32 pixels instead of
224 x 224, and batch normalisation replaces local response normalisation, so that the network learns from the first
steps on. `width=64` gives the paper's numbers of channels, rounded.
"""

from images import ImageModel
from torch import nn

# Channels in multiples of `width`, size of the kernel, and whether a pooling follows.
CONVOLUTIONS = ((1, 5, True), (3, 5, True), (6, 3, False), (4, 3, False), (4, 3, True))


def alexnet(width: int = 16) -> nn.Module:
    """Build the network; `width` is the number of channels of the first convolution."""
    layers: list[nn.Module] = []
    channels = 3
    for factor, size, is_pooled in CONVOLUTIONS:
        layers.append(nn.Conv2d(channels, factor * width, size, padding=size // 2, bias=False))
        layers += [nn.BatchNorm2d(factor * width), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2, 1)] if is_pooled else []
        channels = factor * width
    layers.append(nn.Flatten())
    for before in (16 * channels, 16 * width):
        layers += [nn.Dropout(), nn.Linear(before, 16 * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16 * width, 10))


class AlexNet(ImageModel):
    """AlexNet for `maniple run --model`."""

    network = staticmethod(alexnet)
    lr = 0.02  # dropout makes gradients noisy
