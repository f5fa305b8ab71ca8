"""Train a small GAN on each worker, and let the discriminators of random pairs of workers change places.

    python examples/gan_swap.py                          # one GAN
    maniple run -n 4 examples/gan_swap.py                # four, and a swap every 50 steps
    maniple run -n 4 --every 500 examples/gan_swap.py    # every 500 steps

The generators learn eight Gaussians on a circle. One that repeats a few of them, because its discriminator does not
see it, meets the discriminators of the others. Nothing is averaged; each worker draws its own data, and keeps its own
generator. Im et al.: Generative adversarial parallelization (arXiv:1612.04021).
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import maniple

RADIUS, WIDTH, NOISE = 2.0, 0.05, 8


def means() -> Tensor:
    """The centers of the eight Gaussians."""
    angles = torch.arange(8) * math.pi / 4
    return RADIUS * torch.stack([angles.cos(), angles.sin()], 1)


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each worker (2000)")
    parser.add_argument("--batch-size", type=int, default=128, help="points per step (128)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the layers are too small for more
    worker = maniple.join(own_data=True)
    torch.manual_seed(worker.seed)
    gan = nn.ModuleDict({"generator": layers(NOISE, 2), "discriminator": layers(2, 1)})
    generator, discriminator = gan["generator"], gan["discriminator"]
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    worker.share(
        gan, g_optimizer, rule=maniple.Swap(every=50, names="discriminator.*")
    )  # the steps of this optimizer are counted
    torch.manual_seed(worker.seed)  # all begin with the same parameters, but go on with their own data

    for step in range(args.steps):
        fake = generator(torch.randn(args.batch_size, NOISE))
        points = means()[torch.randint(8, (args.batch_size,))] + WIDTH * torch.randn(args.batch_size, 2)
        points.requires_grad_()
        score = discriminator(points)
        d_loss = (softplus(-score) + softplus(discriminator(fake.detach()))).mean()
        slope = torch.autograd.grad(score.sum(), points, create_graph=True)[0]
        d_loss = d_loss + 0.1 * slope.square().sum(1).mean()  # keeps the game from running in circles
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = softplus(-discriminator(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()  # a swap follows if it is due
        if step % 100 == 0:
            worker.log(loss=g_loss, discriminator=d_loss)

    with torch.no_grad():
        distances = torch.cdist(generator(torch.randn(2000, NOISE)), means())
    nearest, which = distances.min(1)
    is_near = nearest < 5 * WIDTH
    found, share = len(which[is_near].unique()), is_near.float().mean()
    print(f"worker {worker.rank}: {found} of 8 Gaussians, {share:.0%} of the points near one", flush=True)


if __name__ == "__main__":
    main()
