"""Weights & Biases: one run of theirs for one of ours, by its own settings: WANDB_MODE=offline sends nothing."""

from collections.abc import Mapping
from typing import Any

from maniple.errors import InvalidArgument
from maniple.record import Row
from maniple.watch.exports import Export, Instant
from maniple.watch.extras import need


class Wandb:
    """Logs `worker-0/loss`, `center/val_loss` and so on, each against the worker's own step."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: set[str] = set()

    def settings(self, settings: Mapping[str, Any]) -> None:
        """As the run's config."""
        self._run.config.update(dict(settings))

    def values(self, instant: Instant, values: Mapping[str, float]) -> None:
        """One entry of the history for each row."""
        who = instant.name
        if who not in self._known:
            self._known.add(who)
            self._run.define_metric(f"{who}/*", step_metric=f"{who}/step")
        about = {"step": instant.step, "elapsed": instant.elapsed, "timestamp": instant.timestamp}
        known = {name: value for name, value in about.items() if value is not None}
        self._run.log({f"{who}/{name}": value for name, value in (known | dict(values)).items()})

    def event(self, row: Row) -> None:
        """One entry, with the words of the row."""
        self._run.log({"event": str(row["event"]), "event/timestamp": row["timestamp"], "event/row": str(row)})

    def close(self) -> None:
        """Write, and send unless it is offline."""
        self._run.finish()


def open_export(run: str, place: str) -> Export:
    """A new run whose files are in the folder `place`."""
    module = need("wandb", extra="wandb", what="an export to Weights & Biases")
    try:
        return Wandb(module.init(project="maniple", name=run, dir=place))
    except module.errors.Error as error:
        raise InvalidArgument(
            f"Weights & Biases did not begin: {error} `wandb login`, or set WANDB_MODE=offline to send nothing."
        ) from None
