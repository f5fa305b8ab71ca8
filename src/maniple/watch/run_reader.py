"""Runs to draw or compare: each with its state, a name and its settings."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from maniple.errors import InvalidArgument
from maniple.monitor import Overall, RunState
from maniple.monitor.baseline import Baseline
from maniple.monitor.target import Target, parse_target
from maniple.record import RunFolder

_NOT_SETTINGS = {"launcher", "session"}  # entries of run.json that do not affect training


@dataclass
class Run:
    """One run, read up to its newest row."""

    name: str
    state: RunState
    description: dict[str, Any]  # run.json

    @cached_property
    def overall(self) -> Overall:
        """Its numbers as a whole."""
        return self.state.overall()

    @property
    def path(self) -> str:
        """Its folder."""
        return str(self.state.folder.path)

    @property
    def workers(self) -> int:
        """The number of workers that ever took part."""
        return len(self.state.workers)

    @property
    def as_baseline(self) -> Baseline:
        """The run as what others are compared with."""
        whole = self.overall
        return Baseline(self.name, self.workers, whole.rate, whole.unit, whole.seconds, path=self.path)

    @property
    def asked(self) -> dict[str, Any]:
        """All options that it was started with."""
        asked = cast(dict[str, Any], self.description.get("asked") or {})
        return {name: value for name, value in asked.items() if name not in _NOT_SETTINGS}

    @property
    def settings(self) -> dict[str, Any]:
        """The same, without empty ones."""
        return {name: value for name, value in self.asked.items() if value not in (None, [], 0, "")}

    @property
    def rule(self) -> str:
        """The name of its rule, as on the command line: `easgd`."""
        text = str(self.state.shared.get("rule") or self.settings.get("rule") or "")
        return re.split(r"[(:]", text)[0].lower()


def open_runs(paths: list[Path], value: str) -> list[Run]:
    """Read run folders, keeping many points of `value`. Names are as short as they can be and still differ.

    A folder that is given twice, as by `runs/*`, which includes the link `runs/last`, is read once.
    """
    paths = list({path.resolve(): path for path in paths}.values())
    names = _names(paths)
    return [_open(path, name, value) for path, name in zip(paths, names, strict=True)]


def recorded_target(paths: list[Path], name: str | None = None) -> Target | None:
    """The target that the first of these runs was started with, of those that have one, for `name` or any value."""
    for path in paths:
        with suppress(InvalidArgument, msgspec.DecodeError, OSError):
            asked: dict[str, Any] = RunFolder(path.resolve()).read().get("asked") or {}
            if isinstance(text := asked.get("target"), str) and (target := parse_target(text)).name == (
                name or target.name
            ):
                return target
    return None


def check_run(path: Path) -> None:
    """Raise InvalidArgument unless `path` is a run folder."""
    if not (path / "events").is_dir():
        raise InvalidArgument(f"{path} is not a run folder: it has no events. Give runs/NAME or runs/last.")


def check_value(runs: list[Run], value: str) -> None:
    """Raise InvalidArgument unless at least one run has logged `value`."""
    logged = sorted({name for run in runs for name in run.state.logged.named})
    if value in logged:
        return
    if any(value in run.state.logged.non_finite for run in runs):
        raise InvalidArgument(f"all logged values of {value!r} are NaN or infinite. {_others(logged)}")
    near = get_close_matches(value, logged, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"no value named {value!r} was logged in {_listed(runs)}. {_others(logged)}{hint}")


def _open(path: Path, name: str, value: str) -> Run:
    check_run(path)
    folder = RunFolder(path.resolve())
    try:
        description = folder.read()
    except (msgspec.DecodeError, OSError):  # another launcher is about to write it
        description = {}
    state = RunState(folder, fine=value)
    state.describe(description)
    state.refresh()
    if not state.until:
        raise InvalidArgument(f"{path} has no rows yet. Wait until its workers have started.")
    return Run(name, state, description)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to make them differ."""
    whole = [path.resolve().parts for path in paths]
    names = [parts[-1] if parts else "run" for parts in whole]
    for length in range(2, max(map(len, whole), default=0) + 1):
        twice = Counter(names)
        names = [
            "/".join(parts[-length:]) if twice[name] > 1 else name for parts, name in zip(whole, names, strict=True)
        ]
    return names


def _others(logged: list[str]) -> str:
    if not logged:
        return "No values were logged: call worker.log(loss=loss) in the script."
    shown = ", ".join(logged[:20]) + (f" and {len(logged) - 20} more" if len(logged) > 20 else "")
    return f"Logged values: {shown}."


def _listed(runs: list[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3])
    return names + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
