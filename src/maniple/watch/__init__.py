"""Watching a run: from its folder, or from another machine through its host, whom one may also give orders."""

from maniple.watch.mirror import Mirror
from maniple.watch.steering import Steering

__all__ = ["Mirror", "Steering"]
