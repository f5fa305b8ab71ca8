"""A run on this machine: workers are started together, looked after and ended, and nothing of them is left."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from maniple.errors import InvalidArgument, WorkerFailed
from maniple.host import Host
from maniple.host.gate import Gate
from maniple.launch.beginning import begin, place_of
from maniple.launch.board import Board, count
from maniple.launch.cores import divide_cores
from maniple.launch.death import last_lines, last_words, reason, short
from maniple.launch.guests import Vigil
from maniple.launch.job import Job, thread_variables
from maniple.launch.process import Process
from maniple.launch.producers import Producer, Producers
from maniple.launch.server import Server, hopeless
from maniple.launch.snapshots import Snapshots
from maniple.launch.ssh import Remote
from maniple.launch.stopping import Stopping
from maniple.launch.view import View, open_view
from maniple.place import asked_threads
from maniple.place.machine import visible_gpus

_TICK_S = 0.2
_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_REFUSED, _OTHER, _INTERRUPTED = 3, 4, 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(job: Job) -> int:
    """Run `job` on this machine; gives the exit code."""
    job.check()
    # From here on there is something to leave behind: a signal is noted, and waits until the run can end in order.
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _ENDING}
    try:
        return _begin(job).run(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(job: Job) -> "_Run":
    job, host = begin(job)
    try:
        return _Run(job, host)
    except BaseException:
        host.abandon()
        raise


class _Run:
    """The life of a run, from the first start to the last death."""

    def __init__(self, job: Job, host: Host) -> None:
        self._job, self._host = job, host
        place = place_of(job, host)
        self._gate = Gate(host, job.listen, place)
        self._server = Server(host, self._gate)
        reach = self._gate.place.told(key=None)
        cores = sorted(os.sched_getaffinity(0))
        threads = thread_variables(max(1, len(cores) // max(1, job.workers)), asked_threads())
        devices = [job.device(rank % job.workers_per_node) for rank in range(job.workers)]
        kind = Process
        if job.hosts:
            kind, reach = Remote, reach.told(address=str(self._gate.public))
        self._processes = [
            kind(job, host, rank, cores=part, threads=threads, reach=reach)
            for rank, part in enumerate(divide_cores(cores, devices, visible=visible_gpus()))
        ]
        self._producers = Producers(job, host, threads=thread_variables(1, asked_threads()), reach=reach)
        self._board = Board(host.folder, job.workers)
        self._view = open_view(quiet=job.quiet)
        self._stopping = Stopping()
        self._vigil = None if job.guests is None else Vigil(job.guests, host)
        self._is_hurried = False

    def run(self, noted: list[int]) -> int:
        """Until its end; `noted` are the signals that came before it could begin."""
        exit_code = _OTHER
        with self._view, self._signals():
            try:
                if noted:
                    raise KeyboardInterrupt
                self._greet()
                with Snapshots(self._host, self._job.snapshot_every_s, self._tell_unsaved):
                    self._watch()
                exit_code = 0
            except (WorkerFailed, InvalidArgument) as failure:
                exit_code = self._board.exit_code or failure.exit_code
                self._tell(self._view.error, str(failure))
            except KeyboardInterrupt:
                exit_code = _INTERRUPTED if self._job.script else 0  # there is no other end for a host alone
                if self._vigil is not None:
                    exit_code = self._vigil.exit_code() or _INTERRUPTED
                if self._job.script:
                    self._tell(self._view.error, "interrupted: ending the workers and saving the center")
                else:
                    self._say("ending: the workers are told, and the center is saved")
            finally:
                self._from_now_on(self._hurry)
                self._end_all()
                self._show()
                exit_code = self._close(exit_code)
        return exit_code

    def _greet(self) -> None:
        self._say(f"{self._job.crew}, run folder {short(self._host.folder.path)}")
        for news in self._host.news:
            self._say(news)
        for path in self._host.salvaged:
            self._say(f"a run whose host was killed had left {path.name} in memory: saved and removed")
        if self._gate.address is not None:
            folder = short(self._host.folder.path)
            self._say(
                f"listening on {self._gate.address}; one more worker: maniple join {folder} SCRIPT, or from elsewhere"
            )
            self._say(f"    MANIPLE_TOKEN_FILE={folder}/token maniple join {self._gate.public} SCRIPT")

    def _watch(self) -> None:
        """Until all workers have ended well; raises WorkerFailed if one has not and may not start again."""
        children: list[Process | Producer | Server] = [*self._processes, *self._producers.all, self._server]
        with selectors.DefaultSelector() as selector:
            while not self._is_done():
                for child in children:
                    if child.is_due:
                        child.start()
                        selector.register(child.descriptor, selectors.EVENT_READ, child)
                for key, _ in selector.select(_TICK_S):
                    selector.unregister(key.fileobj)
                    if isinstance(key.data, Server):
                        self._mind_server(key.data)
                    elif isinstance(key.data, Producer):
                        self._mind_producer(key.data)
                    else:
                        self._mind_death(key.data)
                self._producers.blame(at_once=False)
                self._show()
        self._producers.blame()
        if self._vigil is not None:
            self._vigil.check()
        elif not self._host.has_joined:
            raise WorkerFailed(
                f"{self._job.script} has ended without calling maniple.join(): its {self._job.workers} copies trained "
                "apart, and there is no center. Add `worker = maniple.join()` and `worker.share(model, optimizer)`."
            )

    def _is_done(self) -> bool:
        """All workers have ended, those of other machines too. A host alone goes on until it is told to end."""
        if self._vigil is not None:
            return self._vigil.is_over
        if self._job.script is None or not all(process.is_done for process in self._processes):
            return False
        return self._host.segment.live == 0

    def _mind_server(self, server: Server) -> None:
        """The center and all that was begun survive a server: its successor goes on, and the workers find it."""
        exit_code = server.collect()
        if (kind := hopeless(exit_code)) is not None:
            raise kind("the controller cannot be used:\n" + last_lines(self._host.folder.log("server")))
        server.restart()
        self._host.events.write("server died", exit_code=exit_code)
        self._say(f"the server {reason(exit_code)}: it is started again, and nothing is lost")

    def _mind_producer(self, producer: Producer) -> None:
        if exit_code := producer.collect():
            log = self._host.folder.log(producer.name)
            self._producers.fail(
                WorkerFailed(f"producer {producer.number} {reason(exit_code)}, so the run ends. {last_words(log)}")
            )

    def _tell_unsaved(self, error: Exception) -> None:
        self._tell(self._view.error, f"no snapshot could be written: {error}. Training goes on.")

    def _mind_death(self, process: Process) -> None:
        exit_code = process.collect()
        self._board.mark(process.rank, "done" if exit_code == 0 else "dead")
        if exit_code == 0:
            return
        if (producer := self._producers.failing()) is not None:
            self._mind_producer(producer)
        self._producers.blame()
        if process.restarts < self._job.restarts:
            process.restart()
            which = f"restart {process.restarts} of {self._job.restarts}"
            self._say(f"worker {process.rank} {reason(exit_code)}: {which}")
            return
        if process.is_cut_off(exit_code) and not all(
            other.is_done for other in self._processes if other is not process
        ):
            self._go_on_without(process)
            return
        self._show()
        again = f" after {count(process.restarts, 'restart')}" if process.restarts else ""
        log = self._host.folder.log(process.rank)
        raise WorkerFailed(f"worker {process.rank} {reason(exit_code)}{again}, so the run ends. {last_words(log)}")

    def _go_on_without(self, process: Process) -> None:
        process.give_up()
        self._board.mark(process.rank, "lost")
        self._host.events.write("given up", worker=process.rank, node=self._job.node(process.rank))
        self._say(f"worker {process.rank}: {self._job.node(process.rank)} cannot be reached, so the others go on alone")

    def _end_all(self) -> None:
        """SIGTERM to all, SIGKILL to those who stay."""
        if self._vigil is not None:
            self._vigil.await_leaving(_GRACE_S, lambda: self._is_hurried)
        for process in self._processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            if process.is_running:
                while not process.has_ended(timeout_s=0.1):
                    if time.monotonic() > deadline or self._is_hurried:
                        process.signal(signal.SIGKILL)
                process.collect()
                self._board.mark(process.rank, "ended")
        self._producers.end(lambda: self._is_hurried)

    def _close(self, exit_code: int) -> int:
        self._server.shut(_GRACE_S)
        try:
            saved = self._host.close(exit_code)
        except OSError as error:
            self._tell(
                self._view.error,
                f"the center could not be saved: {error}. It is kept in {self._host.segment.path}: "
                "make room, and the next `maniple run` saves it to the run folder.",
            )
            return exit_code or _REFUSED
        self._say(self._board.summary())
        if self._host.unfinished:
            self._say(f"{count(self._host.unfinished, 'sample')} of leases not finished: --resume goes on with them")
        for path in saved:
            self._say(f"center saved: {short(path)}")
        return exit_code

    def _show(self) -> None:
        self._tell(self._view.show, self._board, self._board.refresh())
        running = [process.rank for process in self._processes if process.is_running]
        for line in self._stopping.news(self._board.stop, running):
            self._say(line)

    def _say(self, text: str) -> None:
        self._tell(self._view.say, text)

    def _tell(self, act: Callable[..., None], *args: Any) -> None:
        """Show something; when the terminal or pipe is gone, train on without it."""
        try:
            act(*args)
        except OSError:
            self._view = View()

    @contextmanager
    def _signals(self) -> Generator[None]:
        before = self._from_now_on(self._interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _from_now_on(self, handler: Callable[..., None]) -> dict[int, Any]:
        return {number: signal.signal(number, handler) for number in _ENDING}

    def _interrupt(self, *_: Any) -> None:
        """The first Ctrl-C ends the run with patience; another one ends the patience."""
        self._from_now_on(self._hurry)
        raise KeyboardInterrupt

    def _hurry(self, *_: Any) -> None:
        self._is_hurried = True
