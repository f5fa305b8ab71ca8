"""The workers that a launcher starts itself: their cores, their threads, and the way to their host."""

import os

from maniple.host import Host
from maniple.host.gate import Gate
from maniple.launch.cores import divide_cores, threads_each
from maniple.launch.job import Job, thread_variables
from maniple.launch.process import Process
from maniple.launch.ray import Placed
from maniple.launch.ssh import Remote
from maniple.place import Place, asked_threads
from maniple.place.machine import visible_gpus


def reach_of(job: Job, gate: Gate) -> Place:
    """How workers and producers reach their host."""
    reach = gate.place.told(key=None)
    return reach.told(address=str(gate.public)) if job.hosts or job.ray else reach


def make_workers(job: Job, host: Host, reach: Place) -> list[Process]:
    """All workers of a job, none of them started."""
    cores = sorted(os.sched_getaffinity(0))
    threads = thread_variables(threads_each(len(cores), job.workers), asked_threads())
    devices = [job.device(rank % job.workers_per_node) for rank in range(job.workers)]
    kind = Placed if job.ray else Remote if job.hosts else Process
    return [
        kind(job, host, rank, cores=part, threads=threads, reach=reach)
        for rank, part in enumerate(divide_cores(cores, devices, visible=visible_gpus()))
    ]
