"""What the workers of a run achieve together."""

from collections.abc import Collection
from dataclasses import dataclass

from maniple.record.times import PARTS
from maniple.story.standing import Standing


@dataclass(frozen=True)
class Totals:
    """A run in a few numbers.

    Attributes:
        samples_per_s, steps_per_s: of all workers that are there, now; when none is there any more, of each worker's
            whole time.
        busy_workers: how many workers are busy computing, in the mean: the sum of the shares of their time that they
            compute. It is no speed-up: workers on few cores are all busy, and slow. `maniple compare` with a run of
            one worker measures that.
        goodput: the part of all workers' time since the first began, also of those who are dead or away, that was
            spent for training itself.
        version: how many exchanges or rounds have changed the center; those that a snapshot has, too.
    """

    workers: int = 0
    live: int = 0
    steps: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    busy_workers: float = 0.0
    goodput: float = 0.0
    sync_share: float = 0.0
    bytes: int = 0
    version: int = 0


def add_up(standings: Collection[Standing], *, elapsed_s: float, version: int) -> Totals:
    """The totals of a run that has been going on for `elapsed_s`, and whose center has `version`."""
    totals = [one.total for one in standings]
    split = {part: sum(total.split[part] for total in totals) for part in PARTS}
    steps, samples = sum(total.step for total in totals), sum(total.samples for total in totals)
    spent = sum(split.values())
    live = [one for one in standings if not one.is_gone]
    rates = [(one.samples_per_s, one.steps_per_s) for one in live] or [one.mean_rates for one in standings]
    samples_per_s, steps_per_s = (sum(rate) for rate in zip(*rates, strict=True)) if rates else (0.0, 0.0)
    return Totals(
        workers=len(standings),
        live=sum(one.state == "training" for one in standings),
        steps=steps,
        samples=samples,
        elapsed_s=elapsed_s,
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        busy_workers=sum(one.compute_share for one in live)
        if live
        else sum(one.mean_compute_share for one in standings),
        goodput=min(1.0, split["compute"] / (elapsed_s * len(standings))) if elapsed_s and standings else 0.0,
        sync_share=(split["exchange"] + split["others"]) / spent if spent else 0.0,
        bytes=sum(total.bytes for total in totals),
        version=version,
    )
