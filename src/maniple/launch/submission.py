"""The submission of a run to Slurm: what was asked, and the ids of its jobs, kept in the run folder."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from maniple.errors import InvalidArgument
from maniple.launch.job import Job
from maniple.launch.slurm import Order, cancel, host_text, submit, workers_text
from maniple.record.folder import SUBMITTED, write_json

WORKERS, HOST = "workers", "host"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Submission:
    """One run in a queue."""

    job: Job
    order: Order
    has_host_job: bool = False
    jobs: dict[str, str] = field(default_factory=dict[str, str])  # their ids

    @classmethod
    def read(cls, run: Path) -> "Submission":
        """That of a run folder."""
        path = run / SUBMITTED
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=_read)
        except OSError as error:
            raise InvalidArgument(
                f"{run} was not submitted to a queue: {path.name} cannot be read ({error.strerror}). Give the folder "
                "of a run that `maniple submit` has begun; others end by Ctrl-C."
            ) from None
        except msgspec.MsgspecError as error:
            raise InvalidArgument(
                f"{path} is not of this version of maniple: {error}. Use the one that wrote it."
            ) from None

    def write(self) -> "Submission":
        """Keep it in the run folder."""
        write_json(self.order.run / SUBMITTED, msgspec.to_builtins(self, enc_hook=str))
        return self

    def texts(self) -> dict[str, str]:
        """The scripts of all jobs, by the names of their files."""
        names = {f"{HOST}.sbatch": host_text(self.order)} if self.has_host_job else {}
        return names | {f"{WORKERS}.sbatch": workers_text(self.order)}

    def submit_host(self) -> "Submission":
        """Submit the host's job."""
        return self._submitted(HOST, host_text(self.order))

    def submit_workers(self) -> "Submission":
        """Submit the workers' jobs: they wait for that of the host."""
        return self._submitted(WORKERS, workers_text(self.order, after=self.jobs.get(HOST)))

    def _submitted(self, kind: str, text: str) -> "Submission":
        path = self.order.run / f"{kind}.sbatch"
        path.write_text(text, encoding="utf-8")
        with _undisturbed():
            submitted = replace(self, jobs=self.jobs | {kind: (job := submit(path))})
            try:
                return submitted.write()
            except BaseException:  # a full disk, say: nobody would know of the job
                cancel([job])
                raise


@contextmanager
def _undisturbed() -> Generator[None]:
    """Signals wait, so that of a job that is in the queue the id is written down."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in noted[:1]:
            signal.raise_signal(number)


def _read(kind: type, value: Any) -> Any:
    return kind(value)
