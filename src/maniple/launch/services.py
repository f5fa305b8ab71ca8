"""What runs beside the workers: producers of feeds, the server, the web page, and the thread that writes snapshots."""

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from maniple.clock import Deadline, clock
from maniple.environment import Environment, variables_for
from maniple.errors import InvalidArgument, WorkerFailed
from maniple.feed.producer_registry import record_exit, reset_producers
from maniple.host import Host
from maniple.host.listener import Listener
from maniple.host.server import mark_over
from maniple.host.server_process import CONTROLLER_FAILED, CONTROLLER_INVALID
from maniple.job import Job
from maniple.launch.process import ChildProcess, stop_all
from maniple.record import RunFolder
from maniple.wire.address import Address

# Exit codes by which the server reports that its controller can never be used, and the errors that end the run.
CONTROLLER_ERRORS = {CONTROLLER_INVALID: InvalidArgument, CONTROLLER_FAILED: WorkerFailed}
_PRODUCER_GRACE_S = 3.0  # it has no exchange to finish; workers need about as long to report a broken feed
_SERVER_GRACE_S = 3.0  # it has no step to finish
_PAGE_GRACE_S = 4.0  # time to tell viewers that the run has ended
_PAGE_RESTART_DELAY_S = 2.0
_PAGE_PACKAGES = ("starlette", "uvicorn", "plotly")


class ProducerProcess(ChildProcess):
    """One producer's process. It is never restarted: batches that it has pushed cannot be taken back."""

    def __init__(self, job: Job, host: Host, number: int, *, threads: Mapping[str, str], reach: Environment) -> None:
        super().__init__()
        self.number, self.name = number, f"producer-{number}"
        self._command = job.feed_command(number // job.producers)
        self._host, self._threads = host, threads
        self._environment = reach.replace(
            producer=number % job.producers, producers=job.producers, producer_number=number, rank=-1
        )

    def start(self) -> None:
        env = {**self._threads, **variables_for(self._environment)}
        pid = self.spawn([sys.executable, *self._command], env=env, log=self._host.folder.log(self.name))
        self._host.events.write("started", producer=self.number, pid=pid)

    def collect(self) -> int:
        """Reap the ended process, mark its success or failure for the workers, and return its exit code."""
        exit_code, self.is_done = super().collect(), True
        record_exit(self._host.segment.path, self.number, is_well=exit_code == 0)
        self._host.events.write("exit", producer=self.number, exit_code=exit_code)
        return exit_code


class Producers:
    """All producers of a run. The failure of one ends the run."""

    def __init__(self, job: Job, host: Host, *, threads: Mapping[str, str], reach: Environment) -> None:
        count = len(job.feeds) * job.producers
        self.all = [ProducerProcess(job, host, number, threads=threads, reach=reach) for number in range(count)]
        self._failure: WorkerFailed | None = None
        self._raise_after = 0.0
        self._segment = host.segment.path
        reset_producers(self._segment, count)

    def fail(self, failure: WorkerFailed) -> None:
        """Note that a producer has failed. The workers notice it themselves, and have a moment to report it."""
        self._failure = self._failure or failure
        self._raise_after = clock.monotonic() + _PRODUCER_GRACE_S

    def raise_failure(self, *, at_once: bool = True) -> None:
        """Raise the failure of a producer, if there is one: workers that failed since did so because of it."""
        if self._failure is not None and (at_once or clock.monotonic() > self._raise_after):
            raise self._failure

    def failed(self) -> ProducerProcess | None:
        """A producer that has failed and was not collected yet; waits briefly if workers report a failure."""
        deadline = Deadline(_PRODUCER_GRACE_S if any(self._segment.glob("feed-*/failed-*")) else 0.0)
        while True:
            for producer in self.all:
                if producer.is_running and producer.exit_code:
                    return producer
            if self._failure is not None or deadline.is_over():
                return None
            clock.sleep(0.02)

    def end(self, is_hurried: Callable[[], bool]) -> None:
        stop_all(self.all, _PRODUCER_GRACE_S, is_hurried)


class ServerProcess(ChildProcess):
    """The process that serves a host's listening sockets. It is restarted when it dies."""

    def __init__(self, host: Host, listener: Listener) -> None:
        super().__init__()
        self._host, self._listener = host, listener
        self._starts, self._started = 0, 0.0

    def start(self) -> None:
        numbers = [one.fileno() for one in self._listener.sockets]
        command = [sys.executable, "-m", "maniple.host", *map(str, numbers)]
        env = variables_for(self._listener.environment)
        pid = self.spawn(command, env=env, log=self._host.folder.log("server"), descriptors=numbers)
        self._starts += 1
        self._started = clock.monotonic()
        self._host.events.write("server", pid=pid, start=self._starts)

    def restart(self) -> None:
        """Schedule another start: at once if it had lived for a second, else after a delay."""
        lived_s = clock.monotonic() - self._started
        delay_s = 0.0 if lived_s > 1 else 0.2 if lived_s >= 0.2 else 2.0
        self.start_at = clock.monotonic() + delay_s

    def close(self, *, is_over: bool = True) -> None:
        """End it, after it has told the workers that the run is over if `is_over`, and close the sockets."""
        if self.is_running and is_over:
            mark_over(self._host.segment.path)
        stop_all([self], _SERVER_GRACE_S)
        self._listener.close()


class PageProcess(ChildProcess):
    """The process that serves the web page of a run; it is never started if `address` is None.

    The launcher keeps the listening socket, so that browsers reconnect when the process is restarted.
    """

    def __init__(self, address: Address | None, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder
        self._socket = None if address is None else listen(address)
        self.is_done = self._socket is None
        self._token = secrets.token_urlsafe(24)
        # What to tell the person who started the run.
        self.notices = [] if self._socket is None else [f"page: {page_address(self._socket, self._token)}"]

    def start(self) -> None:
        assert self._socket is not None
        number = self._socket.fileno()
        command = [sys.executable, "-m", "maniple.watch", str(number), str(self._folder.path)]
        try:
            self.spawn(command, env={}, log=self._folder.log("page"), descriptors=[number], stdin=subprocess.PIPE)
        except OSError:  # no process or descriptor is left: training continues, and the page is tried again
            self.start_at = clock.monotonic() + _PAGE_RESTART_DELAY_S
            return
        self.write(f"{self._token}\n".encode())  # not as an argument: other users can read command lines

    def collect(self) -> int:
        """Reap the ended process, and schedule another start."""
        self.start_at = clock.monotonic() + _PAGE_RESTART_DELAY_S
        return super().collect()

    def close(self) -> None:
        """End it, after it has told its viewers that the run has ended."""
        stop_all([self], _PAGE_GRACE_S)
        if self._socket is not None:
            self._socket.close()


def listen(address: Address) -> socket.socket:
    """Open the listening socket of a web page. Raises InvalidArgument if that is not possible."""
    if missing := [name for name in _PAGE_PACKAGES if find_spec(name) is None]:
        raise InvalidArgument(
            f"--web needs {', '.join(missing)}, which this Python does not have. pip install 'maniple[watch]', or "
            "leave --web out."
        )
    try:
        return address.listen()
    except OSError as error:
        raise InvalidArgument(
            f"no page can be served on {address}: {error.strerror}. Choose another address; port 0 is a free one."
        ) from error


def page_address(listening: socket.socket, token: str) -> str:
    """The URL of a page that is served on a listening socket."""
    host, port = listening.getsockname()[:2]
    shown = os.uname().nodename if host in {"0.0.0.0", "::"} else host
    return f"http://{Address(shown, port)}/?token={token}"


@contextmanager
def periodic_snapshots(
    host: Host, interval_s: float, on_failure: Callable[[Exception], None], *, is_early: bool = False
) -> Generator[None]:
    """Write a snapshot every `interval_s` for the length of a `with` block; 0 writes none.

    With `is_early` the first is written as soon as there is a center: a queue may take the host's machine away at any
    time.
    """
    end = threading.Event()

    def run() -> None:
        is_pending = is_early
        while not end.wait(min(1.0, interval_s) if is_pending else interval_s):
            try:
                if host.save() is not None:
                    is_pending = False
            except Exception as error:  # a full disk, or a worker that was stopped while it holds a lock
                host.events.write("unsaved", error=str(error))
                on_failure(error)

    thread = threading.Thread(target=run, name="maniple-snapshots", daemon=True)
    if interval_s:
        thread.start()
    try:
        yield
    finally:
        end.set()
        if interval_s:
            thread.join()
