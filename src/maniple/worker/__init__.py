"""The worker: a process that trains a replica. `join()` joins a run, `share()` shares a model in it."""

from maniple.replica import Replica
from maniple.replica.context import StopAfter
from maniple.worker.worker import Worker, join

__all__ = ["Replica", "StopAfter", "Worker", "join"]
