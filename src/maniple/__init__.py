"""maniple: many workers, one model. Elastic data-parallel training, in step or not, behind three lines.

docs/design.md has a picture of the packages and the table of what to edit for a given change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from maniple.errors import ManipleError
from maniple.pace import Every, RateLimit
from maniple.rules import ASGD, BSP, EAMSGD, EASGD, DiLoCo, Downpour, LocalSGD, MSync, Rule, Swap, Tournament
from maniple.worker import Replica, StopAfter, Worker, join

if TYPE_CHECKING:
    from maniple.client import Client
    from maniple.controller import Controller
    from maniple.feed.batch_files import BatchFiles
    from maniple.feed.local_feed import Feed
    from maniple.feed.prefetch import Prefetch
    from maniple.pool import Pool
    from maniple.session import Session

__version__ = "0.1.0"

__all__ = [
    "ASGD",
    "BSP",
    "EAMSGD",
    "EASGD",
    "BatchFiles",
    "Client",
    "Controller",
    "DiLoCo",
    "Downpour",
    "Every",
    "Feed",
    "LocalSGD",
    "MSync",
    "ManipleError",
    "Pool",
    "Prefetch",
    "RateLimit",
    "Replica",
    "Rule",
    "Session",
    "StopAfter",
    "Swap",
    "Tournament",
    "Worker",
    "join",
]


_LATER = {  # so that `import maniple` stays light
    "BatchFiles": "maniple.feed.batch_files",
    "Client": "maniple.client",
    "Controller": "maniple.controller",
    "Feed": "maniple.feed.local_feed",
    "Pool": "maniple.pool",
    "Prefetch": "maniple.feed.prefetch",
    "Session": "maniple.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'maniple' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
