"""MLflow: one run of theirs for one of ours, in a folder or at a tracking server."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.record import Row
from maniple.watch.exports import Export, Instant
from maniple.watch.extras import need

_BATCH = 1000  # numbers that MLflow takes in one call
_LONGEST = 500  # letters of a setting that it keeps


class Mlflow:
    """Logs `worker-0/loss`, `center/val_loss` and so on; settings as parameters, events as the file events.json."""

    def __init__(self, client: Any, entities: Any, run: Any) -> None:
        self._client, self._entities, self._run = client, entities, run.info.run_id
        self._waiting: list[Any] = []
        self._events: list[Row] = []

    def settings(self, settings: Mapping[str, Any]) -> None:
        """As parameters, which are words here."""
        for name, value in settings.items():
            self._client.log_param(self._run, name, str(value)[:_LONGEST])

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """A metric for each, at the row's step and time to the millisecond."""
        when, step = int(instant.timestamp * 1000), instant.step or 0
        for name, value in values.items():
            self._waiting.append(self._entities.Metric(f"{instant.name}/{name}", value, when, step))
        if len(self._waiting) >= _BATCH:
            self._send()

    def event(self, row: Row) -> None:
        """Kept for the end."""
        self._events.append(row)

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._send()
        if self._events:
            self._client.log_dict(self._run, {"events": self._events}, "events.json")
        self._client.set_terminated(self._run, "FINISHED", int(time.time() * 1000))

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]


def open_export(run: str, place: str) -> Export:
    """A new run of the experiment `maniple`, in the folder or at the address `place`."""
    mlflow = need("mlflow", extra="mlflow", what="an export to MLflow")
    if "://" not in place:
        _allow_folders()
        place = Path(place).resolve().as_uri()
    try:
        client = mlflow.MlflowClient(tracking_uri=place)
        known = client.get_experiment_by_name("maniple")
        experiment = known.experiment_id if known else client.create_experiment("maniple")
        return Mlflow(client, mlflow.entities, client.create_run(experiment, run_name=run))
    except mlflow.MlflowException as error:
        raise InvalidArgument(f"MLflow cannot use {place}: {error} Give another place with -o.") from None


def _allow_folders() -> None:
    """MLflow 3 refuses its folders unless it is told that they are wanted."""
    variables = need("mlflow.environment_variables", extra="mlflow", what="an export to MLflow")
    if (allow := getattr(variables, "MLFLOW_ALLOW_FILE_STORE", None)) is not None:
        allow.set(True)
