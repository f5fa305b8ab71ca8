"""The errors of maniple. Each message says what is wrong, the limit or the other side's value, and what to do.

    ManipleError                     exit code 4
    ├── InvalidArgument (ValueError)           2   a value from the user cannot be used
    │   └── Conflict                           2   the script and the command line disagree
    ├── SharedMemoryFull (OSError)             3   the system refused the center's memory
    ├── QueueRefused                           3   the batch queue refused a request
    ├── LayoutMismatch                         1   parameters of this worker and of the center differ
    ├── Diverged                               1   a replica kept sending non-finite values
    ├── WaitedTooLong (TimeoutError)           1   a deadline passed; the message says what for
    ├── PeerLost                               1   a worker is gone that this collective needs
    ├── CallMismatch                           1   workers called different collectives
    ├── Desynced                               1   replicas that must be equal differ
    ├── HostAway (ConnectionError)             1   the host is not reachable now
    ├── NotAdmitted                            1   authentication failed, or it is another run
    ├── BadFrame                               1   the other side does not speak this protocol
    ├── HandlerFailed                          1   the user's controller raised an exception
    ├── ProducerFailed                         1   a producer of a feed failed or was killed
    └── WorkerFailed                           1   a worker failed and may not be restarted

The number is the exit code of a command that ends with the error.
"""

import sys
from contextlib import suppress
from typing import NoReturn


class ManipleError(Exception):
    """The root of all errors raised by maniple."""

    exit_code = 4


class InvalidArgument(ManipleError, ValueError):
    """A value from the user cannot be used."""

    exit_code = 2


class Conflict(InvalidArgument):
    """The script and the command line disagree."""


class SharedMemoryFull(ManipleError, OSError):
    """The center does not fit into shared memory."""

    exit_code = 3


class QueueRefused(ManipleError):
    """The batch queue refused a request, or did not answer."""

    exit_code = 3


class LayoutMismatch(ManipleError):
    """The parameters of this worker and of the center differ in names, shapes or types."""

    exit_code = 1


class Diverged(ManipleError):
    """A replica sent non-finite values several times in a row; the center refused them."""

    exit_code = 1


class WaitedTooLong(ManipleError, TimeoutError):
    """A deadline passed."""

    exit_code = 1


class PeerLost(ManipleError):
    """A worker is gone that the collective cannot continue without."""

    exit_code = 1


class CallMismatch(ManipleError):
    """Workers called different collectives, or with different arguments."""

    exit_code = 1


class Desynced(ManipleError):
    """Replicas that must be equal to the bit differ."""

    exit_code = 1


class HostAway(ManipleError, ConnectionError):
    """The host is not reachable now. Workers train on and retry until a deadline."""

    exit_code = 1


class NotAdmitted(ManipleError):
    """The other side does not have this run's token, or belongs to another run."""

    exit_code = 1


class BadFrame(ManipleError):
    """Received bytes are no frame of this protocol; the connection is closed."""

    exit_code = 1


class HandlerFailed(ManipleError):
    """The user's controller raised an exception while it answered this worker; the message has its traceback."""

    exit_code = 1


class ProducerFailed(ManipleError):
    """A producer failed or was killed, so batches are missing. The message has its traceback."""

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
    """Raise the error that the other side has sent, as its own class."""
    raise KINDS.get(kind, ManipleError)(reason)


def require_printable(what: str, text: str) -> None:
    """Raise InvalidArgument if `text` holds a control character: a line break would end a line of a job script early,
    and an escape would reach the terminal."""
    if not text.isprintable():
        first = next(character for character in text if not character.isprintable())
        raise InvalidArgument(
            f"{what} {text[:200]!r} holds the control character {first!r}; only printable ones can be used. "
            "Leave it out."
        )


def say(text: str) -> None:
    """Print a message on standard error. If that is full or closed, the worker continues."""
    with suppress(OSError, ValueError):
        print(f"maniple: {text}", file=sys.stderr, flush=True)
