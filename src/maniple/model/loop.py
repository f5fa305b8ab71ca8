"""The loop: epochs of training, validation and snapshots, the same for one worker and for many.

An epoch has `data.n_batch_train` batches, over all workers. Each worker is given the numbers of its own: by leases
where workers are free of each other, so that fast ones take more; in equal shares where they meet after each step.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from maniple.errors import InvalidArgument
from maniple.model import history
from maniple.model.contract import Model, shareable
from maniple.model.recorder import Recorder, show
from maniple.model.validation import TRAINING, Means, measured, together, validate
from maniple.place import asked_limits, find
from maniple.sampler import Sampler, Shard
from maniple.worker import Worker

_RECORD_EVERY = 40
_KEEPING_S = 600.0  # a large model takes its time to be written


class Loop:
    """Trains one model on this worker.

    Args:
        model: a model that keeps the contract.
        worker: who trains.
        snapshot_epochs: keep a snapshot after so many epochs; 0: none.
        is_shown: print how it goes.
    """

    def __init__(self, model: Model, worker: Worker, *, snapshot_epochs: int = 0, is_shown: bool = True) -> None:
        self._model, self._worker, self._is_shown = model, worker, is_shown
        place = find()
        self._run, self._has_restarted = place.run, place.restarts > 0
        self._last = _last_epoch(model)
        if asked_limits().patience and not model.data.n_batch_val:
            raise InvalidArgument(
                f"--patience {asked_limits().patience} counts validations, but {type(model).__name__} has none "
                "(data.n_batch_val is 0). Give it validation batches, or leave --patience out."
            )
        self._snapshot_epochs = snapshot_epochs
        self._optimizer = None if isinstance(model.params, Mapping) else getattr(model, "optimizer", None)
        self._replica = worker.share(shareable(model.params), self._optimizer)
        self._replica.samples = getattr(model.data, "batch_size", 1)
        self._is_together = self._replica.rule.meets != "center" and worker.world > 1
        # Where there is a controller, not by a call of the circle: a worker that comes back belongs to the circle of
        # gradients before it makes its first call, so the others would wait for it there, and it for them here.
        self._is_controlled = not self._is_together or place.segment is not None or place.address is not None
        self._looks: Sampler | Shard | None = None
        if not self._is_together:
            self._looks = worker.sampler(max(1, model.data.n_batch_val), shuffle=False, validation=True)
        shuffle = bool(getattr(model.data, "shuffle", True))
        # Learning rates follow epochs here, not steps, so that fast workers may take more.
        shares = {"static": self._is_together, "balance": not self._is_together}
        self._sampler = worker.sampler(model.data.n_batch_train, **shares, shuffle=shuffle)
        every = int(getattr(model, "record_every", _RECORD_EVERY))
        self._recorder = Recorder(worker, self._replica, every=every, is_shown=is_shown, lr=self._lr)
        self._rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Until the last epoch, or until it is time to stop."""
        epoch = self._go_on()
        try:
            while epoch < self._last and not self._worker.should_stop:
                self._model.adjust_hyperp(epoch)
                epoch += 1
                if self._train(epoch):
                    self._finish(epoch)
                elif self._looks is not None:
                    self._looks.epoch = epoch  # others have validated, or will
        finally:
            self._model.cleanup()
        self._recorder.summary()

    def _go_on(self) -> int:
        """The epochs that were made before this process began. Their learning rates are passed through again."""
        made = self._replica.rounds > 0  # by others, to whom this worker has come
        found = history.newest(self._run, before_start=self._is_together)
        epochs = max(0 if found is None else found[1].epochs, self._sampler.first_epoch)
        if self._is_together and not made and self._has_restarted:  # nobody was there to meet: they may have ended
            epochs = max(epochs, history.made(self._run))
        for epoch in range(epochs):
            self._model.adjust_hyperp(epoch)
        if found is not None:
            folder, training = found
            self._rows = training.rows
            if not made and not self._replica.continues:  # else it has come with the parameters, or is newer
                history.load_optimizer(folder, training, self._optimizer)
            if self._is_shown:
                what = "the record" if self._replica.continues else "optimizer and record"
                show(f"going on after epoch {epochs}, with {what} of {folder.name}")
        self._sampler.epoch = epochs
        if self._looks is not None:
            self._looks.epoch = epochs
        return epochs

    def _train(self, epoch: int) -> bool:
        """One epoch; True if it was made to its end, and this worker had a part in it."""
        self._recorder.begin(epoch)
        made = 0
        for count in self._counts():
            found = measured(self._model.train_iter(count, self._recorder), TRAINING, "train_iter")
            if self._optimizer is None:
                self._replica.step()
            self._recorder.batch(found)
            made += 1
            if self._worker.should_stop:
                break
        self._recorder.tell()
        is_cut = self._worker.should_stop and not self._sampler.is_finished
        return made > 0 and not is_cut

    def _counts(self) -> Iterator[int]:
        """The numbers of this worker's batches; who waits for one, waits for others."""
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
        found = self._validate(epoch)
        self._rows.append(self._recorder.finish({f"val_{name}": value for name, value in found.items()}))
        k = self._snapshot_epochs
        is_first = self._worker.rank == (self._replica.members or (0,))[0]  # worker 0 may be lost
        if k and (epoch % k == 0 or epoch == self._last) and (is_first or not self._is_together):
            self._keep(epoch)

    def _validate(self, epoch: int) -> Mapping[str, float]:
        """Look at this worker's part of the validation data; gives the means over all of it, where they are known."""
        if not self._model.data.n_batch_val:
            return {}
        begin, worker = time.perf_counter(), self._worker
        counts = self._shares() if self._looks is None else self._looks
        with self._replica.center():
            means, weight, batches = validate(self._model, self._recorder, counts)
        part = {"batches": batches, "samples": weight, "seconds": time.perf_counter() - begin}
        if batches:
            self._recorder.looked(part, means)
        whole = self._gathered(means, part, epoch) if self._is_controlled else self._met(means, weight)
        if whole:
            self._recorder.found(whole, is_told=self._is_controlled or worker.rank == 0)
        return whole

    def _shares(self) -> range:
        """The validation batches of a worker that meets the others: each batch is of one of those in the last round.

        Without a controller all workers make one call with what they have found, so who has no batch looks at one of
        the others'.
        """
        of, rank, world = self._model.data.n_batch_val, self._worker.rank, self._worker.world
        if not self._is_controlled:
            return range(rank, of, world) if rank < of else range(rank % of, rank % of + 1)
        members = tuple(range(world)) if self._replica.members is None else self._replica.members
        return range(members.index(rank), of, len(members)) if rank in members else range(0)

    def _met(self, means: Means, weight: float) -> Means:
        """The means over all workers, who meet for them; the first tells the controller."""
        is_spare = self._worker.rank >= self._model.data.n_batch_val  # another has looked at the same batch
        whole = together(self._worker, means, 0.0 if is_spare else weight)
        if self._worker.rank == 0:
            self._worker.ask("validated", loss=whole["loss"])
        return whole

    def _gathered(self, means: Means, part: Mapping[str, Any], epoch: int) -> Means:
        """The means over all workers, for who is the last to tell the controller of its part."""
        of = self._model.data.n_batch_val
        if not part["batches"]:
            return {}
        answer = self._worker.ask(
            "validated", epoch=epoch, batches=part["batches"], of=of, weight=part["samples"], means=means
        )
        whole = answer["means"] or {}
        return {name: float("nan") if value is None else value for name, value in whole.items()}

    def _keep(self, epoch: int) -> None:
        """Have the host keep the center, and put this worker's optimizer and record beside it."""
        self._replica.publish()
        name = self._worker.ask("keep", epoch=epoch, timeout_s=_KEEPING_S)["name"]
        folder = None if self._run is None or name is None else self._run / "center" / name
        if folder is not None and folder.is_dir():  # not on another machine
            history.write(folder, self._optimizer, epochs=epoch, rows=self._rows)

    def _lr(self) -> float | None:
        groups = getattr(self._optimizer, "param_groups", None)
        lr = groups[0]["lr"] if groups else getattr(self._model, "lr", None)
        return None if lr is None else float(lr)


def _last_epoch(model: Model) -> int:
    limits = asked_limits()
    epochs = getattr(model, "n_epochs", None)
    if epochs is not None:
        return min(int(epochs), limits.max_epochs or int(epochs))
    if limits.max_epochs:
        return limits.max_epochs
    if limits.max_batches or limits.total_duration:
        return 1 << 40
    raise InvalidArgument(
        f"{type(model).__name__} has no n_epochs, and no limit was given, so it would train for ever. "
        "Give the class n_epochs = 10, or the run --max-epochs 10."
    )
