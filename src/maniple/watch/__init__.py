"""Watching runs: live, from the run folder or from another machine through the host, and afterwards.

`site` serves the page, `plot` and `report` draw runs, `compare` sets them side by side, `exports` writes them for other
programs.
"""

from maniple.watch.watched_run import Mirror, Steering

__all__ = ["Mirror", "Steering"]
