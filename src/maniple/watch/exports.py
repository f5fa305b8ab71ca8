"""Exports: the rows of a run for other programs, one class per program, which imports its library when it is used.

Every number that was logged, found by validation or recorded in a progress row is passed on as it stands in its row;
names of the latter are `progress/KEY`. Nothing is left out or averaged.
"""

import csv
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import clock
from maniple.connection.find_host import find_host
from maniple.errors import InvalidArgument
from maniple.monitor.row_reader import without_operations
from maniple.record import Row, RunFolder, Tails
from maniple.record.events import parse_events
from maniple.record.rows import MAX_ROW_BYTES, numbers

CENTER = "center"
_POLL_S = 0.5
_SILENT_S = 10.0  # without rows, before the host is looked for: steps may take a while
_ORDINARY = {"sampler", "epoch", "validation"}  # rows that are not events in the life of a run


@dataclass(frozen=True)
class Instant:
    """When and where values were recorded.

    Attributes:
        who: rank of a worker, or `center`.
        elapsed: seconds since the first worker's start.
        step: of the worker, since it was last started.
        samples: of the worker, as of its newest progress row; None before the first.
    """

    who: str
    timestamp: float
    elapsed: float
    step: int | None
    samples: int | None

    @property
    def name(self) -> str:
        """`worker-3`, or `center`."""
        return self.who if self.who == CENTER else f"worker-{self.who}"


class Export:
    """Receives a run, row by row. What a program has no place for is left out: the run folder has it as JSON."""

    def settings(self, settings: Mapping[str, Any]) -> None:
        """The options of the run; called once, before all else."""

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """The numbers of one row; some may be infinite or NaN."""
        raise NotImplementedError

    def event(self, row: Row) -> None:
        """An event in the life of the run: a worker joined or left, and so on."""

    def close(self) -> None:
        """Write what is left."""
        raise NotImplementedError


class Csv(Export):
    """Writes values.csv: one tidy table with a line for each number."""

    def __init__(self, run: str, place: str) -> None:
        self._run = run
        self._file = Path(place, "values.csv").open("w", newline="")
        self._lines = csv.writer(self._file)
        self._lines.writerow(("run", "worker", "timestamp", "elapsed", "step", "samples", "name", "value"))

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        key = (self._run, instant.who, instant.timestamp, instant.elapsed, instant.step, instant.samples)
        self._lines.writerows((*key, name, value) for name, value in values.items())

    def close(self) -> None:
        self._file.close()


class TensorBoard(Export):
    """Writes event files: a sub-run for each worker and for the center, at the times of the rows.

    Settings and events are texts of the sub-run `run`; the step of an event is its number in the order of reading.
    """

    def __init__(self, _: str, place: str) -> None:  # TensorBoard names runs by their folders
        self._library = import_extra("tensorboardX", extra="tensorboard", what="an export to TensorBoard")
        self._folder = Path(place)
        self._writers: dict[str, Any] = {}
        self._events = 0

    def settings(self, settings: Mapping[str, Any]) -> None:
        text = msgspec.json.format(msgspec.json.encode(settings, enc_hook=str), indent=2).decode()
        self._writer("run").add_text("settings", f"```json\n{text}\n```", 0)

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        writer = self._writer(instant.name)
        for name, value in values.items():
            writer.add_scalar(name, value, instant.step, walltime=instant.timestamp)

    def event(self, row: Row) -> None:
        text = msgspec.json.encode(row, enc_hook=str).decode()
        self._writer("run").add_text("events", text, self._events, walltime=row["timestamp"])
        self._events += 1

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            self._writers[name] = self._library.SummaryWriter(str(self._folder / name))
        return self._writers[name]


class Wandb(Export):
    """Logs `worker-0/loss`, `center/val_loss` and so on to a new run of Weights & Biases, against the worker's step.

    Its own variables apply: WANDB_MODE=offline sends nothing.
    """

    def __init__(self, run: str, place: str) -> None:
        wandb = import_extra("wandb", extra="wandb", what="an export to Weights & Biases")
        try:
            self._run = wandb.init(project="maniple", name=run, dir=place)
        except wandb.errors.Error as error:
            raise InvalidArgument(
                f"Weights & Biases could not start: {error} Run `wandb login`, or set WANDB_MODE=offline to send "
                "nothing."
            ) from None
        self._known: set[str] = set()

    def settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings))

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        who = instant.name
        if who not in self._known:
            self._known.add(who)
            self._run.define_metric(f"{who}/*", step_metric=f"{who}/step")
        metadata = {"step": instant.step, "elapsed": instant.elapsed, "timestamp": instant.timestamp}
        known = {name: value for name, value in metadata.items() if value is not None}
        self._run.log({f"{who}/{name}": value for name, value in (known | dict(values)).items()})

    def event(self, row: Row) -> None:
        self._run.log({"event": str(row["event"]), "event/timestamp": row["timestamp"], "event/row": str(row)})

    def close(self) -> None:
        self._run.finish()


class Mlflow(Export):
    """Logs `worker-0/loss`, `center/val_loss` and so on to a new run of MLflow, in a folder or at a tracking server.

    Settings are its parameters, and events the file events.json.
    """

    _BATCH = 1000  # MLflow's limit for metrics in one call
    _LONGEST = 500  # MLflow's limit for the length of a parameter

    def __init__(self, run: str, place: str) -> None:
        mlflow = import_extra("mlflow", extra="mlflow", what="an export to MLflow")
        if "://" not in place:
            place = Path(place).resolve().as_uri()
            variables = import_extra("mlflow.environment_variables", extra="mlflow", what="an export to MLflow")
            if (allow := getattr(variables, "MLFLOW_ALLOW_FILE_STORE", None)) is not None:
                allow.set(True)  # MLflow 3 refuses folders by default
        try:
            self._client = mlflow.MlflowClient(tracking_uri=place)
            known = self._client.get_experiment_by_name("maniple")
            experiment = known.experiment_id if known else self._client.create_experiment("maniple")
            self._run = self._client.create_run(experiment, run_name=run).info.run_id
        except mlflow.MlflowException as error:
            raise InvalidArgument(
                f"MLflow cannot use {place}: {error} Give another folder or address with -o."
            ) from None
        self._metric = mlflow.entities.Metric
        self._pending: list[Any] = []
        self._events: list[Row] = []

    def settings(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self._client.log_param(self._run, name, str(value)[: self._LONGEST])

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        when, step = int(instant.timestamp * 1000), instant.step or 0
        for name, value in values.items():
            self._pending.append(self._metric(f"{instant.name}/{name}", value, when, step))
        if len(self._pending) >= self._BATCH:
            self._send()

    def event(self, row: Row) -> None:
        self._events.append(row)

    def close(self) -> None:
        self._send()
        if self._events:
            self._client.log_dict(self._run, {"events": self._events}, "events.json")
        self._client.set_terminated(self._run, "FINISHED", int(clock.time() * 1000))

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._run, metrics=self._pending[: self._BATCH])
            del self._pending[: self._BATCH]


_EXPORTS: dict[str, Callable[[str, str], Export]] = {
    "csv": Csv,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}
KINDS = tuple(_EXPORTS)


def open_export(kind: str, run: str, place: str) -> Export:
    """An export of the run of that name to a folder, which must be new or empty, or to an address."""
    if "://" in place:
        if kind != "mlflow":
            raise InvalidArgument(f"{place} is an address, and {kind} needs a folder. Give a path with -o.")
        return Mlflow(run, place)
    folder = Path(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be used: {error.strerror}. Give another folder with -o.") from None
    if not is_empty:
        raise InvalidArgument(
            f"{folder} is not empty, and an export never mixes with another. Remove it, or give another folder with -o."
        )
    return _EXPORTS[kind](run, place)


def import_extra(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional library, which `what` requires."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        reason = "is not installed" if (error.name or "").partition(".")[0] == library else f"does not work: {error}"
        raise InvalidArgument(
            f"{what} is not possible: {library} {reason}. `pip install 'maniple[{extra}]'` installs it."
        ) from None


class Exporting:
    """One run and the export that it is written to."""

    def __init__(self, run: Path, export: Export) -> None:
        self._folder = RunFolder(run)
        self._export = export
        self._tails = Tails(self._folder.path / "events")
        self._samples: dict[str, int] = {}
        self._since: float | None = None
        self.rows = 0

    def settings(self) -> None:
        """Export the options of the run."""
        self._export.settings(self._folder.read().get("asked") or {})

    def advance(self) -> bool:
        """Export new rows; returns whether there were any."""
        before = self.rows
        for who, lines in self._tails.pieces():
            for row in parse_events(without_operations(lines)):
                self._export_row(who.removeprefix("worker-"), row)
        return self.rows > before

    def follow(self, sleep: Callable[[float], None] = clock.sleep) -> None:
        """Export rows until the run has ended, or its host is dead and has been silent for a while."""
        newest = clock.monotonic()
        while True:
            about = self._folder.read()  # before the rows, so that none is missed
            if self.advance():
                newest = clock.monotonic()
            is_silent = clock.monotonic() - newest > _SILENT_S and about.get("lineage")
            if about.get("exit_code") is not None or (is_silent and not find_host(self._folder.path).is_alive):
                return
            sleep(_POLL_S)

    def _export_row(self, who: str, row: Row) -> None:
        if not isinstance(row.get("timestamp"), float) or not isinstance(row.get("event"), str):
            return  # not written by maniple
        self.rows += 1
        kind = row["event"]
        if kind == "progress":
            self._samples[who] = _integer(row.get("samples")) or 0
            self._export_values(who, row, {f"progress/{name}": value for name, value in numbers(row).items()})
        elif kind == "validated" or row.get("center"):
            self._export_values(CENTER, row, numbers(row), worker=who)
        elif kind == "log":
            self._export_values(who, row, numbers(row))
        elif kind not in _ORDINARY:
            self._export.event(row)

    def _export_values(self, who: str, row: Row, values: Mapping[str, float], *, worker: str | None = None) -> None:
        if not values:
            return
        if self._since is None:
            self._since = start_time(self._folder) or row["timestamp"]
        elapsed = row["timestamp"] - self._since
        samples = self._samples.get(worker or who)
        self._export.values(Instant(who, row["timestamp"], elapsed, _integer(row.get("step")), samples), values)


def _integer(value: Any) -> int | None:
    """A count that other programs can store; None for anything else that a script has logged under that name."""
    return value if type(value) is int and abs(value) < 1 << 63 else None


def start_time(folder: RunFolder) -> float | None:
    """When the first worker started: the earliest of their first rows."""
    firsts: list[float] = []
    for rank in folder.ranks():
        with folder.events(rank).open("rb") as file:
            firsts += [row["timestamp"] for row in parse_events([file.readline(MAX_ROW_BYTES)])]
    return min(firsts, default=None)
