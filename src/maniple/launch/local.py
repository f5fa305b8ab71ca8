"""A run on this machine: workers are started together, looked after and ended, and nothing of them is left."""

import errno
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maniple.center.segment import LIVE, MAX_WORKERS
from maniple.errors import InvalidArgument, QueueRefused, WorkerFailed
from maniple.host import Host
from maniple.host.gate import Gate
from maniple.host.host import UNSAVED
from maniple.launch.beginning import begin, begin_in, place_of
from maniple.launch.board import Board, count
from maniple.launch.child import Child
from maniple.launch.death import killed_by, last_lines, reason, short
from maniple.launch.guests import Vigil
from maniple.launch.job import Job, thread_variables
from maniple.launch.page import Page
from maniple.launch.process import Process
from maniple.launch.producers import Producer, Producers
from maniple.launch.queue import Queue
from maniple.launch.server import Server, hopeless
from maniple.launch.snapshots import Snapshots
from maniple.launch.stopping import Stop, Stopping, Unvalidated, resume_command
from maniple.launch.view import View, open_view
from maniple.launch.workers import make_workers, reach_of
from maniple.place import asked_threads
from maniple.worker.asked import unshared

_TICK_S = 0.2
# From SIGTERM to SIGKILL. A worker may take 5 s to end its step (worker.ending), and then makes its last exchange.
_GRACE_S = 10.0
_SERVER_GRACE_S = 3.0  # it has no step to end
_QUEUE_GRACE_S = 90.0  # for jobs to leave the queue; Slurm kills them half a minute after it has told them
_OTHER, _INTERRUPTED = 4, 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(job: Job, queue: Queue | None = None, *, run: Path | None = None) -> int:
    """Run `job` on this machine; gives the exit code.

    Args:
        queue: starts the workers instead, elsewhere; then here is the host alone.
        run: a folder that was made for this run before.
    """
    job.check()
    # From here on there is something to leave behind: a signal is noted, and waits until the run can end in order.
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _ENDING}
    try:
        return _begin(job, queue, run).run(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(job: Job, queue: Queue | None, run: Path | None) -> "_Run":
    job, host = begin(job) if run is None else begin_in(run, job)
    if run is None:  # else somebody may have stopped it before it could begin
        host.folder.unstop()
    try:
        return _Run(job, host, queue)
    except BaseException:
        host.abandon()
        raise


class _Run:
    """The life of a run, from the first start to the last death."""

    def __init__(self, job: Job, host: Host, queue: Queue | None) -> None:
        self._job, self._host, self._queue = job, host, queue
        self._is_paused = False
        place = place_of(job, host, is_queued=queue is not None)
        self._gate = Gate(host, job.listen, place)
        self._server = Server(host, self._gate)
        reach = reach_of(job, self._gate)
        self._processes = [] if queue else make_workers(job, host, reach)
        self._producers = Producers(job, host, threads=thread_variables(1, asked_threads()), reach=reach)
        self._board = Board(host.folder, job.workers, from_now_on=True)
        self._comes_back = queue is not None and queue.comes_back
        self._view = open_view(quiet=job.quiet, is_json=job.is_json, is_brief=self._comes_back)
        self._unshown = ""  # why something could not be shown
        self._stopping, self._stop = Stopping(), Stop(host.folder, is_alone=job.script is None)
        self._unvalidated = Unvalidated(job, host)
        self._vigil = None if job.guests is None else Vigil(job.guests, host)
        self._is_hurried = self._is_log_full = False
        self._page = Page(job.web, host.folder)

    def run(self, noted: list[int]) -> int:
        """Until its end; `noted` are the signals that came before it could begin."""
        exit_code = _OTHER
        with self._view, self._page:  # which tells its viewers of the end, too
            try:
                self._from_now_on(self._interrupt)  # here, where it is caught
                if noted:
                    raise KeyboardInterrupt
                self._greet()
                every_s, is_early = self._job.snapshot_every_s, self._comes_back
                with Snapshots(self._host, every_s, self._tell_unsaved, is_early=is_early):
                    self._watch()
                exit_code = 0
            except (WorkerFailed, InvalidArgument, QueueRefused) as failure:
                exit_code = self._board.exit_code or failure.exit_code
                self._tell(self._view.error, str(failure))
            except KeyboardInterrupt:
                exit_code = self._mind_interrupt()
            finally:
                self._from_now_on(self._hurry)
                self._end_all()
                self._show(is_last=True)
                exit_code = self._close(exit_code)
        if self._unshown:
            logs = short(self._host.folder.log("host").parent)
            View().error(f"not all could be shown: {self._unshown}. What the workers printed is in {logs}")
        return exit_code

    def _mind_interrupt(self) -> int:
        """Somebody ends the run, or takes the machine away for a while; gives the exit code."""
        if self._job.script is None:  # there is no other end for a host alone
            self._say("ending: the workers are told, and the center is saved")
            return 0 if self._vigil is None else self._vigil.exit_code() or _INTERRUPTED
        self._is_paused = self._comes_back and self._queue is not None and not self._host.folder.is_stopped
        if self._is_paused:
            self._say("pausing: the center is saved, and the workers train on until this job begins again")
            return 0
        again = "" if self._queue else f" ({_GRACE_S:g} s for the current step; Ctrl-C again ends them now)"
        self._tell(self._view.error, f"interrupted: ending the workers{again} and saving the center")
        return 0 if self._comes_back else _INTERRUPTED

    def _greet(self) -> None:
        self._say(f"{self._job.crew}, run folder {short(self._host.folder.path)}")
        for news in [*self._page.news, *self._host.news]:
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
        if self._queue is not None:
            self._say(self._queue.begin(self._host))
        with selectors.DefaultSelector() as selector:
            while not self._is_done():
                for child in children:
                    if child.is_due:
                        child.start()
                        selector.register(child.descriptor, selectors.EVENT_READ, child)
                # Those who were killed come first: others may have failed because of it.
                for key, _ in sorted(selector.select(_TICK_S), key=lambda one: (one[0].data.exit_code or 0) >= 0):
                    selector.unregister(key.fileobj)
                    if isinstance(key.data, Server):
                        self._mind_server(key.data)
                    elif isinstance(key.data, Producer):
                        self._mind_producer(key.data)
                    else:
                        self._mind_death(key.data)
                self._producers.blame(at_once=False)
                self._mind_queue()
                self._mind_logs(children)
                self._show()
                if self._stop.is_due(self._host.segment.live):
                    raise KeyboardInterrupt
        self._producers.blame()
        if self._vigil is not None:
            self._vigil.check(self._job.min_workers, strict=self._job.strict)
        elif self._queue is not None:
            self._queue.check(has_joined=self._host.segment.has_members)
        elif not self._host.has_joined:
            raise WorkerFailed(
                f"{self._job.script} has ended without calling maniple.join(): its {self._job.workers} copies trained "
                "apart, and there is no center. Add `worker = maniple.join()` and `worker.share(model, optimizer)`."
            )
        self._warn_if_unshared()

    def _warn_if_unshared(self) -> None:
        self._show()
        if self._board.is_unshared and not self._host.segment.centers() and not self._job.quiet:
            workers = count(self._job.workers, "worker")
            self._tell(self._view.error, f"warning: {unshared(f'{self._job.script}, on {workers}, has')}")

    def _is_done(self) -> bool:
        """All workers have ended, those of other machines too. A host alone goes on until it is told to end."""
        if self._vigil is not None:
            return self._vigil.is_over
        if self._job.script is None or not all(process.is_done for process in self._processes):
            return False
        return self._host.segment.live == 0 and (self._queue is None or self._queue.is_done)

    def _mind_queue(self) -> None:
        if self._queue is not None:
            for line in self._queue.news():
                self._say(line)

    def _mind_logs(self, children: Sequence[Child]) -> None:
        """Say it once if what the processes print cannot be kept."""
        why = next((child.output.problem for child in children if child.output and child.output.problem), "")
        if why and not self._is_log_full:
            self._is_log_full = True
            logs = short(self._host.folder.log("host").parent)
            self._tell(
                self._view.error,
                f"the logs in {logs} cannot be written: {why}. Training goes on, and each process's newest lines are "
                "kept until there is room again.",
            )

    def _mind_server(self, server: Server) -> None:
        """The center and all that was begun survive a server: its successor goes on, and the workers find it."""
        exit_code = server.collect()
        if (kind := hopeless(exit_code)) is not None:
            raise kind(
                "the controller cannot be used:\n" + last_lines(self._host.folder.log("server"), server.unwritten)
            )
        server.restart()
        self._host.events.write("server died", exit_code=exit_code)
        self._say(f"the server {reason(exit_code)}: it is started again, and nothing is lost")

    def _mind_producer(self, producer: Producer) -> None:
        if exit_code := producer.collect():
            words = self._board.last_words(producer.name, producer.unwritten)
            self._producers.fail(
                WorkerFailed(f"producer {producer.number} {reason(exit_code)}, so the run ends. {words}")
            )

    def _tell_unsaved(self, error: Exception) -> None:
        self._tell(self._view.error, f"no snapshot could be written: {error}. Training goes on.")

    def _mind_death(self, process: Process) -> None:
        exit_code = process.collect()
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
        again = f" after {count(process.restarts, 'restart')}" if process.restarts else ""
        left, end = self._left_without(process), ", so the run ends"
        if (why := process.loss(exit_code)) and not (end := self._end_of_loss(left)):
            process.give_up(why)
            how = reason(exit_code) if killed_by(exit_code) else f"is lost ({why})"
            self._tell(self._view.error, f"worker {process.rank} {how}{again}{self._advice(why, left)}")
            return
        self._show()
        words = self._board.last_words(process.rank, process.unwritten)
        raise WorkerFailed(f"worker {process.rank} {reason(exit_code)}{again}{end}. {words}")

    def _left_without(self, process: Process) -> int:
        """The workers that are left without this one, also those that have joined by themselves."""
        others = sum(not other.is_done for other in self._processes if other is not process)
        return others + sum(self._host.segment.state(rank) == LIVE for rank in range(self._job.world, MAX_WORKERS))

    def _end_of_loss(self, left: int) -> str:
        """Why the loss of a worker through no fault of the script ends the run, in words; "" if it continues."""
        if self._job.strict:
            return ", so the run ends (--strict)"
        if left < self._job.min_workers:
            who = f"{count(left, 'worker')} {'is' if left == 1 else 'are'}" if left else "no other is"
            return f", and {who} left, below --min-workers {self._job.min_workers}, so the run ends"
        if (self._job.circle == "torch" or self._job.hosts) and self._board.meets(self._job.rule) != "center":
            return ", and workers that meet in the circle torch cannot continue without it, so the run ends"
        return ""

    def _advice(self, why: str, left: int) -> str:
        """What to say of a lost worker, while the others continue."""
        memory = " (out of memory? `dmesg` tells)" if why == "killed by SIGKILL" else ""
        if self._board.meets(self._job.rule) != "center":
            also = ". Its share of each epoch is left out from now on"
        else:
            join = "" if self._gate.address else " in a run with --listen"
            also = f", `maniple join {short(self._host.folder.path)} SCRIPT`{join} adds one"
        return f"{memory}: {left} left, and the run continues. --restarts N would replace such a worker{also}"

    def _end_all(self) -> None:
        """SIGTERM to all, SIGKILL to those who stay."""
        self._end_queue()
        if self._vigil is not None:
            self._vigil.await_leaving(_GRACE_S, lambda: self._is_hurried)
        for process in self._processes:
            process.stop()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            if process.is_running:
                while not process.has_ended(timeout_s=0.1):
                    if time.monotonic() > deadline or self._is_hurried:
                        process.kill()
                process.collect()
        self._producers.end(lambda: self._is_hurried)

    def _end_queue(self) -> None:
        if self._queue is None or self._is_paused:
            return
        deadline = time.monotonic() + _QUEUE_GRACE_S
        while not (is_over := self._queue.end()) and not self._is_hurried and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            self._show()
        if not is_over:
            again = f"`maniple stop {short(self._host.folder.path)}` cancels them"
            self._tell(self._view.error, f"the workers' jobs may still be in the queue: {again}")

    def _close(self, exit_code: int) -> int:
        self._server.shut(_SERVER_GRACE_S, is_over=not self._is_paused)
        try:
            saved = self._host.pause() if self._is_paused else self._host.close(exit_code)
        except Exception as error:  # whatever it is: the workers have ended, and the center is in memory
            self._tell(
                self._view.error,
                f"the center could not be saved: {error}. It is kept in {self._host.segment.path}: "
                "make room, and the next `maniple run` saves it to the run folder.",
            )
            return exit_code or UNSAVED
        self._tell(lambda: self._view.say(self._board.summary()))
        if self._host.lost:
            who = ", ".join(f"worker {rank} ({why})" for rank, why in sorted(self._host.lost.items()))
            self._say(f"lost on the way: {who}")
        if self._host.unfinished:
            self._say(f"{count(self._host.unfinished, 'sample')} of leases not finished: --resume goes on with them")
        if self._host.missed and exit_code == 0 and not self._board.stop:
            self._say(
                f"{count(self._host.missed, 'sample')} of the last epochs were not trained on: workers died or ended "
                "before they had taken their share, and nobody takes more than its own. --resume trains on them; "
                "--restarts, or worker.sampler(data, balance=True), keeps them from being left"
            )
        for path in saved:
            self._say(f"center saved: {short(path)}")
        is_open = exit_code != 0 or self._job.script is None  # there is more to train
        command = resume_command(self._job, self._host.folder.path, is_queued=self._queue is not None)
        if saved and is_open and not self._is_paused and command is not None:
            self._say(f"to continue: {command}")
        return exit_code

    def _show(self, *, is_last: bool = False) -> None:
        outputs = {process.rank: process.output for process in self._processes if process.is_running}
        self._board.bars = {rank: output.bars for rank, output in outputs.items() if output is not None}
        self._tell(lambda: self._view.show(self._board, self._board.refresh(), is_last=is_last))
        running = [process.rank for process in self._processes if process.is_running]
        for line in self._stopping.news(self._board.stop, running):
            self._say(line)
        if said := self._unvalidated.news(self._board, is_last=is_last):
            self._tell(self._view.error, said)

    def _say(self, text: str) -> None:
        self._tell(self._view.say, text)

    def _tell(self, act: Callable[..., None], *args: Any) -> None:
        """Show something. Whatever goes wrong with that is said at the end, and never ends the run."""
        try:
            act(*args)
        except Exception as error:
            self._unshown = self._unshown or str(error) or type(error).__name__
            if isinstance(error, OSError) and error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                self._view = View()  # the terminal or pipe is gone; a full disk may have room again

    def _from_now_on(self, handler: Callable[..., None]) -> None:
        for number in _ENDING:
            signal.signal(number, handler)

    def _interrupt(self, *_: Any) -> None:
        """The first Ctrl-C ends the run with patience; another one ends the patience."""
        self._from_now_on(self._hurry)
        raise KeyboardInterrupt

    def _hurry(self, *_: Any) -> None:
        self._is_hurried = True
