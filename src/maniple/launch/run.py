"""A run on this machine, from the start of its host and workers to the last snapshot."""

import errno
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from maniple.clock import Deadline, clock
from maniple.connection.find_host import resume_command
from maniple.environment import Environment, read_threads, shared_memory
from maniple.environment.variables import visible_gpus
from maniple.errors import InvalidArgument, QueueRefused, WorkerFailed
from maniple.host import Host
from maniple.host.host import UNSAVED
from maniple.host.listener import Listener
from maniple.job import Job, rendezvous_address, thread_variables
from maniple.launch.baseline_run import find_baseline, with_name
from maniple.launch.cores import divide_cores, threads_each
from maniple.launch.external_workers import ExternalWorkersMonitor
from maniple.launch.notices import RuleNotice, SlowWorkerNotice, StopNotices, TargetNotice, ValidationNotice
from maniple.launch.process import ChildProcess, LaunchedWorker, exit_text, killed_by, stop_all
from maniple.launch.remote_workers import RayWorker, SshWorker
from maniple.launch.resume import start_host
from maniple.launch.services import (
    CONTROLLER_ERRORS,
    PageProcess,
    ProducerProcess,
    Producers,
    ServerProcess,
    periodic_snapshots,
)
from maniple.launch.terminal import Display, RunMonitor, open_display
from maniple.memory.segment import LIVE, MAX_WORKERS
from maniple.queues.queue import COMMAND_SLICE_S
from maniple.queues.submission import QueuedWorkers
from maniple.settings.options import SharedSettings
from maniple.text import count, last_lines, short
from maniple.worker.shutdown import unshared_text

_TICK_S = 0.2  # between two updates of the display; deaths are noticed at once
# From SIGTERM to SIGKILL: a worker may take 5 s for its current step (worker.shutdown), then makes its last exchange.
_GRACE_S = 10.0
_QUEUE_GRACE_S = 90.0  # for jobs to leave the queue; Slurm kills them 30 s after their SIGTERM
_QUEUED_LEAVE_S = 60.0  # for cancelled workers of a queue to make their last exchange with a host started by hand
_OTHER, _INTERRUPTED = 4, 130  # exit codes
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_job(job: Job, queue: QueuedWorkers | None = None, *, run: Path | None = None) -> int:
    """Run `job` on this machine and return the exit code.

    Args:
        queue: starts the workers instead, on other machines; this process is then only the host.
        run: a folder that was prepared for this run; if the run was started there before, it is resumed.
    """
    job.check()
    baseline = None
    if job.baseline is not None:
        job = with_name(job)
        baseline, exit_code = find_baseline(job, run_job)
        if exit_code:
            return exit_code
    # From here on there is something to clean up: signals are noted until the run can end in order.
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _INTERRUPTS}
    try:
        if run is None:
            job, host = start_host(job)
            host.folder.unstop()  # of an earlier life; a prepared folder may have been stopped before this point
        else:
            host = Host.start_prepared(shared_memory(), run, job.record(), keep=job.keep)
        if baseline is not None:
            host.folder.describe(baseline=asdict(baseline))
        try:
            job_run = _JobRun(job, host, queue)
        except BaseException:
            host.abandon()
            raise
        return job_run.run(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _JobRun:
    """The processes of a run: started, watched, restarted and ended in one loop."""

    def __init__(self, job: Job, host: Host, queue: QueuedWorkers | None) -> None:
        self._job, self._host, self._queue = job, host, queue
        self._folder = short(host.folder.path)
        self._has_host_job = queue is not None and queue.has_host_job
        environment = worker_environment(job, host, is_queued=queue is not None)
        self._listener = Listener(host, job.listen, environment)
        self._server = ServerProcess(host, self._listener)
        reach = _reach(job, self._listener)
        self._workers = [] if queue else _make_workers(job, host, reach)
        self._producers = Producers(job, host, threads=thread_variables(1, read_threads()), reach=reach)
        self._external = None if job.external is None else ExternalWorkersMonitor(job.external, host)
        self._page = PageProcess(job.web, host.folder)
        self._monitor = RunMonitor(host.folder, job.workers, from_now_on=True)
        self._display = open_display(quiet=job.quiet, is_json=job.is_json, is_brief=self._has_host_job)
        self._stop_notices, self._validation_notice = StopNotices(), ValidationNotice(job, host)
        self._rule_notice, self._slow_notice = RuleNotice(job.workers, job.rule), SlowWorkerNotice()
        self._target_notice = TargetNotice()
        self._stop_grace: Deadline | None = None  # since `maniple stop` was noticed
        self._display_error = ""  # why something could not be shown
        self._is_paused = self._is_hurried = self._is_log_full = False

    def run(self, received: list[int]) -> int:
        """Run to the end and return the exit code; `received` are signals that came before."""
        exit_code = _OTHER
        with self._display, closing(self._page):  # the page tells its viewers of the end, too
            try:
                self._handle_signals(self._on_interrupt)
                if received:
                    raise KeyboardInterrupt
                self._greet()
                interval_s, is_early = self._job.snapshot_every_s, self._has_host_job
                with periodic_snapshots(self._host, interval_s, self._warn_unsaved, is_early=is_early):
                    self._supervise()
                self._check_success()
                exit_code = 0
            except (WorkerFailed, InvalidArgument, QueueRefused) as failure:
                exit_code = self._monitor.exit_code or failure.exit_code
                self._error(str(failure))
            except KeyboardInterrupt:
                exit_code = self._interrupted()
            finally:
                self._handle_signals(self._on_second_interrupt)
                self._end_processes()
                self._refresh(is_last=True)
                exit_code = self._close(exit_code)
        if self._display_error:
            logs = short(self._host.folder.log("host").parent)
            Display().error(f"not all could be shown: {self._display_error}. What the workers printed is in {logs}")
        return exit_code

    def _greet(self) -> None:
        self._say(f"{self._job.description}, run folder {self._folder}")
        for notice in [*self._page.notices, *self._host.notices]:
            self._say(notice)
        for path in self._host.salvaged:
            self._say(f"a run whose host was killed had left {path.name} in memory: saved and removed")
        if self._listener.address is not None:
            self._say(
                f"listening on {self._listener.address}; one more worker: maniple join {self._folder} SCRIPT, or from "
                "elsewhere"
            )
            self._say(f"    MANIPLE_TOKEN_FILE={self._folder}/token maniple join {self._listener.public} SCRIPT")

    def _supervise(self) -> None:
        """Start processes and handle their ends until the run is done. Raises WorkerFailed if a worker fails."""
        children = [*self._workers, *self._producers.all, self._server, self._page]
        if self._queue is not None:
            self._say(self._queue.start(self._host))
        with selectors.DefaultSelector() as selector:
            while not self._is_done():
                for child in children:
                    if child.is_due:
                        child.start()
                        if child.is_running:
                            selector.register(child.descriptor, selectors.EVENT_READ, child)
                # Killed processes come first: others may have failed because of them.
                for key, _ in sorted(selector.select(_TICK_S), key=lambda one: (one[0].data.exit_code or 0) >= 0):
                    selector.unregister(key.fileobj)
                    self._handle_exit(key.data)
                self._producers.raise_failure(at_once=False)
                for line in self._queue.updates() if self._queue is not None else ():
                    self._say(line)
                self._warn_full_disk(children)
                self._refresh()
                if self._is_stopped():
                    raise KeyboardInterrupt

    def _is_done(self) -> bool:
        """Whether all workers have ended, also those on other machines. A host alone runs until it is stopped."""
        if self._external is not None:
            return self._external.is_over
        if self._job.script is None or not all(worker.is_done for worker in self._workers):
            return False
        return self._host.segment.live == 0 and (self._queue is None or self._queue.is_done)

    def _is_stopped(self) -> bool:
        """Whether `maniple stop` has left its mark in the run folder.

        A host alone that replaces the host of a submitted run knows nothing of the workers' jobs. `maniple stop`
        cancels those, and the host waits for their last exchange.
        """
        if not self._host.folder.is_stopped:
            return False
        if self._job.script is not None or not self._host.folder.is_submitted:
            return True
        self._stop_grace = self._stop_grace or Deadline(_QUEUED_LEAVE_S)
        return self._host.segment.live == 0 or self._stop_grace.is_over()

    def _check_success(self) -> None:
        """Raise WorkerFailed if the run has ended without success, and warn if nothing was shared."""
        self._producers.raise_failure()
        if self._external is not None:
            self._external.check(self._job.min_workers, strict=self._job.strict)
        elif self._queue is not None:
            self._queue.check(has_joined=self._host.segment.has_members)
        elif not self._host.has_joined:
            raise WorkerFailed(
                f"{self._job.script} has ended without calling maniple.join(): its {self._job.workers} copies trained "
                "apart, and there is no center. Add `worker = maniple.join()` and `worker.share(model, optimizer)`."
            )
        self._refresh()
        if self._monitor.is_unshared and not self._host.segment.centers() and not self._job.quiet:
            workers = count(self._job.workers, "worker")
            self._error(f"warning: {unshared_text(f'{self._job.script}, on {workers}, has')}")

    # Ends of processes

    def _handle_exit(self, child: ChildProcess) -> None:
        if isinstance(child, ServerProcess):
            self._handle_server_exit(child)
        elif isinstance(child, ProducerProcess):
            self._handle_producer_exit(child)
        elif isinstance(child, LaunchedWorker):
            self._handle_worker_exit(child)
        else:
            child.collect()

    def _handle_server_exit(self, server: ServerProcess) -> None:
        """Restart the server: the center and all pending work are in shared memory, and workers reconnect."""
        exit_code = server.collect()
        if (error := CONTROLLER_ERRORS.get(exit_code)) is not None:
            output = last_lines(self._host.folder.log("server"), server.unwritten)
            raise error(f"the controller cannot be used:\n{output}")
        server.restart()
        self._host.events.write("server died", exit_code=exit_code)
        self._say(f"the server {exit_text(exit_code)}: it is started again, and nothing is lost")

    def _handle_producer_exit(self, producer: ProducerProcess) -> None:
        if exit_code := producer.collect():
            output = self._monitor.last_words(producer.name, producer.unwritten)
            failure = f"producer {producer.number} {exit_text(exit_code)}, so the run ends. {output}"
            self._producers.fail(WorkerFailed(failure))

    def _handle_worker_exit(self, worker: LaunchedWorker) -> None:
        """Restart a failed worker, continue without it, or raise WorkerFailed."""
        exit_code = worker.collect()
        if exit_code == 0:
            return
        if (producer := self._producers.failed()) is not None:
            self._handle_producer_exit(producer)
        self._producers.raise_failure()
        if worker.restarts < self._job.restarts:
            worker.restart()
            restarts = f"restart {worker.restarts} of {self._job.restarts}"
            self._say(f"worker {worker.rank} {exit_text(exit_code)}: {restarts}")
            return
        self._refresh()  # the rule that the workers share by decides what follows
        restarted = f" after {count(worker.restarts, 'restart')}" if worker.restarts else ""
        left, consequence = self._workers_left(worker), ", so the run ends"
        if (why := worker.loss_reason(exit_code)) and not (consequence := self._loss_ends_run(left)):
            worker.give_up(why)
            how = exit_text(exit_code) if killed_by(exit_code) else f"is lost ({why})"
            self._error(f"worker {worker.rank} {how}{restarted}{self._loss_advice(why, left)}")
            return
        output = self._monitor.last_words(worker.rank, worker.unwritten)
        raise WorkerFailed(f"worker {worker.rank} {exit_text(exit_code)}{restarted}{consequence}. {output}")

    def _workers_left(self, lost: LaunchedWorker) -> int:
        """How many workers are left without `lost`, including those that joined by themselves."""
        others = sum(not worker.is_done for worker in self._workers if worker is not lost)
        return others + sum(self._host.segment.state(rank) == LIVE for rank in range(self._job.world, MAX_WORKERS))

    def _loss_ends_run(self, left: int) -> str:
        """Why the loss of a worker, through no fault of the script, ends the run; "" if the others continue."""
        if self._job.strict:
            return ", so the run ends (--strict)"
        if left < self._job.min_workers:
            who = f"{count(left, 'worker')} {'is' if left == 1 else 'are'}" if left else "no other is"
            return f", and {who} left, below --min-workers {self._job.min_workers}, so the run ends"
        uses_torch = self._job.collectives == "torch" or bool(self._job.hosts)
        if uses_torch and self._monitor.is_synchronous(self._job.effective_rule):
            return ", and collectives over torch cannot continue without it, so the run ends"
        return ""

    def _loss_advice(self, why: str, left: int) -> str:
        """The rest of the message about a lost worker, while the others continue."""
        memory = " (out of memory? `dmesg` tells)" if why == "killed by SIGKILL" else ""
        if self._monitor.is_synchronous(self._job.effective_rule):
            replacement = ". Its share of each epoch is left out from now on"
        else:
            listen = "" if self._listener.address else " in a run with --listen"
            replacement = f", `maniple join {self._folder} SCRIPT`{listen} adds one"
        return f"{memory}: {left} left, and the run continues. --restarts N would replace such a worker{replacement}"

    # The end of the run

    def _interrupted(self) -> int:
        """Report that a person or the queue ends the run; returns the exit code."""
        if self._job.script is None:  # a host alone has no other end
            self._say("ending: the workers are notified, and the center is saved")
            return 0 if self._external is None else self._external.exit_code() or _INTERRUPTED
        self._is_paused = self._has_host_job and not self._host.folder.is_stopped
        if self._is_paused:
            self._say("pausing: the center is saved, and the workers train on until this job begins again")
            return 0
        grace = "" if self._queue else f" ({_GRACE_S:g} s for the current step; Ctrl-C again ends them now)"
        self._error(f"interrupted: ending the workers{grace} and saving the center")
        return 0 if self._has_host_job else _INTERRUPTED

    def _end_processes(self) -> None:
        """End workers and producers: a grace period after SIGTERM, then SIGKILL."""
        self._end_queued_workers()
        if self._external is not None:
            self._external.wait_until_left(_GRACE_S, lambda: self._is_hurried)
        stop_all(self._workers, _GRACE_S, lambda: self._is_hurried)
        self._producers.end(lambda: self._is_hurried)

    def _end_queued_workers(self) -> None:
        if self._queue is None or self._is_paused:
            return
        deadline = Deadline(_QUEUE_GRACE_S, slice_s=COMMAND_SLICE_S)
        while not (is_over := self._queue.cancel()) and not self._is_hurried and not deadline.is_over():
            clock.sleep(_TICK_S)
            self._refresh()
        if not is_over:
            self._error(f"the workers' jobs may still be in the queue: `maniple stop {self._folder}` cancels them")

    def _close(self, exit_code: int) -> int:
        """End the server, save the center and summarise the run; returns the exit code."""
        self._server.close(is_over=not self._is_paused)
        try:
            saved = self._host.pause() if self._is_paused else self._host.close(exit_code, result=self._result())
        except Exception as error:  # of any kind: the workers have ended, and the center is still in memory
            self._error(
                f"the center could not be saved: {error}. It is kept in {self._host.segment.path}: "
                "make room, and the next `maniple run` saves it to the run folder."
            )
            return exit_code or UNSAVED
        self._show(lambda: [self._display.say(line) for line in self._monitor.summary()])
        if self._host.lost:
            who = ", ".join(f"worker {rank} ({why})" for rank, why in sorted(self._host.lost.items()))
            self._say(f"lost on the way: {who}")
        if self._host.unfinished:
            self._say(f"{count(self._host.unfinished, 'sample')} of leases not finished: --resume continues with them")
        if self._host.missed and exit_code == 0 and not self._monitor.stop_reason:
            self._say(
                f"{count(self._host.missed, 'sample')} of the last epochs were not trained on: workers died or ended "
                "before they had taken their share, and no worker takes more than its own. --resume trains on them; "
                "--restarts, or worker.sampler(data, balance=True), keeps them from being left"
            )
        for path in saved:
            self._say(f"center saved: {short(path)}")
        is_unfinished = exit_code != 0 or self._job.script is None
        if saved and is_unfinished and not self._is_paused and self._job.external is None:
            self._say(f"to continue: {resume_command(self._host.folder.path)}")
        return exit_code

    def _result(self) -> dict[str, Any] | None:
        """The figures of the run for run.json; None if they cannot be computed, which must not end the run."""
        found: list[dict[str, Any]] = []
        self._show(lambda: found.append(self._monitor.result()))
        return found[0] if found else None

    # What a person sees

    def _refresh(self, *, is_last: bool = False) -> None:
        """Bring the display up to date, and show notices that are due."""
        running = [worker for worker in self._workers if worker.is_running]
        self._monitor.bars = {worker.rank: worker.output.bars for worker in running if worker.output is not None}
        self._show(self._monitor.refresh)
        self._show(lambda: self._display.show(self._monitor, self._monitor.printed(), is_last=is_last))
        for line in self._stop_notices.due(self._monitor.stop_reason, [worker.rank for worker in running]):
            self._say(line)
        for notice in filter(None, (self._rule_notice.due(self._monitor), self._slow_notice.due(self._monitor))):
            self._say(notice)
        if notice := self._target_notice.due(self._monitor, is_last=is_last):
            self._say(notice)
            if self._job.stop_at_target:
                self._host.request_stop(f"{notice} (--stop-at-target)")
        if notice := self._validation_notice.due(self._monitor, is_last=is_last):
            self._error(notice)

    def _warn_full_disk(self, children: Sequence[ChildProcess]) -> None:
        """Report once that output of a process cannot be written to its log."""
        why = next((child.output.problem for child in children if child.output and child.output.problem), "")
        if why and not self._is_log_full:
            self._is_log_full = True
            logs = short(self._host.folder.log("host").parent)
            self._error(
                f"the logs in {logs} cannot be written: {why}. Training continues, and each process's newest lines are "
                "kept until there is room again."
            )

    def _warn_unsaved(self, error: Exception) -> None:
        self._error(f"no snapshot could be written: {error}. Training continues.")

    def _say(self, text: str) -> None:
        self._show(lambda: self._display.say(text))

    def _error(self, text: str) -> None:
        self._show(lambda: self._display.error(text))

    def _show(self, act: Callable[[], object]) -> None:
        """Show something. Its failure is reported at the end, and never ends the run."""
        try:
            act()
        except Exception as error:
            self._display_error = self._display_error or str(error) or type(error).__name__
            if isinstance(error, OSError) and error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                self._display = Display()  # the terminal or pipe is gone; a full disk may have room again

    # Signals

    def _handle_signals(self, handler: Callable[..., None]) -> None:
        for number in _INTERRUPTS:
            signal.signal(number, handler)

    def _on_interrupt(self, *_: Any) -> None:
        """The first Ctrl-C ends the run with grace periods; a second one cuts them short."""
        self._handle_signals(self._on_second_interrupt)
        raise KeyboardInterrupt

    def _on_second_interrupt(self, *_: Any) -> None:
        self._is_hurried = True


def worker_environment(job: Job, host: Host, *, is_queued: bool) -> Environment:
    """The environment that all workers of a run have in common."""
    shared: dict[str, Any] = {part.name: getattr(job, part.name) for part in fields(SharedSettings)}
    shared["seed"] = job.effective_seed
    return Environment(
        **shared,
        world=job.world,
        run=host.folder.path,
        segment=host.segment.path,
        is_queued=is_queued,
        launcher=job.launcher,
        own_data=any("{rank}" in arg for arg in job.args),  # as in --shard part-{rank}.npz
        master=rendezvous_address(job),
    )


def _reach(job: Job, listener: Listener) -> Environment:
    """How workers and producers connect to the host."""
    environment = listener.environment.replace(key=None)
    return environment.replace(address=str(listener.public)) if job.hosts or job.ray else environment


def _make_workers(job: Job, host: Host, reach: Environment) -> list[LaunchedWorker]:
    """All workers of a job, none of them started."""
    cores = sorted(os.sched_getaffinity(0))
    threads = thread_variables(threads_each(len(cores), job.workers), read_threads())
    devices = [job.device(rank % job.workers_per_node) for rank in range(job.workers)]
    kind = RayWorker if job.ray else SshWorker if job.hosts else LaunchedWorker
    return [
        kind(job, host, rank, cores=part, threads=threads, reach=reach)
        for rank, part in enumerate(divide_cores(cores, devices, visible=visible_gpus()))
    ]
