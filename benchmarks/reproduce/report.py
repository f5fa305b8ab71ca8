"""Tables and pictures of `make reproduce`, made from its results alone."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from earlier_tables import ALONE, earlier_tables
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
ALL_CORES, DDP = "1 process, all cores", "DDP"
TUNING_SEED = 100  # of the runs that choose the settings
PAYS = 0.9  # of the better time of one process: less is a gain that the noise of a machine cannot explain
COLOURS = ("#555555", "#999999", "#cc79a7", "#0072b2", "#009e73", "#e69f00", "#56b4e9", "#d55e00", "#8c564b", "#bcbd22")

Run = dict[str, Any]


class Row:
    """The seeds of one contestant at one task."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.name, self.workers, self.setting = runs[0]["contestant"], runs[0]["workers"], runs[0]["setting"]
        self.seconds = [run["to_target_s"] for run in runs]
        self.median_s = None if None in self.seconds else statistics.median(self.seconds)
        self.samples = [run["to_target_samples"] for run in runs if run["to_target_samples"] is not None]
        self.finals = [run["final"] for run in runs if run["final"] is not None]  # None: it has diverged

    @property
    def described(self) -> str:
        """The setting that was chosen, for the table."""
        words = [f"lr x {self.setting['lr']:g}"] + ["batch divided"] * bool(self.setting.get("split"))
        words += [f"{key} {self.setting[key]}" for key in ("every", "alpha") if self.setting.get(key) is not None]
        return ", ".join(words)


def rows_of(runs: Iterable[Run]) -> dict[str, dict[str, Row]]:
    """All rows by task and contestant; the runs that chose the settings are left out."""
    grouped: dict[str, dict[tuple[str, int, str], list[Run]]] = {}
    for run in runs:
        if run["task"] != "pool" and run["seed"] != TUNING_SEED and not run.get("epochs"):
            task = run["task"] + (f" ({Path(run['data']).stem})" if run["data"] else "")
            key = run["contestant"], run["workers"], str(run["setting"])
            grouped.setdefault(task, {}).setdefault(key, []).append(run)
    return {
        task: {f"{name}, {workers} workers" if workers > 2 else name: Row(found)
               for (name, workers, _), found in sorted(by_key.items(), key=lambda item: item[0][1] > 2)}
        for task, by_key in grouped.items()
    }  # fmt: skip


def baseline_s(rows: dict[str, Row]) -> float | None:
    """The better time of one process, on one core and on all."""
    times = [rows[name].median_s for name in (ALONE, ALL_CORES) if name in rows]
    return min((time for time in times if time is not None), default=None)


def ratio(row: Row, base_s: float | None) -> float | None:
    """The time to the target, as a share of another."""
    return None if row.median_s is None or base_s is None else row.median_s / base_s


def cells(row: Row, rows: dict[str, Row]) -> list[str]:
    """One line of a table."""
    spread = "" if len(row.seconds) < 2 or row.median_s is None else f" ({min(row.seconds):.1f}-{max(row.seconds):.1f})"
    if not row.finals:
        return [row.name, row.described, "diverged", *[""] * 5]
    metric = row.runs[0]["metric"]
    final = statistics.median(row.finals)
    quality = f"{final:.1%}" if metric == "accuracy" else f"{final:.3f}"
    if len(row.finals) > 1:
        low, high = min(row.finals), max(row.finals)
        quality += f" ({low:.1%}-{high:.1%})" if metric == "accuracy" else f" ({low:.3f}-{high:.3f})"
    ddp = rows[DDP].median_s if DDP in rows else None
    return [
        row.name,
        row.described,
        "not reached" if row.median_s is None else f"{row.median_s:.1f}{spread}",
        _number(ratio(row, rows[ALONE].median_s if ALONE in rows else None)),
        _number(ratio(row, baseline_s(rows))),
        _number(ratio(row, ddp)),
        f"{statistics.median(row.samples):,.0f}" if row.samples else "",
        quality,
    ]


INTRODUCTION = """# Does it pay?

Time to the same quality, for every rule on 2 workers, one process, and DistributedDataParallel over gloo. This page is
generated from `docs/results.json` by `python benchmarks/reproduce --report`. `make reproduce` measures the fast part on
your machine, `python benchmarks/reproduce --full` all of it. The docstring of `benchmarks/reproduce/__main__.py` states
the grid by which every contestant was tuned, `benchmarks/reproduce/tasks.py` describes the experiments.

*Seconds to target* are medians over the seeds, with the range. They count from the first step, without imports and
evaluation. *Better one* is the faster of one process on one core and on all cores: below 1 the workers are faster.
*Final* is the quality after the same number of samples for all.
"""
HEADINGS = (
    "contestant", "setting", "seconds to target", "/ 1 process", "/ better one", "/ DDP", "samples to target", "final",
)  # fmt: skip


def write_report(runs: dict[str, Run], *, to_docs: bool) -> None:
    """Print the tables; with `to_docs` write docs/results.md and its pictures too."""
    tasks, console = rows_of(runs.values()), Console(width=150)
    for task, rows in tasks.items():
        first = next(iter(rows.values())).runs[0]
        table = Table(*HEADINGS, title=f"{task}: {first['metric']} {first['target']:g}", title_justify="left")
        for row in rows.values():
            table.add_row(*cells(row, rows))
        console.print(table)
    tables = earlier_tables(runs)
    if tables:
        console.print("\n".join(tables), markup=False)
    if to_docs and (tasks or tables):
        (ROOT / "docs" / "results.md").write_text("\n".join([*_page(tasks), *tables]).rstrip() + "\n")
        for task, rows in tasks.items():
            draw(rows, ROOT / "docs" / "pictures" / f"results-{_slug(task)}.svg")
        console.print("written: docs/results.md", style="dim")


def _page(tasks: dict[str, dict[str, Row]]) -> list[str]:
    """docs/results.md. The cases that do not pay come first."""
    lines = [INTRODUCTION, "## Where it does not pay", "", *_losses(tasks), ""]
    for task, rows in tasks.items():
        first = next(iter(rows.values())).runs[0]
        sign = "at least" if first["metric"] == "accuracy" else "at most"
        target = f"{first['target']:.1%}" if first["metric"] == "accuracy" else f"{first['target']:g}"
        lines += [f"## {task}", "", f"Target: {first['metric']} of the test set {sign} {target}.", ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells(row, rows)) + " |" for row in rows.values()]
        lines += ["", f"![learning curves of {task}](pictures/results-{_slug(task)}.svg)", ""]
    return lines


def _losses(tasks: dict[str, dict[str, Row]]) -> list[str]:
    lines: list[str] = []
    for task, rows in tasks.items():
        base = baseline_s(rows)
        for row in rows.values():
            if row.name in {ALONE, ALL_CORES, DDP}:
                continue
            share = ratio(row, base)
            if share is None:
                lines.append(f"- **{task}, {row.name}**: the target was not reached with every seed.")
            elif share > PAYS:
                lines.append(f"- **{task}, {row.name}**: {share:.2f} of the time of the better single process.")
    return lines or ["Every rule was faster than one process in every task."]


def draw(rows: dict[str, Row], path: Path) -> None:
    """Draw the learning curves of all contestants: the median over the seeds, and the target."""
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "maniple"  # equal pictures from equal results
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    first = next(iter(rows.values())).runs[0]
    for row, colour in zip((row for row in rows.values() if len(row.finals) == len(row.runs)), COLOURS, strict=False):
        end = min(run["curve"][-1][0] for run in row.runs)
        times = np.linspace(0, end, 200)
        values = [np.interp(times, *np.array([(t, v) for t, _, v in run["curve"]]).T) for run in row.runs]
        is_main = row.name in {ALONE, ALL_CORES, DDP, "bsp", "localsgd", "easgd"}
        axes.plot(times, np.median(values, 0), color=colour, label=row.name, lw=1.8 if is_main else 0.9)
        if len(values) > 1 and is_main:
            axes.fill_between(times, np.min(values, 0), np.max(values, 0), color=colour, alpha=0.12, lw=0)
    axes.axhline(first["target"], color="black", ls="--", lw=1)
    axes.annotate("target", (0, first["target"]), xytext=(4, 3), textcoords="offset points", fontsize=8)
    reached = [final for row in rows.values() for final in row.finals] + [first["target"]]
    if first["metric"] == "accuracy":
        axes.set_ylim(2.5 * first["target"] - 1.5 * max(reached), max(reached) + 0.2 * (1 - max(reached)))
    else:
        axes.set_ylim(0.97 * min(reached), 2 * first["target"] - 0.6 * min(reached))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"{first['metric']} of the test set")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _slug(task: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in task).strip("-")
