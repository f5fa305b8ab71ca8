"""The producers of a run's feeds: processes that push batches to the workers, and end with them."""

import signal
import sys
import time
from collections.abc import Callable, Mapping

from maniple.errors import WorkerFailed
from maniple.feed.roll import begin, mark
from maniple.host import Host
from maniple.launch.child import Child
from maniple.launch.job import Job
from maniple.place import Place, environment

_GRACE_S = 3.0


class Producer(Child):
    """One producer's process. It is started once: what it had pushed cannot be taken back."""

    def __init__(self, job: Job, host: Host, number: int, *, threads: Mapping[str, str], reach: Place) -> None:
        super().__init__()
        self.number, self.name = number, f"producer-{number}"
        self.is_due = True
        self._command = job.feed_command(number // job.producers)
        self._host, self._threads = host, threads
        self._place = reach.told(
            producer=number % job.producers, producers=job.producers, producer_number=number, rank=-1
        )

    def start(self) -> None:
        """Start the script."""
        self.is_due = False
        env = {**self._threads, **environment(self._place)}
        pid = self.spawn([sys.executable, *self._command], env=env, log=self._host.folder.log(self.name))
        self._host.events.write("started", producer=self.number, pid=pid)

    def collect(self) -> int:
        """Reap a process that has ended, note how it did for the workers, and give its exit code."""
        exit_code = super().collect()
        mark(self._host.segment.path, self.number, is_well=exit_code == 0)
        self._host.events.write("exit", producer=self.number, exit_code=exit_code)
        return exit_code


class Producers:
    """All producers of a run."""

    def __init__(self, job: Job, host: Host, *, threads: Mapping[str, str], reach: Place) -> None:
        count = len(job.feeds) * job.producers
        self.all = [Producer(job, host, number, threads=threads, reach=reach) for number in range(count)]
        self._failure: WorkerFailed | None = None
        self._deadline = 0.0
        self._segment = host.segment.path
        begin(self._segment, count)

    def fail(self, failure: WorkerFailed) -> None:
        """A producer has failed. The workers see it by themselves, and have a moment to say so."""
        self._failure = self._failure or failure
        self._deadline = time.monotonic() + _GRACE_S

    def blame(self, *, at_once: bool = True) -> None:
        """Raise what ends the run, if a producer has failed: a worker that failed since has done so because of it."""
        if self._failure is not None and (at_once or time.monotonic() > self._deadline):
            raise self._failure

    def failing(self) -> Producer | None:
        """One that has failed, not collected yet; if the workers know of it already, it is waited for a little."""
        deadline = time.monotonic() + (_GRACE_S if any(self._segment.glob("feed-*/failed-*")) else 0)
        while True:
            for producer in self.all:
                if producer.is_running and producer.exit_code:
                    return producer
            if time.monotonic() >= deadline or self._failure is not None:
                return None
            time.sleep(0.02)

    def end(self, is_hurried: Callable[[], bool]) -> None:
        """SIGTERM to all, SIGKILL to those who stay."""
        for producer in self.all:
            producer.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for producer in self.all:
            if producer.is_running:
                while not producer.has_ended(timeout_s=0.1):
                    if time.monotonic() > deadline or is_hurried():
                        producer.signal(signal.SIGKILL)
                producer.collect()
