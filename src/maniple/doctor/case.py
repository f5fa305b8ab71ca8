"""The case: what is to be looked at, and what several checks need to know of it, found out once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from maniple.launch.room import Room

T = TypeVar("T")
WAIT_S = 5.0


@dataclass(frozen=True)
class Slurm:
    """What is to be asked of Slurm for each worker."""

    partition: str | None = None
    cpus: int = 1
    gpus: int = 0
    memory: str | None = None  # 4G, as Slurm reads it
    walltime: str | None = None


@dataclass(frozen=True)
class Case:
    """What a person has, or is about to do."""

    workers: int = 1
    devices: tuple[str, ...] = ()
    model_mb: float = 0.0  # 0: not known
    host: str | None = None  # HOST:PORT, or a run folder
    token_file: Path | None = None
    certificate: Path | None = None
    hosts: tuple[str, ...] = ()
    script: Path | None = None
    slurm: Slurm | None = None
    ray: Room | None = None
    runs: Path = Path("runs")
    wait_s: float = WAIT_S
    _known: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)
    _locks: dict[str, threading.Lock] = field(default_factory=dict[str, threading.Lock], compare=False)

    @property
    def run(self) -> Path | None:
        """The run folder, if one was given."""
        return Path(self.host) if self.host is not None and Path(self.host).is_dir() else None

    def once(self, name: str, find: Callable[["Case"], T]) -> T:
        """What `find` gives; the checks that need it wait for it, and for nothing else, and share it."""
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._known:
                self._known[name] = find(self)
            return self._known[name]
