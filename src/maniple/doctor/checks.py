"""Checks: what to check (a case), what was found, and how checks run, all at the same time.

A check is a function from a case to findings, declared by the `Checks` of its file. docs/doctor.md explains each by
its name.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from maniple.clock import Deadline
from maniple.errors import ManipleError
from maniple.job import RayResources

T = TypeVar("T")
OK, WARNING, GRAVE = "ok", "warning", "grave"
WAIT_S = 5.0
_MAX_WAITS = 12  # waits of --timeout, one after the other, in one check
_IMPORT_S = 60.0
_GLANCE_S = 1.0  # usually a few milliseconds; a name server that is away takes longer
_JOIN_S = 0.1


@dataclass(frozen=True)
class SlurmCase:
    """Resources to request from Slurm for each worker."""

    partition: str | None = None
    cpus: int = 1
    gpus: int = 0
    memory: str | None = None  # in Slurm's notation: 4G
    walltime: str | None = None


@dataclass(frozen=True)
class Case:
    """What a person has or is about to run."""

    workers: int = 1
    devices: tuple[str, ...] = ()
    model_mb: float = 0.0  # 0: unknown
    step_s: float = 0.0  # of one step of a worker; 0: unknown
    host: str | None = None  # HOST:PORT, or a run folder
    token_file: Path | None = None
    certificate: Path | None = None
    hosts: tuple[str, ...] = ()
    script: Path | None = None
    slurm: SlurmCase | None = None
    ray: RayResources | None = None
    runs: Path = Path("runs")
    wait_s: float = WAIT_S
    _known: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)
    _locks: dict[str, threading.Lock] = field(default_factory=dict[str, threading.Lock], compare=False)

    @property
    def run(self) -> Path | None:
        """The run folder, if one was given."""
        return Path(self.host) if self.host is not None and Path(self.host).is_dir() else None

    def once(self, name: str, find: Callable[["Case"], T]) -> T:
        """The result of `find`, computed once per case. Checks that need the same one wait for it; others do not."""
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._known:
                self._known[name] = find(self)
            return self._known[name]


@dataclass(frozen=True)
class Finding:
    """The result of a check. A grave one keeps a run from working; a warning makes it slow or unsafe.

    Attributes:
        check: the name of the check that found it.
        values: what was measured, by names with units, for programs that read the JSON.
    """

    level: str
    seen: str
    limit: str = ""
    fix: str = ""
    check: str = ""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __str__(self) -> str:
        limit = f" ({self.limit})" if self.limit else ""
        text = f"{self.seen}{limit}." + (f" {self.fix}" if self.fix else "")
        return " ".join(text.split())  # one line, also with the output of other programs in it


def fine(seen: str, **values: Any) -> Finding:
    """No problem."""
    return Finding(OK, seen, values=values)


def warning(seen: str, *, limit: str, fix: str) -> Finding:
    """A problem with which a run is slow or unsafe, or does not last."""
    return Finding(WARNING, seen, limit, fix)


def grave(seen: str, *, limit: str, fix: str) -> Finding:
    """A problem with which no run works."""
    return Finding(GRAVE, seen, limit, fix)


Find = Callable[[Case], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        of: what it checks: "machine", "run", "host", "slurm", "ray" or "hosts".
        find: returns its findings; a ManipleError that it raises is a grave finding.
        is_quick: it takes a few milliseconds, so that launchers run it too.
    """

    name: str
    of: str
    find: Find
    is_quick: bool = False


class Checks(list[Check]):
    """The checks of one kind, in the order of their findings. Its call is a decorator that declares one."""

    def __init__(self, of: str) -> None:
        self._of = of

    def __call__(self, name: str, *, is_quick: bool = False) -> Callable[[Find], Find]:
        def declare(find: Find) -> Find:
            self.append(Check(name, self._of, find, is_quick))
            return find

        return declare


def examine(case: Case, checks: Iterable[Check]) -> list[Finding]:
    """The findings of all checks. A check that exceeds its time limit is abandoned and reported."""
    limit_s = _MAX_WAITS * case.wait_s + _IMPORT_S
    late = warning("this check has not finished", limit=f"limit {limit_s:g} s", fix="Raise --timeout and try again.")
    return [finding for one in _run(case, checks, limit_s) for finding in one.findings([late])]


def glance(case: Case, checks: Iterable[Check]) -> list[Finding]:
    """Problems found by quick checks, which launchers show before they start. Slow ones are abandoned silently."""
    quick = (check for check in checks if check.is_quick)
    return [finding for one in _run(case, quick, _GLANCE_S) for finding in one.findings([]) if finding.level != OK]


def _run(case: Case, checks: Iterable[Check], within_s: float) -> "list[_CheckThread]":
    threads = [_CheckThread(check, case) for check in checks]
    for thread in threads:
        thread.start()
    deadline = Deadline(within_s)
    for thread in threads:
        while thread.is_alive() and not deadline.is_over():
            thread.join(_JOIN_S)
    return threads


class _CheckThread(threading.Thread):
    """One running check. A daemon, since a lookup at a dead name server cannot be interrupted."""

    def __init__(self, check: Check, case: Case) -> None:
        super().__init__(name=f"maniple-doctor-{check.name}", daemon=True)
        self._check, self._case = check, case
        self._found: list[Finding] | None = None

    def run(self) -> None:
        try:
            found = list(self._check.find(self._case))
        except ManipleError as error:
            found = [grave(str(error).rstrip("."), limit="", fix="")]
        except Exception as error:  # one broken check must not hide the findings of others
            seen = f"this check itself failed: {type(error).__name__}: {error}"
            found = [warning(seen, limit="", fix="Check it by hand, and report this.")]
        self._found = found

    def findings(self, late: list[Finding]) -> list[Finding]:
        """Its findings; `late` if it has not finished."""
        found = late if self._found is None else self._found
        return [replace(one, check=self._check.name) for one in found]
