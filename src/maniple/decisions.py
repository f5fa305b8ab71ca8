"""Decisions: train, validate or stop, over all workers. Pure: it is told what happened, and when.

batches      the sum over workers of the batches they have made
validate     one worker at a time, when `validate_every` batches were made since the last validation began
stop         when `patience` validations in a row were no better than the best, or a limit is reached
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from maniple.errors import InvalidArgument
from maniple.place import Limits

_SOONEST_S, _LATEST_S = 0.05, 1.0
_HEARD_SHARE = 0.05  # of --total-duration, by which the first step may be heard of late
_LONGEST_REASON = 2000  # it travels with every beat

Holder = tuple[int, int]  # rank and incarnation of a worker's process


class Part(msgspec.Struct):
    """What one worker has found on its part of the validation data."""

    batches: int
    weight: float
    means: dict[str, float | None]  # None: not a number


class Known(msgspec.Struct):
    """All that is known; it is kept beside the center and in snapshots."""

    counts: dict[str, tuple[int, int, int]] = {}  # by worker: batches by its own count, by `done=`, samples
    started: float = 0.0  # when a worker was first heard of
    stepped: float = 0.0  # when the first step of any worker was: --total-duration counts from there
    behind: tuple[int, int] = (0, 0)  # batches and samples of the run's earlier lives
    validator: Holder | None = None
    validated_at: int = 0  # the batches when the last validation began
    best: float | None = None
    bests: int = 0  # how often there was a new one
    misses: int = 0  # validations since the best one
    validations: int = 0  # in this life of the run
    reason: str = ""  # to stop
    kept: int = 0  # the newest epoch whose center was kept
    parts: dict[str, dict[str, Part]] = {}  # of validations that are not complete: by epoch, by rank

    @property
    def made(self) -> tuple[int, int]:
        """The batches and samples of all workers, in all lives of the run."""
        counts = list(self.counts.values())
        return sum(max(steps, done) for steps, done, _ in counts), sum(samples for _, _, samples in counts)

    def begin_again(self) -> None:
        """A run goes on after its end: what made it stop holds no longer."""
        self.started, self.stepped, self.reason, self.misses, self.validator = 0.0, 0.0, "", 0, None
        self.behind = self.made
        self.parts, self.validations = {}, 0


class Powers(Protocol):
    """What a controller can do besides answering."""

    @property
    def live(self) -> int: ...
    def keep_candidate(self) -> None: ...
    def discard_candidate(self) -> None: ...
    def keep_best(self, number: int) -> None: ...
    def keep_epoch(self, number: int) -> str | None: ...


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
        return self.known.made[0]

    @property
    def samples(self) -> int:
        """The samples that all workers have seen."""
        return self.known.made[1]

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
        if not known.stepped and known.made != known.behind:
            known.stepped = now
        if not known.reason:
            if limits.max_batches and self.batches >= limits.max_batches:
                known.reason = f"{self.batches:,} batches were made (--max-batches {limits.max_batches})"
            elif limits.total_duration and known.stepped and now - known.stepped >= limits.total_duration:
                known.reason = f"{limits.total_duration:g} s have passed since the first step (--total-duration)"
        return known.reason

    def within_s(self, now: float) -> float:
        """When to hear of a worker again, so that a limit is not passed by much."""
        limits, known = self.limits, self.known
        rest_s = _LATEST_S
        if limits.max_batches and (made := self.batches) and now > known.started:
            rest_s = min(rest_s, (limits.max_batches - made) / made * (now - known.started) / 2)
        if limits.total_duration and known.stepped:
            rest_s = min(rest_s, known.stepped + limits.total_duration - now)
        elif limits.total_duration:  # the first step is to be heard of soon, measured by the time that it begins
            rest_s = min(rest_s, limits.total_duration * _HEARD_SHARE)
        return max(_SOONEST_S, rest_s)

    def answer(self, who: Holder, request: str, info: Mapping[str, Any], *, is_finished: bool = False) -> Any:
        """The answer to one of the requests that need no controller of one's own."""
        powers = self.powers
        if request == "next":
            self.count(who, 0, 0, count_of(info, "done", request))
            verdict = "stop" if is_finished else self.next(who)
            if verdict == "validate" and powers is not None:
                powers.keep_candidate()
            return verdict
        if request == "validated" and "of" in info:
            means = self._gathered(who, info)
            is_best = means is not None and self._settled(who, number_of(means, "loss", request))
            return {"best": is_best, "stop": bool(self.known.reason), "means": means}
        if request == "validated":
            is_best = self._settled(who, number_of(info, "loss", request), is_published=bool(info.get("published")))
            return {"best": is_best, "stop": bool(self.known.reason)}
        if request == "keep":
            return {"name": self._keep(count_of(info, "epoch", request))}
        if request == "stop":
            self.stop(str(info.get("reason", "")))
            return {"stop": True}
        raise InvalidArgument(
            f"nobody here answers {request!r}. The controller knows 'next', 'validated', 'keep' and 'stop'; for more, "
            "derive a class from maniple.Controller and give it by --controller FILE.py:CLASS."
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

    def _settled(self, who: Holder, loss: float, *, is_published: bool = False) -> bool:
        """The center's loss is known; True if it is the best so far, and kept.

        `is_published`: the center is what was validated, and the candidate is older.
        """
        if self.known.validator not in {None, who}:  # it was given up, and another looks at another center
            return False
        is_best, powers = self.validated(who, loss), self.powers
        if powers is not None and (is_published or not is_best):
            powers.discard_candidate()
        if powers is not None and is_best:
            powers.keep_best(self.known.bests)
        return is_best

    def _keep(self, epoch: int) -> str | None:
        """Keep the center after an epoch, for the first who asks for it; gives the snapshot's name."""
        if self.powers is None or epoch <= self.known.kept:
            return None
        self.known.kept = epoch
        return self.powers.keep_epoch(epoch)

    def _gathered(self, who: Holder, info: Mapping[str, Any]) -> dict[str, float] | None:
        """Note what a worker has found on its part; the means over all parts, once there are as many as `of`."""
        known, epoch = self.known, count_of(info, "epoch", "validated")
        parts = known.parts.setdefault(str(epoch), {})
        if not parts and self.powers is not None:
            self.powers.keep_candidate()
        weight, batches = number_of(info, "weight", "validated"), count_of(info, "batches", "validated")
        parts[str(who[0])] = Part(batches, weight, dict(info.get("means", {})))
        if sum(part.batches for part in parts.values()) < count_of(info, "of", "validated"):
            return None
        known.parts = {key: later for key, later in known.parts.items() if int(key) > epoch}
        return combined([(part.means, part.weight) for part in parts.values()])

    def validated(self, who: Holder, loss: float) -> bool:
        """A worker has found the center's loss; True if it is the best so far."""
        known = self.known
        if known.validator == who:
            known.validator = None
        known.validations += 1
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


def combined(parts: Sequence[tuple[Mapping[str, float | None], float]]) -> dict[str, float]:
    """The means over all parts, of the means over each and its weight."""
    total = sum(weight for _, weight in parts) or math.nan
    names = dict.fromkeys(name for means, _ in parts for name in means)
    return {name: sum(_number(means.get(name)) * weight for means, weight in parts) / total for name in names}


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no such number


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
