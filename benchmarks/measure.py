"""Measurements on a noisy machine: interleaved repeats, medians and ratios, as a table and as JSON."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def interleave(contestants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each contestant; all run in turn `repeats` times after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, act in contestants.items():
            begin = time.perf_counter()
            act()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait_for(look: Callable[[], Any]) -> None:
    """Wait until the condition holds, for at most a minute."""
    deadline = time.monotonic() + 60
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not begin within a minute")
        time.sleep(0.05)


def report(name: str, title: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Print `rows` as a table and write them, with the machine's load, to results/<name>.json."""
    console = Console(width=max(130, Console().width))
    table = Table(title=title, title_justify="left", title_style="bold")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "machine": platform.processor() or platform.machine()}
    console.print("  ".join(f"{key}: {value}" for key, value in (facts | machine).items()), style="dim")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"title": title, "rows": rows, "time": time.time()} | facts | machine, indent=2))
    console.print(f"written: {path.relative_to(Path(__file__).parents[1])}", style="dim")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
