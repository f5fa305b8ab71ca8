"""The runs that are drawn or compared: each with its story, a name and what was asked of it."""

import re
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec

from maniple.errors import InvalidArgument
from maniple.record import Folder
from maniple.story import Overall, Story, look_back

# What run.json tells of a run beside what was asked, and what of that says nothing about how it trained.
_UNTOLD = {"launcher", "session"}


@dataclass
class Run:
    """One run, read as far as its rows go now."""

    name: str
    story: Story
    about: dict[str, Any]

    @cached_property
    def overall(self) -> Overall:
        """What its workers have achieved together."""
        return look_back(self.story)

    @property
    def workers(self) -> int:
        """All that have ever taken part."""
        return len(self.story.standings)

    @property
    def asked(self) -> dict[str, Any]:
        """All that was asked of it."""
        asked = cast(dict[str, Any], self.about.get("asked") or {})
        return {name: value for name, value in asked.items() if name not in _UNTOLD}

    @property
    def settings(self) -> dict[str, Any]:
        """The same, without what was left as it is."""
        return {name: value for name, value in self.asked.items() if value not in (None, [], 0, "")}

    @property
    def rule(self) -> str:
        """The name of the rule that its workers share by, as on the command line: `easgd`."""
        told = str(self.story.shared.get("rule") or self.settings.get("rule") or "")
        return re.split(r"[(:]", told)[0].lower()


def open_runs(paths: list[Path], value: str) -> list[Run]:
    """Read these run folders, `value` in many points. Their names are as short as they can be told apart."""
    names = _names(paths)
    return [_open(path, name, value) for path, name in zip(paths, names, strict=True)]


def check_run(path: Path) -> None:
    """A run has left its rows there."""
    if not (path / "events").is_dir():
        raise InvalidArgument(f"{path} is no run folder: it has no events. Give runs/NAME or runs/last.")


def check_value(runs: list[Run], value: str) -> None:
    """At least one run has logged `value`."""
    logged = sorted({name for run in runs for name in run.story.logged.named})
    if value in logged:
        return
    if any(value in run.story.logged.broken for run in runs):
        raise InvalidArgument(f"of {value!r} only values that are not finite were logged. {_others(logged)}")
    near = get_close_matches(value, logged, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"nothing by the name {value!r} was logged in {_listed(runs)}. {_others(logged)}{hint}")


def _open(path: Path, name: str, value: str) -> Run:
    check_run(path)
    folder = Folder(path.resolve())
    story = Story(folder, fine=value)
    story.refresh()
    if not story.until:
        raise InvalidArgument(f"{path} has no rows yet: nothing can be told of it. Wait until its workers have begun.")
    try:
        about = folder.read()
    except (msgspec.DecodeError, OSError):  # of a run that another launcher is about to describe
        about = {}
    return Run(name, story, about)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
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
        return "No value was logged at all: call worker.log(loss=loss) in the script."
    shown = ", ".join(logged[:20]) + (f" and {len(logged) - 20} more" if len(logged) > 20 else "")
    return f"There are: {shown}."


def _listed(runs: list[Run]) -> str:
    names = ", ".join(run.name for run in runs[:3])
    return names + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
