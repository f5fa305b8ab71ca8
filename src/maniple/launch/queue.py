"""A batch queue, as the host of a run sees it: it starts the workers when there is room, and perhaps again."""

from typing import Protocol

from maniple.host import Host


class Queue(Protocol):
    """The workers of one run in a queue."""

    @property
    def comes_back(self) -> bool:
        """The host is in the queue too: when it is told to end, it is started again later and goes on."""
        ...

    @property
    def is_done(self) -> bool:
        """All workers have ended, and none will be started again."""
        ...

    def begin(self, host: Host) -> str:
        """Have the workers started; gives what to tell about it."""
        ...

    def news(self) -> list[str]:
        """What has changed since the last call."""
        ...

    def end(self) -> bool:
        """Have all workers ended, queued and running ones; True once they have. To be called until then."""
        ...

    def check(self, *, has_joined: bool) -> None:
        """Raise WorkerFailed if workers have failed, or none was ever there."""
        ...
