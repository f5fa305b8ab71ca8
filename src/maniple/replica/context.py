"""The state of one worker process that all its replicas share: host, samples, record, stop conditions.

`Worker` creates one context. Replicas and their ways of sharing read it at each step, so most of it is plain
attributes: signal handlers and the heartbeat thread write them, the training thread reads them.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maniple.clock import clock
from maniple.environment import Environment
from maniple.errors import HostAway, InvalidArgument, say
from maniple.live_settings import Changes, follow, own_settings, touches
from maniple.record import Events
from maniple.replica.samples import Samples
from maniple.replica.saved_state import OptimizerStates

if TYPE_CHECKING:
    from maniple.replica.replica import Replica


class HostUpdates:
    """What a worker knows of its host. The heartbeat thread keeps it up to date; alone, nothing ever changes.

    Attributes:
        live: the number of live workers.
        is_over: the host has ended the run.
        stop: why the controller wants this worker to stop; empty while it may continue.
        changes: settings changed by `maniple change`. A new object replaces it with each change.
        relative_speed: this worker's speed, divided by that of the fast workers of the run; at most 1.
    """

    def __init__(self) -> None:
        self.live = 1
        self.is_over = False
        self.stop = ""
        self.changes = Changes()
        self.relative_speed = 1.0

    def absence(self) -> HostAway | None:
        """The error to end with once the host has been unreachable for longer than its deadline."""
        return None


class StopAfter:
    """Ends a worker's training after `total_duration` seconds, counted from the end of its first step.

    Start-up, such as imports, compilation and waiting for other workers, does not count.

    Given to `share(..., stop=StopAfter(3600))`, it turns `worker.should_stop` true at that time and ends the
    iteration of `worker.sampler`, so that an ordinary loop over a DataLoader runs out by itself; the last
    exchange is made when the worker leaves.
    """

    def __init__(self, total_duration: float) -> None:
        if not total_duration > 0:
            raise InvalidArgument(
                f"total_duration={total_duration!r} s must be above 0. Leave it out to train without a limit."
            )
        self.total_duration = total_duration
        self._end: float | None = None

    def stepped(self) -> None:
        """Start the countdown at the first step."""
        if self._end is None:
            self._end = clock.monotonic() + self.total_duration

    @property
    def is_due(self) -> bool:
        """The duration has passed."""
        return self._end is not None and clock.monotonic() >= self._end


class TrainingContext:
    """What the replicas of one worker process share.

    Attributes:
        host: the host's state, as the last heartbeat reported it.
        replicas: all replicas of this worker. Samplers and step counts follow the first.
        stop_after: the time limit of this worker, if it was given one.
        exit_code: set by a signal that asks the worker to exit.
        has_left, has_failed: the worker has left the run; its script has failed.
        is_data_divided: a feed or the script itself gives each worker its own data, or the warning has been given.
        followed: the changed settings that all replicas follow.
        logged: the newest value of each name that the script has logged, but for those about the center.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        host: HostUpdates | None = None,
        events: Events | None = None,
        segment: Path | None = None,
        ask_host: Callable[..., Any] | None = None,
    ) -> None:
        self.environment = environment
        self.host = HostUpdates() if host is None else host
        self.events = Events(None) if events is None else events
        self.samples = Samples(environment, segment=segment, ask_host=ask_host)
        self.optimizer_states = OptimizerStates(environment, segment)
        self.replicas: list[Replica] = []
        self.stop_after: StopAfter | None = None
        self.exit_code: int | None = None
        self.has_left = self.has_failed = False
        self.is_data_divided = environment.own_data
        self.followed = self.host.changes
        self.logged: dict[str, Any] = {}

    def noted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Note the values of a logged row, by which some rules compare workers; gives the row."""
        if "center" not in row:
            self.logged |= row
        return row

    def follow_changes(self) -> None:
        """Apply the settings that `maniple change` has changed to all replicas."""
        before, self.followed = self.followed, self.host.changes
        for replica in self.replicas:
            self._follow(replica, self.followed.since(before))

    def check_division(self) -> None:
        """Warn, at the first step of a shared model, if nothing divides the data among the workers.

        Of workers that were started together only worker 0 warns; one that has joined by itself has its own terminal.
        """
        is_divided, self.is_data_divided = self.is_data_divided or bool(self.samples.trained), True
        rank, world = self.environment.rank, self.environment.world
        is_by_itself = not self.environment.launcher and rank > 0
        if not is_divided and ((rank == 0 and world > 1) or is_by_itself):
            self.events.write("undivided")
            workers = f"{world} workers train" if world > 1 else "several workers train"
            say(
                f"warning: {workers}, and nothing divides the data among them: all may train on the same batches. "
                "Instead of shuffle=True, use `DataLoader(train, batch_size=..., sampler=worker.sampler(train))`, or a "
                "feed. If each worker has its own data, write maniple.join(own_data=True)."
            )

    def add(self, replica: "Replica") -> None:
        """Count on a replica from now on, with the settings that were changed before it was shared."""
        self._follow(replica, self.followed.since(Changes()))
        self.replicas.append(replica)

    @property
    def is_signalled(self) -> bool:
        """A signal has asked this worker to exit."""
        return self.exit_code is not None

    def exit_if_signalled(self) -> None:
        """End the script here if a signal has come, as if it had ended by itself. Call it between two steps."""
        if self.exit_code is not None and not self.has_left and threading.current_thread() is threading.main_thread():
            raise SystemExit(self.exit_code)

    def check_host(self, replica: "Replica") -> None:
        """Raise HostAway, with the replica saved, once the host has been unreachable for too long."""
        if not self.has_failed and (error := self.host.absence()) is not None:
            self.has_failed = True  # no last exchange is tried
            path = replica.save(f"replica-{self.environment.rank}.safetensors", self.environment.run)
            raise type(error)(f"{error} This worker's replica is saved in {path}.")

    @contextmanager
    def requiring_host(self, replica: "Replica") -> Generator[None]:
        """Run what cannot be skipped if the host is away. Raises HostAway at once if the host has ended the run."""
        if self.host.is_over:
            raise HostAway(
                "the host has ended the run, so its center can no longer be read or changed. It is saved in the run "
                "folder; check `worker.should_stop` first."
            )
        try:
            yield
        except HostAway:
            self.check_host(replica)
            raise

    def _follow(self, replica: "Replica", settings: dict[str, Any]) -> None:
        rule = replica.rule
        if not touches(rule, settings):
            return
        row: dict[str, Any] = {"step": replica.steps, "number": self.followed.number, "settings": settings}
        own = own_settings(rule, settings)
        if schedules := [name for name in own if callable(getattr(rule, name, None))]:
            row["schedules"] = schedules  # the script's schedules, which the change replaces
        try:
            replica.pace = follow(settings, rule, replica.pace)
        except Exception as error:  # a user-defined rule, whose settings the host cannot check
            row["refused"] = str(error)
        self.events.write("changed", **row, rule=repr(rule), pace=repr(replica.pace))
