"""maniple: many workers, one model. Elastic data-parallel training, in step or not, behind two lines and a sampler.

The layers; a row imports only rows below it, and names split by `|` do not import each other:

    cli                            the command
    session | pool | doctor | watch  settings from files and variables; workers of a program that stays serial; what
                                   would keep a run from working; a run seen, drawn and steered
    launch                         starts workers and looks after them
    controller | model             answers the workers' questions; trains a class of the user's own
    host | worker                  the owner of a run; a process that trains
    client | sampler | decisions | changes | feed | circle  named arrays at a host; which samples a worker takes; train,
                                   validate or stop; settings that a person changes meanwhile; batches that others make;
                                   the workers as equals
    center                         the shared parameters
    rules | pace | schedules | wire | adapters | story  what an exchange does, when it is due, learning rates, how
                                   processes talk, models as flat arrays, what became of a run
    record | layout | place | bell | spec  the run folder, places in the flat vector, who am I, waking those who wait,
                                   classes of users
    contracts                      what the parts must offer to each other
    errors
"""

import importlib
from typing import TYPE_CHECKING, Any

from maniple.errors import ManipleError
from maniple.pace import Every, RateLimit
from maniple.rules import ASGD, BSP, EASGD, Downpour, LocalSGD, MSync, Rule
from maniple.worker import Replica, StopAfter, Worker, join

if TYPE_CHECKING:
    from maniple.cli.session import Session
    from maniple.client import Client
    from maniple.controller import Controller
    from maniple.feed.prefetch import Prefetch
    from maniple.feed.producer import Feed
    from maniple.pool import Pool

__version__ = "0.1.0"

__all__ = [
    "ASGD",
    "BSP",
    "EASGD",
    "Client",
    "Controller",
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
    "Worker",
    "join",
]


_LATER = {  # so that `import maniple` stays light
    "Client": "maniple.client",
    "Controller": "maniple.controller",
    "Feed": "maniple.feed.producer",
    "Pool": "maniple.pool",
    "Prefetch": "maniple.feed.prefetch",
    "Session": "maniple.cli.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'maniple' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
