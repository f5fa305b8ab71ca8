"""News: what has become known of a run since a viewer was told last. First everything, then only what is new.

Small things are sent whole when they are not as they were. Curves and lanes only grow at their end as long as their
epoch stays, so that their new points are sent. Numbers by the thousand travel as float32 in base64: a third of the
size of digits, and no work to read. Times are in seconds since the first worker began (`since`).
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from maniple.story import Series, Standing, Story
from maniple.story.clock import samples_at

_MOST_MOMENTS = 500  # of the clock by which times become samples
_encode = msgspec.json.Encoder(enc_hook=str).encode


class News:
    """What one viewer knows."""

    def __init__(self) -> None:
        self._begin(-1.0)

    def _begin(self, since: float) -> None:
        self._since = since
        self._said: dict[str, bytes] = {}
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}  # epoch and number of points
        self._events = 0

    def tell(self, story: Story, about: Mapping[str, Any]) -> bytes:
        """What is new, as JSON; `about` are more small things."""
        news: dict[str, Any] = {}
        if story.since != self._since:  # all times are seen from another moment
            self._begin(story.since)
            news = {"since": story.since}
        small = {**about, **_small(story), "clock": self._clock(story)}
        for name, value in small.items():
            if (said := _encode(value)) != self._said.get(name):
                self._said[name] = said
                news[name] = msgspec.Raw(said)
        grown: dict[str, Any] = {
            "curves": self._curves(story),
            "lanes": self._lanes(story),
            "happened": self._new(story),
        }
        return _encode(news | {name: value for name, value in grown.items() if value})

    def _clock(self, story: Story) -> list[str]:
        """Moments, and the samples that all workers together had seen by then."""
        if not story.seen:
            return ["", ""]
        moments = np.linspace(story.since, story.until, _MOST_MOMENTS)
        return [packed(moments - self._since), packed(samples_at(moments, story.seen.values()))]

    def _curves(self, story: Story) -> list[list[Any]]:
        """For each curve with new points: where it belongs, the number of the first of them, times, values."""
        named = [
            (kind, name, rank, series)
            for kind, curves in (("logged", story.logged), ("measured", story.measured))
            for name, ranks in curves.named.items()
            for rank, series in ranks.items()
        ]
        new: list[list[Any]] = []
        for kind, name, rank, series in [*named, ("live", "live", 0, story.live)]:
            first = self._first((kind, name, rank), series.epoch, len(series))
            if first < len(series):
                new.append([kind, name, rank, first, *self._points(series, first)])
        return new

    def _points(self, series: Series, first: int) -> tuple[str, str]:
        return packed(np.array(series.xs[first:]) - self._since), packed(np.array(series.ys[first:]))

    def _lanes(self, story: Story) -> list[list[Any]]:
        new: list[list[Any]] = []
        for rank, lane in story.lanes.items():
            first = self._first(("lane", rank), lane.epoch, len(lane))
            if first < len(lane):
                stretches = lane.stretches[first:].copy()
                stretches[:, :2] -= self._since
                new.append([rank, first, packed(stretches)])
        return new

    def _first(self, key: tuple[Any, ...], epoch: int, count: int) -> int:
        """The first point that the viewer does not know; it is to know all of them now."""
        known_epoch, known = self._known.get(key, (-1, 0))
        self._known[key] = (epoch, count)
        return known if known_epoch == epoch else 0

    def _new(self, story: Story) -> list[Any]:
        """The newest events, as far as they are not forgotten."""
        count, self._events = story.events - self._events, story.events
        return list(story.happened)[-count:] if count else []


def packed(values: np.ndarray) -> str:
    """Numbers for the wire."""
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
        return b64encode(np.ascontiguousarray(values, np.float32).tobytes()).decode()


def _small(story: Story) -> dict[str, Any]:
    when, reason = story.stop
    return {
        "totals": asdict(story.totals()),
        "workers": [[rank, *_columns(one)] for rank, one in sorted(story.standings.items())],
        "states": {rank: _since(story, one) for rank, one in story.standings.items()},
        "ages": sorted(story.ages.items()),
        "together": sorted(story.together.items()),
        "broken": story.logged.broken,
        "run": {
            "until": story.until - story.since if story.since else 0.0,
            "epoch_size": story.epoch_size,
            "stop": reason if when else "",
            "exit_code": story.host_exit_code,
        },
    }


# In the order in which a viewer is told of them.
COLUMNS = (
    "state", "lives", "node", "step", "samples", "steps_per_s", "samples_per_s", "loss", "sync_share", "staleness",
    "cores", "memory_bytes", "bytes_per_s", "exchanges", "rounds", "bytes", "rule", "pace",
    "measures_data", "shown",
)  # fmt: skip


def _columns(one: Standing) -> list[Any]:
    total = one.total
    made = {"step": one.now.step, "samples": total.samples, "exchanges": total.exchanges, "rounds": total.rounds}
    return [made[name] if name in made else total.bytes if name == "bytes" else getattr(one, name) for name in COLUMNS]


def _since(story: Story, one: Standing) -> list[tuple[float, str]]:
    return [(round(when - story.since, 3) if story.since else 0.0, state) for when, state in one.states]
