"""Stopping: when a worker should end by itself."""

import time

from maniple.errors import InvalidArgument


class StopAfter:
    """Ends a worker's training after `total_duration` seconds, counted from here.

    Given to `share(..., stop=StopAfter(3600))`, it turns `worker.should_stop` true at that time and ends the
    iteration of `worker.sampler`, so that an ordinary loop over a DataLoader runs out by itself; the last
    exchange is made when the worker leaves.
    """

    def __init__(self, total_duration: float) -> None:
        if not total_duration > 0:
            raise InvalidArgument(f"total_duration={total_duration!r} s must be above 0. Leave it out to run on.")
        self.total_duration = total_duration
        self._end = time.monotonic() + total_duration

    @property
    def is_due(self) -> bool:
        """The time is over."""
        return time.monotonic() >= self._end
