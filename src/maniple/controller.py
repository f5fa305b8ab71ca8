"""The controller decides when workers train, validate and stop, and answers their other requests.

`Controller` is the public class to derive from. `DefaultPolicy` makes its decisions: limits, validation and early
stopping over all workers of a run. It does no I/O and reads no clock: callers tell it what happened, and when.

batches      the sum of the batches of all workers
validate     one worker at a time, once `validate_every` batches were made since the last validation began
stop         once a limit is reached, or `patience` validations in a row were no better than the best
"""

import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from maniple.errors import InvalidArgument
from maniple.settings.options import Limits

_FIRST_STEP_SHARE = 0.05  # of --total-duration, by which the first step may be noticed late
_MAX_REASON = 2000  # characters; the reason to stop travels with every heartbeat

WorkerProcess = tuple[int, int]  # rank and incarnation of a worker's process


class Controller:
    """Answers `worker.ask(request, **info)`. This one is the default; derive from it and override `handle_control`.

    It knows four requests:

        next       info: done (batches made since the last time; not needed where a model is shared)
                   answer: "train", "validate" (you alone; look at the center) or "stop"
        validated  info: loss (of the center); published (the center is exactly what was validated; the worker adds it)
                   answer: {"best": true if it was the best so far, "stop": true if it was the last}
                   or info: means, weight, batches, of, epoch: the result on a part of the data. The answer has
                   the means over all parts as `means` once they make `of` batches
        keep       info: epoch. Keep the center as a snapshot; answer: {"name": "epoch-0003"}, in the run's folder
                   `center`, for the first worker that asks, and None for all others
        stop       info: reason. All workers stop

    Requests come one at a time, from all workers. An exception in the handler is raised where the request was
    made, and the run continues.

    Attributes:
        state: whatever the controller should remember, as JSON can express it (dicts with string keys, lists,
            numbers). It outlives the controller's process and is part of snapshots. Other attributes are not.
    """

    state: dict[str, Any]
    policy: "DefaultPolicy"
    asking: WorkerProcess  # whose request is being answered: rank and incarnation
    is_finished: bool  # that worker has no samples left

    def __init_subclass__(cls, **settings: Any) -> None:
        """Check the handler's signature when the class is defined, not at the first request."""
        super().__init_subclass__(**settings)
        handler = inspect.getattr_static(cls, "handle_control")
        wants = "handle_control(self, request, worker, info): the request, the worker's rank, and a dict"
        if not inspect.isfunction(handler) or inspect.iscoroutinefunction(handler):
            kind = "a coroutine" if inspect.iscoroutinefunction(handler) else f"a {type(handler).__name__}"
            raise InvalidArgument(
                f"{cls.__qualname__}.handle_control is {kind}, and cannot answer requests. Define a method {wants}."
            )
        signature = inspect.signature(handler)
        try:
            signature.bind(None, "", 0, {})
        except TypeError as error:
            raise InvalidArgument(
                f"{cls.__qualname__}.handle_control{signature} cannot be called with three arguments ({error}). Define "
                f"it as {wants}."
            ) from None

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Set the attributes here, so that a derived class need not call `super().__init__()`."""
        del args, settings
        self = super().__new__(cls)
        self.state = {}
        self.policy = DefaultPolicy()
        self.asking, self.is_finished = (-1, 0), False
        return self

    def handle_control(self, request: str, worker: int, info: Mapping[str, Any]) -> Any:
        """Answer a request of rank `worker` with anything that JSON can express."""
        del worker
        return self.policy.answer(self.asking, request, info, is_finished=self.is_finished)

    def stop(self, reason: str = "") -> None:
        """Stop all workers, each at its next step."""
        self.policy.stop(reason)

    @property
    def is_stopping(self) -> bool:
        """Whether a worker has asked to stop, or a limit is reached."""
        return bool(self.policy.state.reason)

    @property
    def batches(self) -> int:
        """The batches of all workers."""
        return self.policy.state.made[0]

    @property
    def samples(self) -> int:
        """The samples that all workers have seen."""
        return self.policy.state.made[1]

    @property
    def live(self) -> int:
        """The number of live workers."""
        return 0 if self.policy.host is None else self.policy.host.live

    def serve(self, port: int = 0, *, host: str = "127.0.0.1", name: str | None = None, runs: str = "runs") -> None:
        """Host a run in this process until Ctrl-C or SIGTERM; workers join by `maniple.join(address)`.

        Address and token are written to the run folder, as by `maniple serve`. But nothing restarts this process if
        it is killed, and `maniple serve --resume` does not know this controller.
        """
        from maniple.host.server_process import serve

        serve(self, port, host=host, name=name, runs=Path(runs))


class ValidationPart(msgspec.Struct):
    """The result of one worker on its part of the validation data."""

    batches: int
    weight: float
    means: dict[str, float | None]  # None: not a number


class ControllerState(msgspec.Struct):
    """Everything that the default controller remembers; part of snapshots."""

    counts: dict[str, tuple[int, int, int]] = {}  # by worker: batches by its own count, by `done=`, samples
    started: float = 0.0  # when a worker first reported
    stepped: float = 0.0  # when the first step was reported: --total-duration counts from here
    behind: tuple[int, int] = (0, 0)  # batches and samples of earlier lives of the run
    validator: WorkerProcess | None = None  # who validates now
    validated_at: int = 0  # batches when the last validation began
    best: float | None = None  # the lowest loss
    bests: int = 0  # how often there was a new best
    misses: int = 0  # validations since the best one
    reason: str = ""  # why to stop
    kept: int = 0  # the newest epoch whose center was kept
    parts: dict[str, dict[str, ValidationPart]] = {}  # of incomplete validations: by epoch, by rank

    @property
    def made(self) -> tuple[int, int]:
        """Batches and samples of all workers, in all lives of the run."""
        counts = list(self.counts.values())
        return sum(max(steps, done) for steps, done, _ in counts), sum(samples for _, _, samples in counts)

    def reset_for_resume(self) -> None:
        """Forget why the run stopped, and restart its duration; counts and the best loss stay."""
        self.started, self.stepped, self.reason, self.misses, self.validator = 0.0, 0.0, "", 0, None
        self.behind, self.parts = self.made, {}


class HostActions(Protocol):
    """What a controller asks of its host."""

    @property
    def live(self) -> int: ...
    def is_live(self, who: WorkerProcess) -> bool: ...
    def keep_candidate(self) -> None: ...
    def discard_candidate(self) -> None: ...
    def keep_best(self, number: int, loss: float) -> None: ...
    def prune_bests(self, number: int) -> None: ...
    def keep_epoch(self, number: int) -> str | None: ...


class DefaultPolicy:
    """Answers the requests "next", "validated", "keep" and "stop".

    Attributes:
        limits: the limits of the run.
        state: what happened so far.
        host: keeps centers and knows which workers are alive; None for a single worker without a host.
    """

    def __init__(self, limits: Limits | None = None, state: ControllerState | None = None) -> None:
        self.limits, self.state = limits or Limits(), state or ControllerState()
        self.host: HostActions | None = None
        self._lock = threading.Lock()  # heartbeats and requests count at the same time

    def count(self, who: WorkerProcess, steps: int, samples: int, done: int = 0) -> None:
        """Note a worker's steps and samples since its start, and that it reports `done` more batches."""
        key = f"{who[0]}.{who[1]}"
        with self._lock:
            before = self.state.counts.get(key, (0, 0, 0))
            self.state.counts[key] = (max(before[0], steps), before[1] + done, max(before[2], samples))

    def answer(self, who: WorkerProcess, request: str, info: Mapping[str, Any], *, is_finished: bool = False) -> Any:
        """Answer a request; `is_finished`: this worker has no samples left."""
        if request == "next":
            self.count(who, 0, 0, count_of(info, "done", request))
            answer = "stop" if is_finished else self.next(who)
            if answer == "validate" and self.host is not None:
                self.host.keep_candidate()
            return answer
        if request == "validated" and "of" in info:
            means = self._combine_part(who, info)
            is_best = means is not None and self.finish_validation(who, number_of(means, "loss", request))
            return {"best": is_best, "stop": bool(self.state.reason), "means": means}
        if request == "validated":
            is_published = bool(info.get("published"))
            is_best = self.finish_validation(who, number_of(info, "loss", request), is_published=is_published)
            return {"best": is_best, "stop": bool(self.state.reason)}
        if request == "keep":
            return {"name": self._keep_epoch(count_of(info, "epoch", request))}
        if request == "stop":
            self.stop(str(info.get("reason", "")))
            return {"stop": True}
        raise InvalidArgument(
            f"the controller does not answer {request!r}. It knows 'next', 'validated', 'keep' and 'stop'; for more, "
            "derive a class from maniple.Controller and give it by --controller FILE.py:CLASS."
        )

    # Limits

    def check_limits(self, now: float) -> str:
        """Why all workers should stop; "" if no limit is reached."""
        state, limits = self.state, self.limits
        made = state.made
        state.started = state.started or now
        if not state.stepped and made != state.behind:
            state.stepped = now
        if not state.reason:
            if limits.max_batches and made[0] >= limits.max_batches:
                state.reason = f"{made[0]:,} batches were made (--max-batches {limits.max_batches})"
            elif limits.total_duration and state.stepped and now - state.stepped >= limits.total_duration:
                state.reason = f"{limits.total_duration:g} s have passed since the first step (--total-duration)"
        return state.reason

    def next_check_s(self, now: float) -> float:
        """When to check the limits again, so that none is exceeded by much; inf if there is none."""
        limits, state, rest_s = self.limits, self.state, math.inf
        if limits.max_batches and (made := state.made[0]) and now > state.started:
            rest_s = (limits.max_batches - made) / made * (now - state.started) / 2  # half-way to the limit
        if limits.total_duration and state.stepped:
            rest_s = min(rest_s, state.stepped + limits.total_duration - now)
        elif limits.total_duration:  # the first step starts the duration, so it must be noticed soon
            rest_s = min(rest_s, limits.total_duration * _FIRST_STEP_SHARE)
        return rest_s

    def stop(self, reason: str) -> None:
        """Stop all workers. The first reason stays."""
        self.state.reason = self.state.reason or reason[:_MAX_REASON] or "somebody asked for it"

    # Validation

    def next(self, who: WorkerProcess) -> str:
        """What a worker should do now: "train", "validate" or "stop"."""
        state, made = self.state, self.state.made[0]
        if state.reason:
            return "stop"
        if state.validator == who:
            state.validator = None  # it asks again without a loss: the answer was lost, or it does not validate
        if state.validator is not None:
            is_due = self.host is not None and not self.host.is_live(state.validator)  # it died while validating
        else:
            every = self.limits.validate_every
            is_due = bool(every) and made - state.validated_at >= every
        if not is_due:
            return "train"
        state.validator, state.validated_at = who, made
        return "validate"

    def finish_validation(self, who: WorkerProcess, loss: float, *, is_published: bool = False) -> bool:
        """Note the center's loss, and keep the center if it is the best so far; returns whether it is.

        Stops early once `patience` losses in a row are no better than the best.

        Args:
            is_published: the center itself was validated, so the candidate is older and not needed.
        """
        state, patience = self.state, self.limits.patience
        if state.validator not in {None, who}:  # this one was replaced: another center is being validated
            return False
        state.validator = None
        is_best = math.isfinite(loss) and (state.best is None or loss < state.best)
        if is_best:
            state.best, state.misses, state.bests = loss, 0, state.bests + 1
        else:
            state.misses += 1
            if patience and state.misses >= patience and not state.reason:
                best = "none was finite" if state.best is None else f"the best was {state.best:.6g}"
                state.reason = f"{state.misses} validations brought nothing better (--patience); {best}"
        if self.host is not None:
            if is_published or not is_best:
                self.host.discard_candidate()
            if is_best:
                self.host.keep_best(state.bests, loss)
        return is_best

    def _combine_part(self, who: WorkerProcess, info: Mapping[str, Any]) -> dict[str, float] | None:
        """Note a worker's result on its part of the data; the means over all parts once they make `of` batches."""
        state, epoch = self.state, count_of(info, "epoch", "validated")
        parts = state.parts.setdefault(str(epoch), {})
        if not parts and self.host is not None:
            self.host.keep_candidate()
        weight, batches = number_of(info, "weight", "validated"), count_of(info, "batches", "validated")
        parts[str(who[0])] = ValidationPart(batches, weight, dict(info.get("means", {})))
        if sum(part.batches for part in parts.values()) < count_of(info, "of", "validated"):
            return None
        state.parts = {key: later for key, later in state.parts.items() if int(key) > epoch}
        return combined([(part.means, part.weight) for part in parts.values()])

    def _keep_epoch(self, epoch: int) -> str | None:
        """Keep the center after an epoch, for the first worker that asks; returns the snapshot's name."""
        if self.host is None or epoch <= self.state.kept:
            return None
        self.state.kept = epoch
        return self.host.keep_epoch(epoch)


def combined(parts: Sequence[tuple[Mapping[str, float | None], float]]) -> dict[str, float]:
    """The weighted means over parts, each given by its means and its weight. None counts as NaN."""
    total = sum(weight for _, weight in parts) or math.nan
    names = dict.fromkeys(name for means, _ in parts for name in means)
    return {
        name: sum((math.nan if (mean := means.get(name)) is None else mean) * weight for means, weight in parts) / total
        for name in names
    }


def number_of(info: Mapping[str, Any], name: str, request: str) -> float:
    """A number in a worker's request. JSON has no NaN and inf: they come as strings, or NaN as None."""
    value = info.get(name, "")
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{request!r} came with {name}={value!r}, where a number is needed: ask({request!r}, {name}=0.5)."
        ) from None


def count_of(info: Mapping[str, Any], name: str, request: str) -> int:
    """A count in a worker's request; 0 if it has none."""
    value = info.get(name, 0)
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise InvalidArgument(
            f"{request!r} came with {name}={value!r}, where a count is needed: ask({request!r}, {name}=10)."
        )
    return int(value)
