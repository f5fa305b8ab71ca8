"""Stopping: when a worker should end by itself."""

import time

from maniple.errors import InvalidArgument


class StopAfter:
    """Ends a worker's training after `total_duration` seconds, counted from the end of its first step.

    Start-up, such as imports, compilation and waiting for other workers, does not count.

    Given to `share(..., stop=StopAfter(3600))`, it turns `worker.should_stop` true at that time and ends the
    iteration of `worker.sampler`, so that an ordinary loop over a DataLoader runs out by itself; the last
    exchange is made when the worker leaves.
    """

    def __init__(self, total_duration: float) -> None:
        if not total_duration > 0:
            raise InvalidArgument(f"total_duration={total_duration!r} s must be above 0. Leave it out to run on.")
        self.total_duration = total_duration
        self._end: float | None = None

    def stepped(self) -> None:
        """A training step was made: from the first on, the time counts."""
        if self._end is None:
            self._end = time.monotonic() + self.total_duration

    @property
    def is_due(self) -> bool:
        """The time is over."""
        return self._end is not None and time.monotonic() >= self._end
