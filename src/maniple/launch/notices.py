"""Notices to the person at the terminal: what the launcher says once, when the state of the run calls for it."""

from collections.abc import Sequence

from maniple.clock import clock
from maniple.host import Host
from maniple.job import Job
from maniple.launch.terminal import RunMonitor
from maniple.monitor import Totals

_STOP_NOTICE_S = 60.0  # the longest step that is still plausible; then workers that continue are named
_SLOW_AFTER_S = 60.0  # of training; the first seconds are no measure, since workers start at different moments
_SLOW_SHARE = 0.25  # of the time: more than the jitter of equal workers on a busy machine explains


class StopNotices:
    """Reports once why the controller stops the run, and later which workers have not followed."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_done = False

    def due(self, reason: str, running: Sequence[int]) -> list[str]:
        """Notices to show now, given the controller's reason to stop and the ranks that still run."""
        now = clock.monotonic()
        if reason and self._since is None:
            self._since = now
            return [f"everybody stops: {reason}"]
        if self._since is None or self._is_done or not running or now - self._since < _STOP_NOTICE_S:
            return []
        self._is_done = True
        return [
            f"told to stop {_STOP_NOTICE_S:.0f} s ago and still running: {', '.join(map(str, running))}. A loop ends "
            "by itself if it takes its samples from worker.sampler, or looks at worker.should_stop"
        ]


class TargetNotice:
    """Reports once that the run has reached its target."""

    def __init__(self) -> None:
        self._is_done = False

    def due(self, monitor: RunMonitor, *, is_last: bool = False) -> str:
        """The notice, once the target is reached; else "". At the end of the run the summary says it."""
        if self._is_done or is_last or (status := monitor.target_status()) is None or status.reached_s is None:
            return ""
        self._is_done = True
        return status.text


class RuleNotice:
    """Reports once by which rule the workers share, where neither the script nor the command line names one."""

    def __init__(self, workers: int, rule: str | None) -> None:
        self._workers, self._is_done = workers, workers < 2 or rule is not None

    def due(self, monitor: RunMonitor) -> str:
        """The notice, once a worker has shared a model; else ""."""
        shared = monitor.shared
        if self._is_done or not shared:
            return ""
        self._is_done = True
        if not shared.get("by_default"):
            return ""
        if shared["meets"] == "center":
            return "rule: easgd by default; no worker waits for another"
        return (
            "rule: bsp by default, since all workers are on this machine. The result is that of one process with "
            f"{self._workers} times the batch: divide the batch size by worker.world, or raise the learning rate up "
            f"to {self._workers} times (docs/choose.md)"
        )


class SlowWorkerNotice:
    """Reports once that the workers of a synchronous run wait long for one that is slower."""

    def __init__(self) -> None:
        self._is_done = False

    def due(self, monitor: RunMonitor) -> str:
        """The notice, if some worker has lost much of its time and another, for which it waits, hardly any; else ""."""
        if self._is_done or monitor.shared.get("meets", "center") in {"center", "peers"}:
            return ""
        # Only since each was last started: a resumed run may have had another rule, or other workers, before.
        training = {rank: one.now for rank, one in monitor.workers.items() if one.state == "training" and one.now.step}
        splits = {rank: now.split for rank, now in training.items()}
        spent_s = {rank: sum(split.values()) for rank, split in splits.items()}
        if len(splits) < 2 or min(spent_s.values()) < _SLOW_AFTER_S:
            return ""
        waited = {rank: split["others"] / spent_s[rank] for rank, split in splits.items()}
        slowest, longest = min(waited, key=waited.__getitem__), max(waited.values())
        if longest < _SLOW_SHARE or waited[slowest] > _SLOW_SHARE / 4:
            return ""
        self._is_done = True
        return (
            f"worker {slowest} is slower than the others, which wait for it {longest:.0%} of their time. With "
            "--rule easgd no worker waits, and with worker.sampler(data, balance=True) fast workers take more samples"
        )


class ValidationNotice:
    """Reports once that --patience or --validate-every has no effect because nothing is validated.

    A user's own controller may count validations in its own way, so it never applies to one.
    """

    def __init__(self, job: Job, host: Host) -> None:
        self._limits, self._host = job.limits, host
        self._validated = host.validated
        self._is_done = job.controller is not None or not (job.limits.patience or job.limits.validate_every)
        self._before: Totals | None = None  # totals of earlier lives of the run

    def due(self, monitor: RunMonitor, *, is_last: bool = False) -> str:
        """The notice: at the end of the run, or after two epochs in which a validation was due twice; else ""."""
        if self._is_done:
            return ""
        totals = monitor.totals()
        before = self._before = self._before or totals
        steps, samples = totals.steps - before.steps, totals.samples - before.samples
        is_late = 0 < 2 * monitor.epoch_size <= samples and steps >= 2 * self._limits.validate_every
        if not is_late and not (is_last and steps):
            return ""
        self._is_done = True
        if self._host.validated != self._validated:
            return ""
        self._host.events.write("unvalidated")
        values = {"--patience": self._limits.patience, "--validate-every": self._limits.validate_every}
        given = " and ".join(f"{name} {value}" for name, value in values.items() if value)
        return (
            f"{given} {'have' if all(values.values()) else 'has'} no effect: nothing was validated. Call "
            'worker.ask("validated", loss=...) after each epoch; or give --validate-every N, and validate when '
            'worker.ask("next") says so (docs/controller.md)'
        )
