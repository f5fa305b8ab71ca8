"""Repeatable runs: what --deterministic asks of a worker."""

import random
import sys

import numpy as np

from maniple.errors import InvalidArgument
from maniple.place import Place
from maniple.rules import Rule


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and, where it is in use, torch, which is told to compute repeatably too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def check_rule(place: Place, rule: Rule) -> None:
    """Raise InvalidArgument for a rule whose result depends on who is faster."""
    if place.deterministic and place.world > 1 and (rule.meets == "center" or 0 < rule.quorum < place.world):
        raise InvalidArgument(
            f"--deterministic with {rule!r}: what {place.world} workers make depends on who comes first. Choose bsp, "
            "localsgd or easgd:sync=true, or leave --deterministic out."
        )
