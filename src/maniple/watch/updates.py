"""Updates for one viewer of the page: everything at first, then only what is new.

Small values are sent whole when they have changed. Series and time splits only grow at their end while their generation
stays, so that only new points are sent. Arrays travel as float32 in base64: a third of the size of decimal digits, and
nothing to parse. Times are in seconds since the first step of any worker (`since`); before it, since the first join.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from maniple.monitor import RunState, WorkerState
from maniple.monitor.measures import MEASURES, RUN_MEASURES
from maniple.monitor.worker_state import BAD, GONE
from maniple.record.times import UNMEASURED, WORDS

# Fields of a worker, in the order in which they are sent.
_STATE_FIELDS = ("state", "lives", "node", "rule", "pace", "measures_data", "state_text")
COLUMNS = (*_STATE_FIELDS, *(measure.name for measure in MEASURES))
# What the page has to know to show them: it has no list of its own.
SCHEMA: dict[str, Any] = {
    "columns": COLUMNS,
    "measures": [
        {key: getattr(one, key) for key in ("name", "format", "help", "cell", "chart", "counted", "is_optional")}
        for one in MEASURES
    ],
    "totals": [
        {key: getattr(one, key) for key in ("name", "format", "help", "label", "beside", "counted", "is_optional")}
        for one in RUN_MEASURES
        if one.is_shown
    ],
    "parts": WORDS,
    "unmeasured": UNMEASURED,
    "bad_states": sorted(BAD),
    "gone_states": sorted(GONE),
}
_CLOCK_POINTS = 500  # of the curve that converts times to samples; more than a chart has ticks and pixels for
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Updates:
    """What one viewer has been sent."""

    def __init__(self) -> None:
        self._restart(-1.0)

    def _restart(self, since: float) -> None:
        self._since = since
        self._sent: dict[str, bytes] = {}
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}  # generation and number of points
        self._events = 0

    def next(self, state: RunState, extra: Mapping[str, Any]) -> bytes:
        """What is new, as JSON; `extra` are more small values."""
        update: dict[str, Any] = {}
        if (since := _since(state)) != self._since:  # all times are relative to it
            self._restart(since)
            update = {"since": since}
        small = {**extra, **_small_values(state), "clock": self._clock(state)}
        for name, value in small.items():
            if (encoded := _encode(value)) != self._sent.get(name):
                self._sent[name] = encoded
                update[name] = msgspec.Raw(encoded)
        grown: dict[str, Any] = {
            "curves": self._series(state),
            "time_splits": self._time_splits(state),
            "happened": self._new_events(state),
        }
        return _encode(update | {name: value for name, value in grown.items() if value})

    def _clock(self, state: RunState) -> list[str]:
        """Times, and the samples of all workers by then."""
        if not state.samples_seen:
            return ["", ""]
        moments = np.linspace(self._since, state.until, _CLOCK_POINTS)
        return [packed(moments - self._since), packed(state.samples_at(moments))]

    def _series(self, state: RunState) -> list[list[Any]]:
        """For each series with new points: its kind, name and rank, the index of the first new point, times, values."""
        all_series = [
            (kind, name, rank, series)
            for kind, by_name in (("logged", state.logged), ("measured", state.measured))
            for name, ranks in by_name.named.items()
            for rank, series in ranks.items()
        ]
        new: list[list[Any]] = []
        for kind, name, rank, series in [*all_series, ("live", "live", 0, state.live)]:
            first = self._first_new((kind, name, rank), series.generation, len(series))
            if first < len(series):
                xs, ys = np.array(series.xs[first:]), np.array(series.ys[first:])
                new.append([kind, name, rank, first, packed(xs - self._since), packed(ys)])
        return new

    def _time_splits(self, state: RunState) -> list[list[Any]]:
        new: list[list[Any]] = []
        for rank, split in state.time_splits.items():
            first = self._first_new(("time split", rank), split.generation, len(split))
            if first < len(split):
                intervals = split.intervals[first:].copy()
                intervals[:, :2] -= self._since
                new.append([rank, first, packed(intervals)])
        return new

    def _first_new(self, key: tuple[Any, ...], generation: int, count: int) -> int:
        """The index of the first point that the viewer does not have; it will have all of them after this update."""
        known_generation, known = self._known.get(key, (-1, 0))
        self._known[key] = (generation, count)
        return known if known_generation == generation else 0

    def _new_events(self, state: RunState) -> list[Any]:
        count, self._events = state.event_count - self._events, state.event_count
        return list(state.happened)[-count:] if count else []


def _since(state: RunState) -> float:
    """Time 0 of the page: training time counts from the first step."""
    return state.first_step or state.since


def packed(values: np.ndarray) -> str:
    """An array for the wire."""
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        return b64encode(np.ascontiguousarray(values, np.float32).tobytes()).decode()


def _small_values(state: RunState) -> dict[str, Any]:
    when, reason = state.stop
    totals = asdict(state.totals())
    reached = state.target_search.reached if state.target_search else None
    return {
        "totals": totals,
        "workers": [[rank, *_columns(worker)] for rank, worker in sorted(state.workers.items())],
        "states": {rank: _history(state, worker) for rank, worker in state.workers.items()},
        "ages": sorted(state.ages.items()),
        "together": sorted(state.together.items()),
        "non_finite": state.logged.non_finite,
        "run": {
            "until": state.until - _since(state) if _since(state) else 0.0,
            "target_at": None if reached is None else reached - _since(state),
            "epoch_size": state.epoch_size,
            "stop": reason if when else "",
            "exit_code": state.host_exit_code,
        },
    }


def _columns(worker: WorkerState) -> list[Any]:
    return [getattr(worker, field) for field in _STATE_FIELDS] + [measure.of(worker) for measure in MEASURES]


def _history(state: RunState, worker: WorkerState) -> list[tuple[float, str]]:
    since = _since(state)
    return [(round(when - since, 3) if since else 0.0, name) for when, name in worker.states]
