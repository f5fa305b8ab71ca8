"""maniple: many workers, one model. Asynchronous and elastic data-parallel training behind two lines.

The layers; a row imports only rows below it, and names split by `|` do not import each other:

    cli                            the command
    session                        settings from files and variables
    launch                         starts workers and looks after them
    host | worker                  the owner of a run; a process that trains
    client | sampler               named arrays at a host; which samples a worker takes
    center                         the shared parameters
    rules | pace | wire | adapters  what an exchange does, when it is due, how processes talk, models as flat arrays
    record | layout | place        the run folder, places in the flat vector, who am I
    contracts                      what the parts must offer to each other
    errors
"""

from typing import TYPE_CHECKING, Any

from maniple.errors import ManipleError
from maniple.pace import Every, RateLimit
from maniple.rules import ASGD, EASGD, Downpour, Rule
from maniple.worker import Replica, StopAfter, Worker, join

if TYPE_CHECKING:
    from maniple.client import Client

__version__ = "0.1.0"

__all__ = [
    "ASGD",
    "EASGD",
    "Client",
    "Downpour",
    "Every",
    "ManipleError",
    "RateLimit",
    "Replica",
    "Rule",
    "StopAfter",
    "Worker",
    "join",
]


def __getattr__(name: str) -> Any:
    if name == "Client":  # imported at its first use, so that `import maniple` stays light
        from maniple.client import Client

        return Client
    raise AttributeError(f"module 'maniple' has no attribute {name!r}")
