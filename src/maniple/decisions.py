"""Decisions: train, validate or stop, over all workers. Pure: it is told what happened, and when.

batches      the sum over workers of the batches they have made
validate     one worker at a time, when `validate_every` batches were made since the last validation began
stop         when `patience` validations in a row were no better than the best, or a limit is reached
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from maniple.errors import InvalidArgument
from maniple.place import Limits

_SOONEST_S, _LATEST_S = 0.05, 1.0
_LONGEST_REASON = 2000  # it travels with every beat

Holder = tuple[int, int]  # rank and incarnation of a worker's process


class Known(msgspec.Struct):
    """All that is known; it is kept beside the center and in snapshots."""

    counts: dict[str, tuple[int, int, int]] = {}  # by worker: batches by its own count, by `done=`, samples
    started: float = 0.0
    validator: Holder | None = None
    validated_at: int = 0  # the batches when the last validation began
    best: float | None = None
    bests: int = 0  # how often there was a new one
    misses: int = 0  # validations since the best one
    reason: str = ""  # to stop

    def begin_again(self) -> None:
        """A run goes on after its end: what made it stop holds no longer."""
        self.started, self.reason, self.misses, self.validator = 0.0, "", 0, None


class Powers(Protocol):
    """What a controller can do besides answering."""

    @property
    def live(self) -> int: ...
    def keep_candidate(self) -> None: ...
    def discard_candidate(self) -> None: ...
    def keep_best(self, number: int) -> None: ...


class Decisions:
    """The default controller's mind.

    Attributes:
        limits: what was asked for.
        known: all that happened so far.
    """

    def __init__(self, limits: Limits | None = None, known: Known | None = None) -> None:
        self.limits, self.known = limits or Limits(), known or Known()
        self.is_alive: Callable[[Holder], bool] = lambda _: True
        self.powers: Powers | None = None
        self._lock = threading.Lock()

    @property
    def batches(self) -> int:
        """The batches that all workers have made."""
        return sum(max(steps, done) for steps, done, _ in list(self.known.counts.values()))

    @property
    def samples(self) -> int:
        """The samples that all workers have seen."""
        return sum(samples for _, _, samples in list(self.known.counts.values()))

    def count(self, who: Holder, steps: int, samples: int, done: int = 0) -> None:
        """A worker has made so many steps on so many samples since it began, and says that `done` are new."""
        key = f"{who[0]}.{who[1]}"
        with self._lock:  # beats and questions count at the same time
            before = self.known.counts.get(key, (0, 0, 0))
            self.known.counts[key] = (max(before[0], steps), before[1] + done, max(before[2], samples))

    def mind_limits(self, now: float) -> str:
        """Why everybody should stop, or nothing."""
        known, limits = self.known, self.limits
        known.started = known.started or now
        if not known.reason:
            if limits.max_batches and self.batches >= limits.max_batches:
                known.reason = f"{self.batches:,} batches were made (--max-batches {limits.max_batches})"
            elif limits.total_duration and now - known.started >= limits.total_duration:
                known.reason = f"{limits.total_duration:g} s have passed (--total-duration)"
        return known.reason

    def within_s(self, now: float) -> float:
        """When to hear of a worker again, so that a limit is not passed by much."""
        limits, known = self.limits, self.known
        rest_s = _LATEST_S
        if limits.max_batches and (made := self.batches) and now > known.started:
            rest_s = min(rest_s, (limits.max_batches - made) / made * (now - known.started) / 2)
        if limits.total_duration:
            rest_s = min(rest_s, known.started + limits.total_duration - now)
        return max(_SOONEST_S, rest_s)

    def answer(self, who: Holder, request: str, info: Mapping[str, Any], *, is_finished: bool = False) -> Any:
        """The answer to one of the three requests that need no controller of one's own."""
        powers = self.powers
        if request == "next":
            self.count(who, 0, 0, count_of(info, "done", request))
            verdict = "stop" if is_finished else self.next(who)
            if verdict == "validate" and powers is not None:
                powers.keep_candidate()
            return verdict
        if request == "validated":
            is_best = False
            loss = number_of(info, "loss", request)
            if self.known.validator in {None, who}:  # else it was given up, and another looks at another center
                is_best = self.validated(who, loss)
                if powers is not None:
                    powers.keep_best(self.known.bests) if is_best else powers.discard_candidate()
            return {"best": is_best, "stop": bool(self.known.reason)}
        if request == "stop":
            self.stop(str(info.get("reason", "")))
            return {"stop": True}
        raise InvalidArgument(
            f"nobody here answers {request!r}. The controller knows 'next', 'validated' and 'stop'; for more, derive "
            "a class from maniple.Controller and give it by --controller FILE.py:CLASS."
        )

    def next(self, who: Holder) -> str:
        """What a worker should do now: "train", "validate" or "stop"."""
        known = self.known
        if known.reason:
            return "stop"
        every = self.limits.validate_every
        if known.validator == who:
            known.validator = None  # it asks on without a loss: the answer did not reach it, or it does not validate
        if known.validator is not None:
            is_due = not self.is_alive(known.validator)  # it has died over it
        else:
            is_due = bool(every) and self.batches - known.validated_at >= every
        if not is_due:
            return "train"
        known.validator, known.validated_at = who, self.batches
        return "validate"

    def validated(self, who: Holder, loss: float) -> bool:
        """A worker has found the center's loss; True if it is the best so far."""
        known = self.known
        if known.validator == who:
            known.validator = None
        is_best = math.isfinite(loss) and (known.best is None or loss < known.best)
        if is_best:
            known.best, known.misses = loss, 0
            known.bests += 1
        else:
            known.misses += 1
            if self.limits.patience and known.misses >= self.limits.patience and not known.reason:
                best = "none was finite" if known.best is None else f"the best was {known.best:.6g}"
                known.reason = f"{known.misses} validations brought nothing better (--patience); {best}"
        return is_best

    def stop(self, reason: str) -> None:
        """Let everybody stop."""
        self.known.reason = self.known.reason or reason[:_LONGEST_REASON] or "somebody asked for it"


def number_of(info: Mapping[str, Any], name: str, request: str) -> float:
    """A number that a worker has sent with its request; "nan" and "inf" may come as words or as nothing."""
    value = info.get(name, "")
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{request!r} came with {name}={value!r}, where a number is needed: ask({request!r}, {name}=0.5)."
        ) from None


def count_of(info: Mapping[str, Any], name: str, request: str) -> int:
    """How many of something a worker has told of with its request; none if it has not."""
    value = info.get(name, 0)
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise InvalidArgument(
            f"{request!r} came with {name}={value!r}, where a count is needed: ask({request!r}, {name}=10)."
        )
    return int(value)
