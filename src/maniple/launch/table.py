"""Standings as words: the columns of the live table, of plain lines and of `maniple status`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from maniple.story import Standing, Totals
from maniple.story.standing import BAD

_LEFT = {"worker", "state"}
_STYLES = {"training": "green", "starting": "yellow", "stopped": "yellow"} | dict.fromkeys(BAD, "bold red")
_NOTHING = "–"
_NUMBERS = (
    "state", "lives", "node", "loss", "steps_per_s", "samples_per_s", "bytes_per_s", "sync_share", "staleness",
    "cores", "memory_bytes", "measures_data", "waiting_for", "waiting_s",
)  # fmt: skip
_OWN_LINES = 3  # of the table beside its workers: head, what is left out, total


def columns(standing: Standing) -> dict[str, str]:
    """What is shown of a worker, by the names of columns."""
    samples_per_s, steps_per_s = standing.samples_per_s, standing.steps_per_s
    if standing.state in {"done", "stopped"}:
        samples_per_s, steps_per_s = standing.mean_rates
    rate, unit = (samples_per_s, "samples") if standing.total.samples else (steps_per_s, "steps")
    return {
        "state": standing.shown + (f" (life {standing.lives})" if standing.lives > 1 else ""),
        "step": f"{standing.now.step:,}",
        "speed": f"{rate:,.0f} {unit}/s",
        "loss": _NOTHING if standing.loss is None else f"{standing.loss:.4g}",
        "sync": f"{standing.sync_share:.1%}",
        "staleness": _NOTHING if standing.staleness is None else f"{standing.staleness:.1f}",
    }


def total_line(totals: Totals) -> str:
    """The run in one line."""
    rate, unit = (totals.samples_per_s, "samples") if totals.samples else (totals.steps_per_s, "steps")
    mean = "" if totals.live else " in the mean"  # nobody trains any more
    return (
        f"{rate:,.0f} {unit}/s{mean}, busy {totals.busy_workers:.2f} of {totals.workers} workers, "
        f"goodput {totals.goodput:.0%}, center version {totals.version:,}"
    )


def as_numbers(standings: Mapping[int, Standing], totals: Totals) -> dict[str, Any]:
    """The same for a program."""
    workers: list[dict[str, Any]] = []
    for rank, one in standings.items():
        row = {name: getattr(one, name) for name in _NUMBERS}
        workers.append({"worker": rank, "step": one.now.step, "samples": one.total.samples, **row})
    return {"workers": workers, "totals": asdict(totals)}


def live_table(
    standings: Mapping[int, Standing], totals: Totals, *, height: int, bars: Mapping[int, Sequence[str]] | None = None
) -> Group:
    """All workers, as far as `height` lines allow, the progress bars that they draw, and the run as a whole."""
    room = max(4, height - _OWN_LINES)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", *columns(Standing())):
        table.add_column(name, justify="left" if name in _LEFT else "right")
    shown = chosen(standings, room)
    for rank in shown:
        standing = standings[rank]
        state, *others = columns(standing).values()
        style = _STYLES.get(standing.state, "")
        table.add_row(f"W{rank}", f"[{style}]{state}[/]" if style else state, *others)
    if rest := left_out(standings, shown):
        table.add_row("…", rest)
    whole = Text(f"all: {total_line(totals)}" if totals.steps else "", style="bold", no_wrap=True, overflow="ellipsis")
    drawn = bar_lines(bars or {}, room - table.row_count)
    return Group(table, *(Text(line, no_wrap=True, overflow="ellipsis") for line in drawn), whole)


def bar_lines(bars: Mapping[int, Sequence[str]], room: int) -> list[str]:
    """The progress bars of all workers, at most `room` lines: of each the innermost, if there is no room for all."""
    lines = [f"W{rank} | {bar}" for rank, rows in sorted(bars.items()) for bar in rows]
    if len(lines) > room:
        lines = [f"W{rank} | {rows[-1]}" for rank, rows in sorted(bars.items()) if rows]
    return lines[: max(0, room)]


def chosen(standings: Mapping[int, Standing], room: int) -> list[int]:
    """The workers to show where not all have room: those in trouble first, then by rank."""
    by_need = sorted(standings, key=lambda rank: (standings[rank].state not in BAD, rank))
    return sorted(by_need[:room])


def left_out(standings: Mapping[int, Standing], shown: list[int]) -> str:
    """`41 more: 40 training, 1 done`."""
    states = Counter(standing.state for rank, standing in standings.items() if rank not in shown)
    words = ", ".join(f"{number} {state}" for state, number in states.most_common())
    return f"{states.total()} more: {words}" if states else ""


def plain_lines(standings: Mapping[int, Standing], totals: Totals) -> list[str]:
    """The same as lines of text."""
    lines = [
        f"W{rank} : " + " ".join(f"{name} {value}" for name, value in columns(standing).items())
        for rank, standing in standings.items()
    ]
    return [*lines, f"all: {total_line(totals)}"] if totals.steps else lines
