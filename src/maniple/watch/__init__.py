"""Watching a run: from its folder, or from another machine through its host, whom one may also give orders.

And what is made of runs afterwards: `plot` and `report` draw them, `compare` sets them side by side, `exports` are for
other programs. `runs`, `course` and `overlay` are what these share.
"""

from maniple.watch.mirror import Mirror
from maniple.watch.steering import Steering

__all__ = ["Mirror", "Steering"]
