"""A small convolutional network for images of 32 x 32 pixels, as a model class and as a torch module.

    python -m maniple.model examples/models/net.py:Net                     # alone
    maniple run -n 2 --model examples/models/net.py:Net --rule bsp         # two workers

The other files of this folder have the same two names, a class and a function; images.py has what they share. A
script, or a program with a pool, calls the function: `from net import net` with this folder on its path.
"""

from images import ImageModel
from torch import nn


def net(width: int = 16) -> nn.Module:
    """Build three convolutions with 2 x 2 max pooling, and two linear layers."""
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))


class Net(ImageModel):
    """The network for `maniple run --model`."""

    network = staticmethod(net)
    lr = 0.02  # without batch normalisation, 0.05 diverges
