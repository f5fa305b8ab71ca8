"""Measures: one declaration for each number that is shown of a worker or of a whole run.

The tables at the end of this file are the only list of measures. From them derive the reader of progress rows
(`row_reader`), the values and series of a worker (`worker_state`), the terminal's columns and `--json`, the page's
worker table, totals and charts (sent to it as JSON), the rows of `maniple compare` and the metrics for Prometheus.

To add a measure, add an entry here and let `replica/progress.py` record its key. `maniple export` needs no entry: it
writes each number of a progress row as `progress/KEY`.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from maniple.record.rows import Amount, Count

if TYPE_CHECKING:
    from maniple.monitor.worker_state import WorkerState

NOTHING = "–"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


# How values are written. The page has a function of the same name for each (watch/page/format.js).
FORMATS: dict[str, Callable[[Any], str]] = {
    "count": "{:,.0f}".format,
    "short": "{:,.0f}".format,  # the page shortens it: 3.43M
    "number": "{:.4g}".format,
    "tenths": "{:.1f}".format,
    "hundredths": "{:.2f}".format,
    "percent": "{:.1%}".format,
    "seconds": "{:,.1f} s".format,
    "bytes": _size,
}


@dataclass(frozen=True)
class Latest:
    """The value of `key` in the newest progress row. With a negative `default`, negative values mean "not measured"."""

    key: str
    type: Any = Amount
    default: float = 0.0


@dataclass(frozen=True)
class Rate:
    """The increase of `key` per second between two progress rows.

    Args:
        from_zero: the counter starts with the worker; else its first value counts as its start.
    """

    key: str
    type: Any = Amount
    default: float = 0.0
    from_zero: bool = True


@dataclass(frozen=True)
class Logged:
    """The newest value that the script has logged under `key`."""

    key: str


@dataclass(frozen=True)
class Measure:
    """A number of one worker.

    Attributes:
        name: its key in JSON and in the series of a run.
        source: where it comes from: a key of the rows, or a function of the worker's state.
        format: how it is written, by its name in FORMATS.
        help: what it is, for Prometheus and for tooltips.
        column: header in the terminal's table; "" to leave it out there.
        cell: header in the page's table of workers; "" to leave it out there.
        chart: title and subtitle of its chart on the page; none if empty.
        unit: written behind the value.
        counted: "samples" or "steps": shown only in runs that count samples, or only in the others.
        is_counter: it never falls, except after a restart: a counter for Prometheus.
        is_optional: its chart appears only once a worker has recorded it.
    """

    name: str
    source: "Latest | Rate | Logged | Callable[[WorkerState], Any]"
    format: str
    help: str
    _: KW_ONLY
    column: str = ""
    cell: str = ""
    chart: tuple[str, str] | tuple[()] = ()
    unit: str = ""
    counted: str = ""
    is_counter: bool = False
    is_optional: bool = False

    def of(self, worker: "WorkerState") -> Any:
        """Its value for `worker`; None if unknown."""
        return self.source(worker) if callable(self.source) else worker.values[self.name]

    def text(self, value: Any) -> str:
        """`value` for a person."""
        return format_value(self.format, value) + (f" {self.unit}" if self.unit else "")


@dataclass(frozen=True)
class RunMeasure:
    """A number of a whole run; `name` is a field of `Totals`.

    Attributes:
        label: what it is called on the page and by `maniple compare`.
        phrase: how the terminal's last line says it, formatted with the value and the Totals; "" to leave it out. A
            value that is unknown is left out there.
        beside: name of the total that the page shows behind it, as in "3 of 4".
        is_shown: the page has a field for it.
        is_optional: the page shows its field only once the value is known.
        is_compared: `maniple compare` has a row for it.
    """

    name: str
    label: str
    format: str
    help: str
    _: KW_ONLY
    phrase: str = ""
    beside: str = ""
    counted: str = ""
    is_shown: bool = True
    is_optional: bool = False
    is_compared: bool = False


def format_value(name: str, value: Any) -> str:
    """`value` in the format `name`; a dash if it is unknown."""
    return NOTHING if value is None else FORMATS[name](value)


def initial_values() -> dict[str, Any]:
    """The values of a worker that has not written a row yet."""
    values: dict[str, Any] = {}
    for measure in MEASURES:
        if not callable(source := measure.source):
            is_unknown = isinstance(source, Logged) or source.default < 0
            values[measure.name] = None if is_unknown else 0.0
    return values


MEASURES = (
    Measure(
        "step",
        lambda worker: worker.now.step,
        "count",
        "Steps since the worker was last started.",
        column="step",
        cell="step",
    ),
    Measure(
        "samples",
        lambda worker: worker.total.samples,
        "count",
        "Samples, including those before a restart.",
        is_counter=True,
    ),
    Measure(
        "samples_per_s",
        Rate("samples"),
        "short",
        "Samples per second, now.",
        column="speed",
        cell="samples/s",
        chart=("Samples/s", "of each worker"),
        unit="samples/s",
        counted="samples",
    ),
    Measure(
        "steps_per_s",
        Rate("step"),
        "short",
        "Steps per second, now.",
        column="speed",
        cell="steps/s",
        unit="steps/s",
        counted="steps",
    ),
    Measure("loss", Logged("loss"), "number", "The loss logged last.", column="loss", cell="loss"),
    Measure(
        "sync_share",
        Latest("sync_share"),
        "percent",
        "Share of the worker's time spent in exchanges.",
        column="sync",
        cell="sync",
        chart=("Sync share", "time spent in exchanges"),
    ),
    Measure(
        "staleness",
        Latest("staleness", default=-1.0),
        "tenths",
        "Exchanges that others made since the worker's own last one.",
        column="staleness",
        cell="stale",
        chart=("Staleness", "exchanges of others missed"),
    ),
    Measure(
        "hidden_share",
        Rate("hidden"),
        "percent",
        "Share of the time in which an exchange ran in the background, hidden behind training, now.",
        chart=("Hidden exchanges", "time with an exchange in the background"),
        is_optional=True,
    ),
    Measure(
        "bytes_per_s",
        Rate("bytes"),
        "bytes",
        "Bytes exchanged per second, now.",
        chart=("Bytes/s", "in both directions"),
    ),
    Measure(
        "cores",
        Rate("cpu", from_zero=False),
        "hundredths",
        "Cores that the process keeps busy.",
        cell="cores",
        chart=("Cores", "kept busy"),
    ),
    Measure(
        "memory_bytes",
        Latest("memory", Count, 0),
        "bytes",
        "Resident memory of the process.",
        cell="memory",
        chart=("Memory", "of the process"),
    ),
    Measure(
        "gpu_memory_bytes",
        Latest("gpu_memory", Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)], -1),
        "bytes",
        "GPU memory of the process.",
        chart=("GPU memory", "of the process"),
        is_optional=True,
    ),
    Measure("exchanges", lambda worker: worker.total.exchanges, "count", "Exchanges with the center.", is_counter=True),
    Measure(
        "rounds", lambda worker: worker.total.rounds, "count", "Synchronous rounds with all workers.", is_counter=True
    ),
    Measure("bytes", lambda worker: worker.total.bytes, "bytes", "Bytes of exchanges and rounds.", is_counter=True),
)

RUN_MEASURES = (
    RunMeasure("samples_per_s", "samples/s", "short", "Samples per second of all workers, now.", counted="samples"),
    RunMeasure("steps_per_s", "steps/s", "short", "Steps per second of all workers, now.", counted="steps"),
    RunMeasure(
        "speedup",
        "speed-up",
        "hundredths",
        "Measured: samples per second since the first step, divided by those of the baseline run with one worker.",
        phrase="speed-up {0:.2f} over one worker",
        is_optional=True,
    ),
    RunMeasure(
        "target_s",
        "time to target",
        "seconds",
        "Training time, from the first step of any worker, until the target was reached.",
        is_optional=True,
    ),
    RunMeasure(
        "target_speedup",
        "speed-up to target",
        "hundredths",
        "Measured: the baseline's time to the target, divided by this run's.",
        is_optional=True,
    ),
    RunMeasure(
        "busy_workers",
        "busy workers",
        "hundredths",
        "Mean number of workers that compute. Not a speed-up over one worker.",
        phrase="busy {0:.2f} of {1.workers} workers",
        beside="workers",
        is_compared=True,
    ),
    RunMeasure(
        "goodput",
        "goodput",
        "percent",
        "Share of all workers' time since the first step that was spent on training itself.",
        phrase="goodput {0:.0%}",
        is_compared=True,
    ),
    RunMeasure(
        "sync_share",
        "sync share",
        "percent",
        "Share of all workers' time spent in exchanges and waiting for others.",
        is_compared=True,
    ),
    RunMeasure(
        "staleness",
        "staleness",
        "tenths",
        "Exchanges that others made since a worker's own last one: the mean over all exchanges.",
        is_shown=False,
        is_compared=True,
    ),
    RunMeasure("workers", "workers", "count", "Workers that belong to the run.", is_shown=False),
    RunMeasure("live", "workers", "count", "Workers that train now.", beside="workers"),
    RunMeasure(
        "version",
        "center version",
        "count",
        "Exchanges or rounds that have changed the center.",
        phrase="center version {0:,}",
    ),
    RunMeasure("samples", "samples", "short", "Samples of all workers.", counted="samples"),
    RunMeasure("steps", "steps", "short", "Steps of all workers.", counted="steps"),
    RunMeasure("bytes", "exchanged", "bytes", "Bytes exchanged, in both directions."),
)
