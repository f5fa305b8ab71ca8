"""Retries: exponential backoff with jitter, and repeating a request to the host until a deadline."""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from maniple.clock import Deadline, clock
from maniple.errors import HostAway, ManipleError
from maniple.wire.frames import TIMEOUT_S

if TYPE_CHECKING:
    from maniple.connection.link import Link

T = TypeVar("T")
BLOCKED_S = TIMEOUT_S + 1.0  # how long one attempt blocks at most: the timeout of a message, and a little for the rest
_POLL_S = 0.02  # between looks at a link that waits for its next attempt to connect


class Backoff:
    """Pauses between attempts, which double up to a limit.

    Each is shortened by a random factor, so that the workers of a restarted host do not all connect at once.

    Args:
        shortest_s: the first pause. 50 ms bridge a restart of the server process.
        longest_s: the limit. With 2 s a host that returns is found soon, and 1000 waiting workers cost it little.
        jitter: the largest part of a pause that may be cut off at random.
    """

    def __init__(self, shortest_s: float = 0.05, longest_s: float = 2.0, *, jitter: float = 0.5) -> None:
        self._shortest_s, self._longest_s, self._jitter = shortest_s, longest_s, jitter
        self._pause_s = shortest_s

    def next_s(self) -> float:
        """Return the pause before the next attempt."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._longest_s)
        return pause_s * random.uniform(1 - self._jitter, 1)

    def reset(self) -> None:
        """Start over with the shortest pause, after an attempt that succeeded."""
        self._pause_s = self._shortest_s


@contextmanager
def dropped_on_error(link: "Link") -> Generator[None]:
    """Drop the connection if the block fails or is interrupted: the rest of a reply may still be in it."""
    try:
        yield
    except HostAway:
        raise  # there is no connection, or it is in order
    except BaseException as error:
        link.drop(str(error) or (type(error).__name__ if isinstance(error, Exception) else "interrupted"))
        raise


def retry_until(
    link: "Link",
    request: Callable[[], T],
    timeout_s: float,
    *,
    waits_for_host: bool = True,
    blocked_s: float = BLOCKED_S,
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """Call `request` until it succeeds, reconnecting `link` after each failure of the connection.

    Other errors and interrupts drop the connection too, and are raised at once.

    Args:
        waits_for_host: wait for a host that cannot be reached; False to raise HostAway then.
        blocked_s: an upper bound of the time that one call of `request` takes.
        on_failure: called after each failure; it may raise to end the retries early.

    Raises:
        HostAway: `timeout_s` have passed.
    """
    deadline = Deadline(timeout_s, slice_s=blocked_s)
    while True:
        try:
            link.stream()
            with dropped_on_error(link):
                return request()
        except HostAway as error:
            if not waits_for_host:
                raise
            failure: OSError = error
        except ManipleError:
            raise
        except OSError as error:
            failure = error
        on_failure()
        link.on_wait()
        if deadline.is_over():
            if isinstance(failure, HostAway):
                raise HostAway(
                    f"{failure}. Waited {timeout_s:g} s. Check that it runs and that this is its address; after a "
                    "crash, start it again with `maniple serve --resume RUN`."
                ) from failure
            raise HostAway(f"the connection to the host keeps breaking: {failure}") from failure
        clock.sleep(_POLL_S)
