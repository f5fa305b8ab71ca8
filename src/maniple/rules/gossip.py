"""Rules without a center: workers exchange with random peers, and none waits for another."""

from typing import NamedTuple

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.rules.rule import Rule, checked_flag, checked_share


class Shared(NamedTuple):
    """What a message takes along besides its vector v.

    The receiver, with weight w, becomes `x = (w x + mass v) / (w + weight)`, `w = w + weight`.
    """

    weight: float
    mass: float


class Gossip(Rule):
    """Gossip SGD: after a step, with probability q, send a message to a random peer, which adds it after its next step.

        elastic=True     d = a (x - s_j);    x -= d;    x_j += d
        elastic=False    w = w / 2;          x_j = (w x + w_j x_j) / (w + w_j);    w_j += w

    s_j are the peer's parameters as it last published them, and a is `alpha`. Both forms conserve the sum of w and of
    w x over all workers and the messages that are still on their way. The elastic form is EASGD between two peers:
    Pramod, Elastic Gossip (arXiv:1812.02407). The other is GoSGD: Blot et al. (arXiv:1804.01852); its weights begin
    with 1 / p.

    Elastic weights are 1, and 2 for a worker to which a leaving worker has handed over its share. Of two unequal
    weights the lighter one moves more: `a = 2 alpha w_j / (w + w_j)`, and the peer adds `d w / w_j`.

    Args:
        q: the probability of a message after each step. With small values replicas drift apart.
        elastic: which of the two.
        alpha: the elastic share, from 0 to 0.5. With 0.5 the two meet.
    """

    every = 1
    has_peers = True
    mailbox_vectors = ("x",)

    def __init__(self, q: float = 0.05, *, elastic: bool = True, alpha: float = 0.5) -> None:
        self.q = checked_share("Gossip", "q", q)
        self.elastic = checked_flag("Gossip", "elastic", elastic)
        if (alpha := checked_share("Gossip", "alpha", alpha)) > 0.5:
            raise InvalidArgument(
                f"Gossip has alpha={alpha}, but beyond 0.5 the two replicas of an exchange swap sides. Write alpha=0.5."
            )
        self.alpha = alpha

    def first_weight(self, world: int, *, is_newcomer: bool) -> float:
        """The weight that a worker begins with. A newcomer to GoSGD has none until it receives some."""
        if self.elastic:
            return 1.0
        return 0.0 if is_newcomer else 1.0 / world

    def share(self, weight: float, peer_weight: float) -> tuple[float, Shared]:
        """The share of `x - s_j` that a message carries (elastic), and its weights."""
        if self.elastic:
            return 2 * self.alpha * peer_weight / (weight + peer_weight), Shared(0.0, weight)
        return 0.0, Shared(weight / 2, weight / 2)

    def send(self, x: Array, peer: Array, out: Array, share: float) -> None:
        """Write a message's vector to `out`, and take from `x` what it carries away."""
        if not self.elastic:
            out[:] = x
            return
        np.subtract(x, peer, out=out)
        out *= x.dtype.type(share)
        x -= out


def merge(x: Array, v: Array, weight: float, shared: Shared) -> None:
    """Add a message to the replica of a worker with this weight."""
    total, real = weight + shared.weight, x.dtype.type
    if weight == 0:
        x[:] = v  # its own values have no weight
    elif shared.weight == 0 and shared.mass == weight:
        x += v
    else:
        x *= real(weight / total)
        x += v * real(shared.mass / total)


class NoLoCo(Rule):
    """Low-communication training without all-reduce: an outer step every k steps, averaged with one random peer.

        D = x - phi
        m = mu m + eta (D + D_j) / 2 + gamma ((phi + phi_j) / 2 - phi)
        phi += m;    x = phi

    phi are the parameters after the last outer step, and (phi_j, D_j) those with which the peer has made its last one:
    nobody waits for it. Before a peer has made one, D stands alone. Kolehmainen et al.: NoLoCo (arXiv:2506.10911),
    there between two outer steps at the same time. With random pairs, differences between replicas shrink for
    `gamma < 2 (1 - mu^2)`. Nothing is conserved: the center is the mean of all phi.

    Args:
        every: steps between two outer steps.
        mu: the outer momentum.
        eta: the outer learning rate.
        gamma: how much a worker moves towards its peer.
    """

    has_peers = True
    mailbox_vectors = ("phi", "momentum", "delta")

    def __init__(self, every: int = 50, *, mu: float = 0.5, eta: float = 0.7, gamma: float = 0.7) -> None:
        if isinstance(every, bool) or every != int(every) or every < 1:
            raise InvalidArgument(
                f"NoLoCo has every={every!r}, which is no number of steps, 1 or more. Write every=50."
            )
        self.every = int(every)
        self.mu = checked_share("NoLoCo", "mu", mu)
        self.eta = _positive("eta", eta)
        self.gamma = _positive("gamma", gamma)
        if self.gamma >= (limit := 2 * (1 - self.mu**2)):
            raise InvalidArgument(
                f"NoLoCo has gamma={gamma!r} with mu={mu!r}, but replicas drift apart unless gamma is below "
                f"2 (1 - mu^2) = {limit:.2f}. Write gamma=0.7 and mu=0.5."
            )

    def outer(
        self, x: Array, old: dict[str, Array], new: dict[str, Array], peer: dict[str, Array] | None, *, is_alone: bool
    ) -> None:
        """One outer step of `x` and of what this worker publishes; `peer`: what its peer does.

        A published phi is the one after its outer step, so `phi - momentum` is the one before. Without live workers
        (`is_alone`) training goes on as if there were no rule.
        """
        phi, real = old["phi"], x.dtype.type
        if is_alone:
            new["momentum"][:] = new["delta"][:] = 0
            new["phi"][:] = x
            return
        np.subtract(x, phi, out=new["delta"])
        step = new["momentum"]
        np.multiply(old["momentum"], real(self.mu), out=step)
        if peer is None:
            step += real(self.eta) * new["delta"]
        else:
            step += real(self.eta / 2) * (new["delta"] + peer["delta"])
            step += real(self.gamma / 2) * (peer["phi"] - peer["momentum"] - phi)
        np.add(phi, step, out=new["phi"])
        x[:] = new["phi"]


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not np.isfinite(value) or value <= 0:
        raise InvalidArgument(f"NoLoCo has {name}={value!r}, but {name} is a number above 0. Write {name}=0.7.")
    return float(value)
