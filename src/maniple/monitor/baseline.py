"""The measured baseline of a speed-up: a run with one worker.

A speed-up is a ratio of two measurements: samples per second of all workers, from the first step of any worker to the
last, divided by those of the baseline. It is never derived from the time that exchanges take. run.json records the
baseline of a run, so that viewers need only the folder of the run itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from maniple.errors import InvalidArgument
from maniple.text import count

if TYPE_CHECKING:
    from maniple.monitor.run_state import RunState
    from maniple.monitor.target import TargetStatus


@dataclass(frozen=True)
class Baseline:
    """The run that others are compared with. Only relative to one worker is this called a speed-up.

    Attributes:
        rate: samples (or steps: `unit`) of all workers per second.
        seconds: how long it was measured.
        target: the target of the run, as `loss<=0.2`; "" without one.
        target_s: training time to that target; None if it was not reached.
        path: its run folder.
    """

    name: str
    workers: int
    rate: float
    unit: str = "samples"
    seconds: float = 0.0
    target: str = ""
    target_s: float | None = None
    path: str = ""

    @property
    def title(self) -> str:
        """Title of a chart of relative speeds."""
        if self.workers == 1:
            return f"speed-up over one worker ({self.name})"
        return f"speed relative to {self.workers} workers (no run with one was given)"

    def speedup(self, rate: float, unit: str) -> float | None:
        """How many times as fast a run with this rate is; None if it counts in another unit or has made no step."""
        return rate / self.rate if unit == self.unit and rate > 0 and self.rate > 0 else None

    def target_speedup(self, status: "TargetStatus") -> float | None:
        """How many times as fast a run has reached its target; None unless both have reached the same target."""
        if str(status.target) != self.target or not status.reached_s or not self.target_s:
            return None
        return self.target_s / status.reached_s


def measure_baseline(state: "RunState", name: str) -> Baseline:
    """The run `state`, read to its end, as a baseline. Raises InvalidArgument if it cannot be one."""
    overall, workers = state.overall(), len(state.workers)
    path = state.folder.path
    if not state.until:
        raise InvalidArgument(f"--baseline {path} has no rows, so there is no speed to compare with. Run it first.")
    if not overall.rate:
        raise InvalidArgument(
            f"--baseline {path} has made fewer than two steps, so it has no speed. Give it more time; start-up does "
            "not count."
        )
    if workers != 1:
        raise InvalidArgument(
            f"--baseline {path} had {count(workers, 'worker')}, but a speed-up is over one. Give a run with -n 1, or "
            "compare the runs by `maniple compare`."
        )
    status = state.target_status(is_last=True)
    target, target_s = ("", None) if status is None else (str(status.target), status.reached_s)
    return Baseline(name, workers, overall.rate, overall.unit, overall.seconds, target, target_s, str(path))


def parse_baseline(text: str, runs: Path) -> float | Path:
    """What --baseline asks for: seconds to measure one worker for, or the folder of a run."""
    try:
        seconds = float(text)
    except ValueError:
        found = [path for path in (Path(text), runs / text) if path.is_dir()]
        if not found:
            raise InvalidArgument(
                f"--baseline {text!r} is neither a number of seconds nor a run folder, here or in {runs}. Write "
                "--baseline 20 to measure one worker first, or --baseline runs/NAME."
            ) from None
        path = next((path for path in found if (path / "events").is_dir()), found[0])
        if not (path / "events").is_dir():
            raise InvalidArgument(
                f"--baseline {path} is not a run folder: it has no events. Give runs/NAME, or seconds."
            ) from None
        return path
    if not 0 < seconds < float("inf"):
        raise InvalidArgument(f"--baseline {text} is out of range (above 0 s). Write --baseline 20.")
    return seconds


def recorded_baseline(description: dict[str, Any]) -> Baseline | None:
    """The baseline in run.json; None if there is none that can be read."""
    try:
        return msgspec.convert(description["baseline"], Baseline)
    except (KeyError, msgspec.ValidationError):
        return None
