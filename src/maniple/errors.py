"""Errors: what is wrong with the value given, the limit or the other side's value, what to do.

    ManipleError                     exit code 4
    ├── InvalidArgument (ValueError)           2   a value the user gave cannot be used
    │   └── Conflict                           2   the script and the command line disagree
    ├── SharedMemoryFull (OSError)             3   the operating system refused the center's memory
    ├── QueueRefused                           3   the batch queue refused what it was asked
    ├── LayoutMismatch                         1   this worker's parameters are not the center's
    ├── Diverged                               1   a replica kept offering values that are not finite
    ├── WaitedTooLong (TimeoutError)           1   a deadline passed; the text says who was waited for
    ├── PeerLost                               1   another worker is gone, and this circle cannot go on without it
    ├── CallMismatch                           1   workers made different calls where all make the same
    ├── Desynced                               1   replicas that must be identical are not
    ├── HostAway (ConnectionError)             1   the host cannot be reached now
    ├── NotAdmitted                            1   the other side does not know the token, or is another run
    ├── BadFrame                               1   the other side does not speak this protocol
    ├── HandlerFailed                          1   the controller's own code failed over a question
    ├── ProducerFailed                         1   a feed's producer ended with an error, or was killed
    └── WorkerFailed                           1   a worker ended with an error and may not be restarted

A command that ends by one of them exits with the number beside it.
"""

import sys
from contextlib import suppress
from typing import NoReturn


class ManipleError(Exception):
    """The root of all errors raised by maniple."""

    exit_code = 4


class InvalidArgument(ManipleError, ValueError):
    """A value the user gave cannot be used."""

    exit_code = 2


class Conflict(InvalidArgument):
    """The script and the command line ask for different things."""


class SharedMemoryFull(ManipleError, OSError):
    """The center does not fit into the memory that the system grants."""

    exit_code = 3


class QueueRefused(ManipleError):
    """The batch queue refused what it was asked, or did not answer."""

    exit_code = 3


class LayoutMismatch(ManipleError):
    """The parameters of this worker are not those of the center."""

    exit_code = 1


class Diverged(ManipleError):
    """A replica offered non-finite values several times in a row; the center refused them."""

    exit_code = 1


class WaitedTooLong(ManipleError, TimeoutError):
    """A deadline passed."""

    exit_code = 1


class PeerLost(ManipleError):
    """Another worker is gone, and the circle cannot go on without it."""

    exit_code = 1


class CallMismatch(ManipleError):
    """Workers made different calls where all make the same."""

    exit_code = 1


class Desynced(ManipleError):
    """Replicas that must be identical are not."""

    exit_code = 1


class HostAway(ManipleError, ConnectionError):
    """The host cannot be reached now. Workers train on and try again, until a deadline."""

    exit_code = 1


class NotAdmitted(ManipleError):
    """The other side does not know this run's token, or serves another run."""

    exit_code = 1


class BadFrame(ManipleError):
    """What came is no frame of this protocol; the connection cannot be used further."""

    exit_code = 1


class HandlerFailed(ManipleError):
    """The controller's own code failed over a question of this worker; the text has its traceback."""

    exit_code = 1


class ProducerFailed(ManipleError):
    """A producer ended with an error, or was killed: batches are missing. The text has its traceback."""

    exit_code = 1


class WorkerFailed(ManipleError):
    """A worker ended with an error."""

    exit_code = 1


KINDS = {
    kind.__name__: kind
    for kind in (
        InvalidArgument,
        Conflict,
        SharedMemoryFull,
        LayoutMismatch,
        Diverged,
        WaitedTooLong,
        NotAdmitted,
        BadFrame,
        HandlerFailed,
        ProducerFailed,
    )
}


def raise_remote(kind: str, reason: str) -> NoReturn:
    """Raise, on this side, the error that the other side named."""
    raise KINDS.get(kind, ManipleError)(reason)


def require_printable(what: str, text: str) -> None:
    """Raise InvalidArgument if `text` holds a line break or another control character: a name or a value with one of
    them would end a line of a script, a file name or a terminal's output early."""
    if not text.isprintable():
        first = next(sign for sign in text if not sign.isprintable())
        raise InvalidArgument(
            f"{what} {text[:200]!r} holds the control character {first!r}; only printable ones can be used. "
            "Leave it out."
        )


def say(text: str) -> None:
    """Tell a person something on standard error. Where that is full or gone, it must not end a worker."""
    with suppress(OSError, ValueError):
        print(f"maniple: {text}", file=sys.stderr, flush=True)
