"""The training loop of `maniple run --model`: epochs of training, validation and snapshots, for any number of workers.

An epoch has `data.n_batch_train` batches over all workers. Asynchronous workers take batch numbers by leases, so that
fast ones take more; synchronous workers have equal shares.

A checkpoint beside the snapshot of an epoch has the optimizer, the progress and the records:

center/epoch-0004/center-0.safetensors     the center after 4 epochs, written by the host
                  optimizer.safetensors    the optimizer of the first worker that finished them
                  training.json            its plain values, the number of epochs, and a row for each epoch
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file

from maniple.clock import clock
from maniple.environment import read_environment, read_limits
from maniple.errors import InvalidArgument
from maniple.model.contract import Model, shareable
from maniple.model.recorder import Recorder, show
from maniple.model.validation import TRAINING_METRICS, Means, all_reduce_means, metrics_of, validate
from maniple.record import Row, RunFolder, read_events
from maniple.record.folder import write_json
from maniple.sampler import Sampler, Shard
from maniple.worker import Worker

_TRAINING, _OPTIMIZER = "training.json", "optimizer.safetensors"
_RECORD_EVERY = 40  # batches between two reports: seconds, for most models
_SNAPSHOT_S = 600.0  # to write a large model to a slow disk


class Loop:
    """Trains one model on this worker.

    Args:
        model: a model that satisfies the contract.
        worker: this process's worker.
        snapshot_epochs: the number of epochs between two snapshots; 0: none.
        is_shown: print the progress.
    """

    def __init__(self, model: Model, worker: Worker, *, snapshot_epochs: int = 0, is_shown: bool = True) -> None:
        self._model, self._worker, self._is_shown = model, worker, is_shown
        environment = read_environment()
        self._run, self._has_restarted = environment.run, environment.restarts > 0
        self._last = _last_epoch(model)
        if read_limits().patience and not model.data.n_batch_val:
            raise InvalidArgument(
                f"--patience {read_limits().patience} counts validations, but {type(model).__name__} has none "
                "(data.n_batch_val is 0). Give it validation batches, or leave --patience out."
            )
        self._snapshot_epochs = snapshot_epochs
        self._optimizer = None if isinstance(model.params, Mapping) else getattr(model, "optimizer", None)
        self._replica = worker.share(shareable(model.params), self._optimizer)
        self._replica.samples = getattr(model.data, "batch_size", 1)
        self._is_synchronous = self._replica.rule.is_synchronous and worker.world > 1
        # Combine validations by the controller where there is one. An all-reduce could deadlock: a worker that returns
        # is a member of the gradients' collectives before its first call, so the others would wait for it there, and it
        # for them here.
        self._is_controlled = (
            not self._is_synchronous or environment.segment is not None or environment.address is not None
        )
        self._validation_sampler: Sampler | Shard | None = None
        if not self._is_synchronous:
            self._validation_sampler = worker.sampler(max(1, model.data.n_batch_val), shuffle=False, validation=True)
        shuffle = bool(getattr(model.data, "shuffle", True))
        # Learning rates follow epochs here, not steps, so fast workers may take more batches.
        shares = {"static": self._is_synchronous, "balance": not self._is_synchronous}
        self._sampler = worker.sampler(model.data.n_batch_train, **shares, shuffle=shuffle)
        every = int(getattr(model, "record_every", _RECORD_EVERY))
        self._recorder = Recorder(worker, self._replica, every=every, is_shown=is_shown, lr=self._lr)
        self._rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Train until the last epoch, or until the worker should stop."""
        epoch = self._restore()
        try:
            while epoch < self._last and not self._worker.should_stop:
                self._model.adjust_hyperp(epoch)
                epoch += 1
                if self._train(epoch):
                    self._finish(epoch)
                elif self._validation_sampler is not None:
                    self._validation_sampler.epoch = epoch  # other workers validate this epoch
        finally:
            self._model.cleanup()
        self._recorder.summary()

    def _restore(self) -> int:
        """Restore the newest checkpoint; returns the epochs that are finished. Their learning rates are replayed."""
        has_joined = self._replica.rounds > 0  # workers that were already training
        found = newest_checkpoint(self._run, before_start=self._is_synchronous)
        epochs = max(0 if found is None else found[1].epochs, self._sampler.first_epoch)
        if self._is_synchronous and not has_joined and self._has_restarted:  # the other workers may have finished
            epochs = max(epochs, finished_epochs(self._run))
        for epoch in range(epochs):
            self._model.adjust_hyperp(epoch)
        if found is not None:
            folder, state = found
            self._rows = state.rows
            if not has_joined and not self._replica.continues:  # otherwise it has a newer optimizer state already
                load_optimizer(folder, state, self._optimizer)
            if self._is_shown:
                what = "the records" if self._replica.continues else "optimizer and records"
                show(f"continuing after epoch {epochs}, with {what} of {folder.name}")
        self._sampler.epoch = epochs
        if self._validation_sampler is not None:
            self._validation_sampler.epoch = epochs
        return epochs

    def _train(self, epoch: int) -> bool:
        """Train one epoch; returns whether it was finished, and this worker had a batch of it."""
        self._recorder.begin(epoch)
        batches = 0
        for count in self._counts():
            metrics = metrics_of(self._model.train_iter(count, self._recorder), TRAINING_METRICS, "train_iter")
            if self._optimizer is None:
                self._replica.step()
            self._recorder.batch(metrics)
            batches += 1
            if self._worker.should_stop:
                break
        self._recorder.flush()
        is_cut_short = self._worker.should_stop and not self._sampler.is_finished
        return batches > 0 and not is_cut_short

    def _counts(self) -> Iterator[int]:
        """The numbers of this worker's batches. Waiting for one is waiting for other workers."""
        numbers = iter(self._sampler)
        while True:
            self._recorder.start()
            count = next(numbers, None)
            self._recorder.end("others")
            if count is None:
                return
            yield count

    def _finish(self, epoch: int) -> None:
        self._sampler.passed()
        means = self._validate(epoch)
        self._rows.append(self._recorder.finish({f"val_{name}": value for name, value in means.items()}))
        k = self._snapshot_epochs
        is_first = self._worker.rank == (self._replica.members or (0,))[0]  # worker 0 may be lost
        if k and (epoch % k == 0 or epoch == self._last) and (is_first or not self._is_synchronous):
            self._save(epoch)

    def _validate(self, epoch: int) -> Mapping[str, float]:
        """Evaluate this worker's part of the validation data; returns the means over all parts, {} if unknown."""
        if not self._model.data.n_batch_val:
            return {}
        begin, worker = time.perf_counter(), self._worker
        counts = self._validation_share() if self._validation_sampler is None else self._validation_sampler
        with self._replica.center():
            means, weight, batches = validate(self._model, self._recorder, counts)
        part = {"batches": batches, "samples": weight, "seconds": time.perf_counter() - begin}
        if batches:
            worker.record("validation", epoch=epoch, **part, **means)
        if self._is_controlled:
            overall = self._report_part(means, part, epoch)
        else:
            is_duplicate = worker.rank >= self._model.data.n_batch_val  # another worker has evaluated the same batch
            overall = all_reduce_means(worker, means, 0.0 if is_duplicate else weight)
            if worker.rank == 0:
                worker.ask("validated", loss=overall["loss"])
        if overall:
            self._recorder.validation(overall, is_reported=self._is_controlled or worker.rank == 0)
        return overall

    def _validation_share(self) -> range:
        """The validation batches of a synchronous worker: each batch belongs to one member of the last round.

        Without a controller all workers take part in one all-reduce, so a worker without a batch evaluates one of
        another worker.
        """
        of, rank, world = self._model.data.n_batch_val, self._worker.rank, self._worker.world
        if not self._is_controlled:
            return range(rank, of, world) if rank < of else range(rank % of, rank % of + 1)
        members = tuple(range(world)) if self._replica.members is None else self._replica.members
        return range(members.index(rank), of, len(members)) if rank in members else range(0)

    def _report_part(self, means: Means, part: Mapping[str, Any], epoch: int) -> Means:
        """Report a part to the controller; the last worker gets the means over all parts, the others {}."""
        if not part["batches"]:
            return {}
        of = self._model.data.n_batch_val
        answer = self._worker.ask(
            "validated", epoch=epoch, batches=part["batches"], of=of, weight=part["samples"], means=means
        )
        overall = answer["means"] or {}
        return {name: float("nan") if value is None else value for name, value in overall.items()}

    def _save(self, epoch: int) -> None:
        """Have the host save the center, and write a checkpoint of this worker beside it."""
        self._replica.sharing.publish()
        name = self._worker.ask("keep", epoch=epoch, timeout_s=_SNAPSHOT_S)["name"]
        folder = None if self._run is None or name is None else self._run / "center" / name
        if folder is not None and folder.is_dir():  # it is not, on another machine
            write_checkpoint(folder, self._optimizer, epochs=epoch, rows=self._rows)

    def _lr(self) -> float | None:
        groups = getattr(self._optimizer, "param_groups", None)
        lr = groups[0]["lr"] if groups else getattr(self._model, "lr", None)
        return None if lr is None else float(lr)


def _last_epoch(model: Model) -> int:
    limits = read_limits()
    epochs = getattr(model, "n_epochs", None)
    if epochs is not None:
        return min(int(epochs), limits.max_epochs or int(epochs))
    if limits.max_epochs:
        return limits.max_epochs
    if limits.max_batches or limits.total_duration:
        return 1 << 40
    raise InvalidArgument(
        f"{type(model).__name__} has no n_epochs, and no limit was given, so training would never end. "
        "Give the class n_epochs = 10, or the run --max-epochs 10."
    )


class TrainingState(msgspec.Struct):
    """The progress of training at a checkpoint."""

    epochs: int = 0  # finished
    rows: list[dict[str, Any]] = []  # one for each of them
    saved: float = 0.0
    optimizer: dict[str, Any] | None = None  # its plain values


def write_checkpoint(folder: Path, optimizer: Any, *, epochs: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write a checkpoint to the folder of a snapshot."""
    plain: dict[str, Any] | None = None
    if optimizer is not None:
        from maniple.adapters.torch_optimizer import packed

        arrays, plain = packed(optimizer)
        save_file({name: value.copy() for name, value in arrays.items()}, folder / _OPTIMIZER)
    write_json(folder / _TRAINING, TrainingState(epochs, list(rows), clock.time(), plain))


def _read_checkpoint(folder: Path) -> TrainingState | None:
    """The checkpoint of a folder; None if there is none, or it is incomplete."""
    try:
        return msgspec.json.decode((folder / _TRAINING).read_bytes(), type=TrainingState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def newest_checkpoint(run: Path | None, *, before_start: bool = False) -> tuple[Path, TrainingState] | None:
    """The newest checkpoint of a run, but none that is newer than the center that the run was restored from.

    With `before_start`, only checkpoints from before the run was last started or resumed.
    """
    if run is None:
        return None
    found = [
        (path, state) for path in (run / "center").glob("epoch-*") if (state := _read_checkpoint(path)) is not None
    ]
    rows = read_events(RunFolder(run).events("host"))
    began = _began(rows)
    since = [pair for pair in found if pair[1].saved >= began]
    earlier = [pair for pair in found if pair[1].saved < began]
    for row in rows:
        if row["event"] == "restored" and row["timestamp"] >= began:
            earlier = [(p, k) for p, k in earlier if p.name == row.get("snapshot") or k.saved <= row.get("saved", 0.0)]
    return max(earlier if before_start else since or earlier, key=lambda pair: pair[1].saved, default=None)


def finished_epochs(run: Path | None) -> int:
    """The epochs that any worker has finished since the run was last started or resumed."""
    if run is None:
        return 0
    folder = RunFolder(run)
    began = _began(read_events(folder.events("host")))
    rows = (row for rank in folder.ranks() for row in read_events(folder.events(rank)))
    epochs = (row.get("epoch", 0) for row in rows if row["event"] == "epoch" and row["timestamp"] >= began)
    return max(epochs, default=0)


def load_optimizer(folder: Path, state: TrainingState, optimizer: Any) -> None:
    """Restore the optimizer's state from a checkpoint."""
    if optimizer is not None and state.optimizer is not None:
        from maniple.adapters.torch_optimizer import unpack

        unpack(optimizer, load_arrays(folder / _OPTIMIZER), state.optimizer)


def _began(rows: Sequence[Row]) -> float:
    return max((row["timestamp"] for row in rows if row.get("event") == "start"), default=0.0)
