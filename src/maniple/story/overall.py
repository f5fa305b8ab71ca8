"""A run as a whole, from the first step of any worker to the newest: what is compared between runs."""

from dataclasses import dataclass

import numpy as np

from maniple.record.times import PARTS
from maniple.story.story import Story


@dataclass(frozen=True)
class Overall:
    """A run in a few numbers that do not change any more once it has ended.

    Attributes:
        seconds: from the beginning of the first stretch of any worker's training to the end of the last, without the
            pauses of a run that was resumed.
        rate: samples of all workers / seconds; steps, where samples are not counted: `unit` tells.
        split: the seconds of all workers, by what they went for.
        busy_workers: how many workers were busy computing, in the mean over `seconds`.
        measures_data: of all workers that made steps, the time between them was measured.
    """

    workers: int
    seconds: float
    rate: float
    unit: str
    split: dict[str, float]
    busy_workers: float
    measures_data: bool


def look_back(story: Story) -> Overall:
    """The run of `story` as a whole."""
    totals = [one.total for one in story.standings.values()]
    samples, steps = sum(total.samples for total in totals), sum(total.step for total in totals)
    split = {part: sum(total.split[part] for total in totals) for part in PARTS}
    stretches = [lane.stretches for lane in story.lanes.values() if len(lane)]
    ends = [min(s[0, 0] for s in stretches), max(s[-1, 1] for s in stretches)] if stretches else [0.0, 0.0]
    seconds = float(np.diff(story.ran(np.array(ends)))[0])
    made = samples or steps
    rate = made / seconds if seconds > 0 else 0.0
    busy = split[PARTS[0]] / seconds if seconds > 0 else 0.0
    unit = "samples" if samples or not steps else "steps"
    measured = [one.measures_data for one in story.standings.values() if one.total.step]
    return Overall(len(totals), seconds, rate, unit, split, busy, bool(measured) and all(measured))
