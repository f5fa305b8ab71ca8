"""What a person should know when the controller lets everybody stop."""

import time
from collections.abc import Sequence

_PATIENCE_S = 60.0


class Stopping:
    """Tells the reason once, and later who does not follow."""

    def __init__(self) -> None:
        self._since = 0.0
        self._is_told = False

    def news(self, reason: str, running: Sequence[int]) -> list[str]:
        """What to say now, given the controller's reason and the workers that are still running."""
        if not reason:
            return []
        now = time.monotonic()
        if not self._since:
            self._since = now
            return [f"everybody stops: {reason}"]
        if self._is_told or not running or now - self._since < _PATIENCE_S:
            return []
        self._is_told = True
        who = ", ".join(map(str, running))
        return [
            f"told to stop {_PATIENCE_S:.0f} s ago and still running: {who}. A loop ends by itself if it takes its "
            "samples from worker.sampler, or looks at worker.should_stop"
        ]
