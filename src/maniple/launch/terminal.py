"""What a person sees of a run in the terminal: a live table, plain lines or JSON, made from its events and logs."""

import errno
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maniple.clock import clock
from maniple.monitor import RunState, Totals, WorkerState
from maniple.monitor.measures import MEASURES, RUN_MEASURES
from maniple.monitor.worker_state import BAD, WAITING
from maniple.record import RunFolder, Tail
from maniple.record.folder import json_line
from maniple.rules import parse_rule
from maniple.text import count, last_words

_LEFT = {"worker", "state"}
_STYLES = {"training": "green", "starting": "yellow", "stopped": "yellow"} | dict.fromkeys(BAD, "bold red")
_TABLE_LINES = 3  # beside the workers: header, workers left out, totals; a target takes one more
_PLAIN_FIRST_S, _PLAIN_MAX_S = 5.0, 60.0  # interval between lines of all workers; doubled each time
_TABLE_INTERVAL_S, _JSON_INTERVAL_S = 0.5, 1.0


class RunMonitor(RunState):
    """The state of a run and the output of its workers, kept up to date by following events and logs.

    With `from_now_on`, earlier output is skipped: it belongs to an earlier life of the run.

    Attributes:
        bars: by rank, the progress bars being drawn now; set by the launcher, which reads the workers' output.
    """

    def __init__(self, folder: RunFolder, workers: int, *, from_now_on: bool = False) -> None:
        super().__init__(folder, workers=workers)
        self.describe(folder.read())
        self.bars: dict[int, tuple[str, ...]] = {}
        self._created = clock.time()
        logs = folder.log("host").parent.glob("*.log") if from_now_on else ()
        self._log_starts = {path.name: path.stat().st_size for path in logs}
        self._logs: dict[int, Tail] = {}

    def printed(self) -> list[tuple[int, str]]:
        """The lines that workers have printed since the last call, with their ranks."""
        lines: list[tuple[int, str]] = []
        for rank in self.workers:
            if rank not in self._logs:
                path = self.folder.log(rank)
                self._logs[rank] = Tail(path, start=self._log_starts.get(path.name, 0))
            lines += [(rank, line.decode(errors="replace")) for line in self._logs[rank].lines()]
        return lines

    @property
    def silent_s(self) -> float:
        """How long ago any process of the run last wrote an event."""
        return clock.time() - self.until if self.until else 0.0

    def clear_rates(self) -> None:
        """Show no rates until workers write events again."""
        for worker in self.workers.values():
            worker.clear_rates()

    @property
    def epochs(self) -> float:
        """How many epochs the workers have trained together; 0 if the size of one is unknown."""
        return self.totals().samples / self.epoch_size if self.epoch_size else 0.0

    @property
    def stop_reason(self) -> str:
        """Why the controller stops this life of the run; "" if it does not."""
        when, reason = self.stop
        return reason if when >= self._created else ""

    @property
    def is_unshared(self) -> bool:
        """Whether all workers that joined have left without sharing anything."""
        joined = [one for one in self.workers.values() if one.lives]
        return bool(joined) and all(one.is_unshared for one in joined)

    def is_synchronous(self, rule: str | None) -> bool:
        """Whether the workers make their steps together, by the rule that they share by, or else by `rule`."""
        meets = self.shared.get("meets")
        return meets not in {"center", "peers"} if meets else parse_rule(rule or "easgd").is_synchronous

    def last_words(self, who: int | str, unwritten: bytes = b"") -> str:
        """The last lines of a process in this life of the run; `unwritten`: output that a full disk refused."""
        path = self.folder.log(who)
        return last_words(path, unwritten, start=self._log_starts.get(path.name, 0))

    def summary(self) -> list[str]:
        """Lines on the whole run: what was done, the measured speed-up, the time to the target."""
        totals, overall, base = self.totals(), self.overall(), self.baseline
        rate = f", {overall.rate:,.0f} samples/s" if totals.samples and overall.rate else ""
        workers = count(totals.workers, "worker")
        lines = [f"{totals.steps:,} steps, {totals.samples:,} samples in {overall.seconds:.1f} s{rate} over {workers}"]
        if base is not None and totals.speedup is not None:
            measured = f"{base.rate:,.0f} {base.unit}/s of one worker, {base.name}"
            lines.append(f"speed-up {totals.speedup:.2f}: {overall.rate:,.0f} {overall.unit}/s over {measured}")
        elif base is not None and overall.rate:
            lines.append(f"no speed-up: {base.name} counted {base.unit}, and this run {overall.unit}")
        if totals.target is not None:
            lines.append(totals.target.final_text)
        if base is not None and base.target_s is not None and totals.target_speedup is not None:
            lines[-1] += f", {totals.target_speedup:.2f} times as fast as one worker ({base.target_s:,.1f} s)"
        return lines

    def result(self) -> dict[str, Any]:
        """What run.json keeps as `result`: the training time, the measured speed, and the time to the target."""
        totals, overall = self.totals(), self.overall()
        found: dict[str, Any] = {"seconds": overall.seconds, "rate": overall.rate, "unit": overall.unit}
        if totals.speedup is not None:
            found["speedup"] = totals.speedup
        if totals.target is not None:
            found |= {"target": asdict(totals.target), "target_speedup": totals.target_speedup}
        return found


def open_display(*, quiet: bool, is_json: bool = False, is_brief: bool = False) -> "Display":
    """The display that suits standard output; `is_brief` leaves out the workers."""
    if is_json:
        return JsonDisplay()
    if quiet:
        return Display()
    if is_brief:
        return HostDisplay()
    return TableDisplay() if sys.stdout is not None and sys.stdout.isatty() else PlainDisplay()


class Display(AbstractContextManager["Display"]):
    """Shows errors only. Subclasses show more."""

    def __init__(self) -> None:
        self._errors = _Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, monitor: RunMonitor, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        """Update the display with newly printed lines; `is_last`: for the last time."""

    def say(self, text: str) -> None:
        """Show one message."""

    def error(self, text: str) -> None:
        """Show an error, also on a quiet display."""
        with suppress(OSError, ValueError):
            self._errors.print(Text(f"maniple: {text}"))

    def __exit__(self, *_: object) -> None:
        return None


class HostDisplay(Display):
    """The host's messages only: for the log of a host job, beside those of the workers."""

    def say(self, text: str) -> None:
        print(f"H  | {text}", flush=True)


class PlainDisplay(HostDisplay):
    """Plain lines: what workers print, and their states. A worker whose state changes is shown at once, all of them at
    growing intervals and after an epoch or a validation; unchanged lines are not repeated."""

    def __init__(self) -> None:
        super().__init__()
        self._interval_s = _PLAIN_FIRST_S
        self._last = clock.monotonic()
        self._reached: tuple[int, int] = (0, 0)  # epochs and validations
        self._states: dict[int, tuple[str, int]] = {}
        self._shown: dict[str, str] = {}  # the last line of each worker

    def show(self, monitor: RunMonitor, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            print(f"W{rank} | {line}", flush=True)
        workers = monitor.workers
        states = {rank: (one.state, one.lives) for rank, one in workers.items() if one.state not in WAITING}
        changed = {rank for rank, state in states.items() if self._states.get(rank) != state}
        self._states = states
        is_over = bool(changed) and all(one.is_gone for one in workers.values())
        if is_last or is_over or self._is_due(monitor):
            self._show_new(plain_lines(workers, monitor.totals()))
        elif changed:
            self._show_new(plain_lines({rank: workers[rank] for rank in changed}, Totals()))

    def _is_due(self, monitor: RunMonitor) -> bool:
        reached = int(monitor.epochs), monitor.validations
        since_s = clock.monotonic() - self._last
        if since_s >= self._interval_s:
            self._interval_s = min(2 * self._interval_s, _PLAIN_MAX_S)
        elif since_s < _PLAIN_FIRST_S or reached == self._reached:
            return False
        self._last, self._reached = clock.monotonic(), reached
        return True

    def _show_new(self, lines: list[str]) -> None:
        """Print lines that differ from the last ones of the same workers; the totals only together with such a line."""
        new = {who: line for line in lines if self._shown.get(who := line.partition(":")[0]) != line}
        if any(who.startswith("W") for who in new):
            self._shown |= new
            for line in new.values():
                print(line, flush=True)


class TableDisplay(Display):
    """A live table with one row per worker, below what the workers print."""

    def __init__(self) -> None:
        super().__init__()
        self._console = _Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._next = 0.0

    def __enter__(self) -> "TableDisplay":
        with suppress(OSError, ValueError):
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()

    def show(self, monitor: RunMonitor, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            self._console.print(Text.assemble((f"W{rank} ", "cyan"), "| ", line))
        if is_last or clock.monotonic() >= self._next:
            self._next = clock.monotonic() + _TABLE_INTERVAL_S
            height = self._console.size.height
            table = live_table(monitor.workers, monitor.totals(), height=height, bars=monitor.bars)
            self._live.update(table, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text.assemble(("H  ", "bold"), "| ", text))

    def error(self, text: str) -> None:
        self._console.print(Text(f"maniple: {text}", style="red"))


class JsonDisplay(Display):
    """One JSON object per line, for programs: `kind` is printed, said, error or standings."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def show(self, monitor: RunMonitor, printed: list[tuple[int, str]], *, is_last: bool = False) -> None:
        for rank, line in printed:
            self._put("printed", worker=rank, text=line)
        if is_last or clock.monotonic() >= self._next:
            self._next = clock.monotonic() + _JSON_INTERVAL_S
            self._put("standings", **as_numbers(monitor.workers, monitor.totals()))

    def say(self, text: str) -> None:
        self._put("said", text=text)

    def error(self, text: str) -> None:
        self._put("error", text=text)

    def _put(self, kind: str, **values: Any) -> None:
        print(json_line({"kind": kind, "time": clock.time(), **values}), flush=True)


class _Console(Console):
    """A console that raises BrokenPipeError for a closed pipe, where rich would raise SystemExit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def columns(worker: WorkerState, workers: Iterable[WorkerState] = ()) -> dict[str, str]:
    """What is shown of a worker, by the names of columns: of optional ones those that one of `workers` has."""
    samples_per_s, steps_per_s, _ = worker.mean_rates
    mean = {"samples_per_s": samples_per_s, "steps_per_s": steps_per_s} if worker.state in {"done", "stopped"} else {}
    counted = "samples" if worker.total.samples else "steps"
    state = worker.state_text + (f" (life {worker.lives})" if worker.lives > 1 else "")
    return {"state": state} | {
        one.column: one.text(mean.get(one.name, one.of(worker)))
        for one in MEASURES
        if one.column and one.counted in {"", counted}
        if not one.is_optional or any(one.of(other) is not None for other in (worker, *workers))
    }


def total_line(totals: Totals) -> str:
    """The run in one line."""
    rate, unit = (totals.samples_per_s, "samples") if totals.samples else (totals.steps_per_s, "steps")
    mean = "" if totals.live else " in the mean"  # no worker trains any more
    values = ((one, getattr(totals, one.name)) for one in RUN_MEASURES if one.phrase)
    phrases = [one.phrase.format(value, totals) for one, value in values if value is not None]
    return ", ".join([f"{rate:,.0f} {unit}/s{mean}", *phrases])


def target_lines(totals: Totals) -> list[str]:
    """The target in one line; none without a target."""
    if totals.target is None:
        return []
    faster = totals.target_speedup
    return [totals.target.text + (f", {faster:.2f} times as fast as one worker" if faster is not None else "")]


def as_numbers(workers: Mapping[int, WorkerState], totals: Totals) -> dict[str, Any]:
    """The state of all workers and the totals, for programs."""
    shown = ("state", "lives", "node", "measures_data", "waiting_for", "waiting_s")
    rows = [
        {
            "worker": rank,
            **{one.name: one.of(worker) for one in MEASURES},
            **{key: getattr(worker, key) for key in shown},
        }
        for rank, worker in sorted(workers.items())
    ]
    return {"workers": rows, "totals": asdict(totals)}


def live_table(
    workers: Mapping[int, WorkerState],
    totals: Totals,
    *,
    height: int,
    bars: Mapping[int, Sequence[str]] | None = None,
) -> Group:
    """A table of the workers, as many as `height` lines allow, with their progress bars and the totals."""
    target = target_lines(totals)
    room = max(4, height - _TABLE_LINES - len(target))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", *columns(WorkerState(), workers.values())):
        table.add_column(name, justify="left" if name in _LEFT else "right")
    shown = choose_workers(workers, room)
    for rank in shown:
        worker = workers[rank]
        state, *others = columns(worker, workers.values()).values()
        style = _STYLES.get(worker.state, "")
        table.add_row(f"W{rank}", f"[{style}]{state}[/]" if style else state, *others)
    if rest := summarize_rest(workers, shown):
        table.add_row("…", rest)
    total = [f"all: {total_line(totals)}", *target] if totals.steps else [""]
    drawn = bar_lines(bars or {}, room - table.row_count)
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in drawn]
    return Group(table, *lines, *(Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in total))


def bar_lines(bars: Mapping[int, Sequence[str]], room: int) -> list[str]:
    """The progress bars of all workers in at most `room` lines; only the innermost of each if not all fit."""
    lines = [f"W{rank} | {bar}" for rank, rows in sorted(bars.items()) for bar in rows]
    if len(lines) > room:
        lines = [f"W{rank} | {rows[-1]}" for rank, rows in sorted(bars.items()) if rows]
    return lines[: max(0, room)]


def choose_workers(workers: Mapping[int, WorkerState], room: int) -> list[int]:
    """The ranks to show if there is no room for all: workers in trouble first, then by rank."""
    by_need = sorted(workers, key=lambda rank: (workers[rank].state not in BAD, rank))
    return sorted(by_need[:room])


def summarize_rest(workers: Mapping[int, WorkerState], shown: list[int]) -> str:
    """The workers that are not shown, as `41 more: 40 training, 1 done`."""
    states = Counter(worker.state for rank, worker in workers.items() if rank not in shown)
    words = ", ".join(f"{number} {state}" for state, number in states.most_common())
    return f"{states.total()} more: {words}" if states else ""


def plain_lines(workers: Mapping[int, WorkerState], totals: Totals) -> list[str]:
    """The workers and the totals as lines of text."""
    lines = [
        f"W{rank} : " + " ".join(f"{name} {value}" for name, value in columns(worker).items())
        for rank, worker in sorted(workers.items())
    ]
    return [*lines, f"all: {total_line(totals)}", *target_lines(totals)] if totals.steps else lines
