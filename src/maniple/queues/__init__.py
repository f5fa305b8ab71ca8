"""Batch queues that start workers: one file per queue, listed in `QUEUES`."""

from maniple.queues.queue import Queue
from maniple.queues.slurm import Slurm

# `maniple submit --NAME` submits to the queue of that name.
QUEUES: dict[str, Queue] = {"slurm": Slurm()}
