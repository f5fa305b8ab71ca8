"""The worker: a process that trains a replica. `join()` finds its place, `share()` ties a model to the center."""

from maniple.worker.replica import Replica
from maniple.worker.stop import StopAfter
from maniple.worker.worker import Worker, join

__all__ = ["Replica", "StopAfter", "Worker", "join"]
