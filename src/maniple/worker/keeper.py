"""The keeper: what worker 0 of an MPI job does for the run folder, since there is no host: it says what was asked and
how it ended, and saves the center, also when another worker has failed."""

import platform
import secrets
import sys
import threading
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maniple.center.job import BATCHES, FAILED, LEFT, SAMPLES, STATE, Job
from maniple.center.mpi import Mpi
from maniple.center.snapshot import prune, write_centers
from maniple.center.spread import Spread
from maniple.errors import ManipleError
from maniple.place import Place
from maniple.place.center import asked_kept
from maniple.record import Events, Folder
from maniple.record.folder import fresh_name
from maniple.record.versions import versions

_LOOK_S = 1.0


class Keeper:
    """The run folder of an MPI job, and a thread that saves the center."""

    def __init__(self, job: Job, place: Place) -> None:
        kept, script = asked_kept(), Path(sys.argv[0] or "mpi")
        self.folder = Folder.create(kept.runs, kept.name or fresh_name(kept.runs, script))
        self._job, self._every_s, self._most = job, kept.snapshot_every_s, kept.keep
        self._lineage = secrets.token_hex(8)
        asked = _asked(place, script)
        self.folder.describe(
            asked=asked, lineage=self._lineage, started=time.time(), versions=versions(), node=platform.node()
        )
        self._events = Events(self.folder.events("host"))
        self._events.write("start", lineage=self._lineage, **asked)
        self._centers: list[Mpi] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maniple-keeper", daemon=True)
        self._thread.start()

    def add(self, spread: Spread) -> None:
        """One more center to save."""
        self._centers.append(Mpi(spread, rank=0))

    def close(self) -> None:
        """All have left: save the center, and write down how the run ended."""
        self._end.set()
        self._thread.join()
        rows = self._job.rows()
        exit_code = int((rows[:, STATE] != LEFT).any())
        try:
            self._save()
        finally:
            made = {"batches": int(rows[:, BATCHES].sum()), "samples": int(rows[:, SAMPLES].sum())}
            self._events.write("end", exit_code=exit_code, **made)
            self._events.close()
            self.folder.describe(ended=time.time(), exit_code=exit_code, **made)

    def _run(self) -> None:
        saved, failed = time.monotonic(), 0
        while not self._end.wait(_LOOK_S):
            fallen = int((self._job.rows()[:, STATE] >= FAILED).sum())
            is_due = self._every_s and time.monotonic() - saved > self._every_s
            if is_due or fallen > failed:  # the launcher may end the job at any moment now
                saved, failed = time.monotonic(), fallen
                self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save()
        except (OSError, ManipleError) as error:  # a full disk, or a worker that does not give a lock back
            self._events.write("unsaved", error=str(error))
            warnings.warn(f"the center could not be saved: {error}. Training goes on; free some disk.", stacklevel=2)

    def _save(self) -> None:
        begin = time.perf_counter()
        path = write_centers(self._centers, self.folder.center, lineage=self._lineage, restored=0, versions=versions())
        if path is not None:
            prune(self.folder.center, self._most)
            self._events.write("snapshot", name=path.name, duration=time.perf_counter() - begin)


def _asked(place: Place, script: Path) -> dict[str, Any]:
    """What was asked for, to be written down."""
    return {
        "script": str(script.resolve()),
        "args": sys.argv[1:],
        "workers": place.world,
        "launcher": place.launcher,
        "center": place.center,
        "rule": place.rule,
        "pace": place.pace,
        "seed": place.seed,
        "circle": place.circle,
        "deterministic": place.deterministic,
        **asdict(place.limits),
    }
