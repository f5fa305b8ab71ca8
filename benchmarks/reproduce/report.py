"""Tables and pictures of `make reproduce`, made from its results alone."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from earlier_tables import ALONE, earlier_tables
from grid_tables import TUNING_SEED, Chosen, Run, learning_rates, lengths, periods
from rich.console import Console
from rich.table import Table
from tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
ALL_CORES, DDP = "1 process, all cores", "DDP"
TWICE, TWICE_ALL_CORES = "1 process, batch x 2", "1 process, all cores, batch x 2"
PEERS = {ALONE, ALL_CORES, TWICE, TWICE_ALL_CORES, DDP}
RULES = ("bsp", "localsgd", "easgd", "asgd", "downpour", "msync:m=1", "easgd:sync=true", "downpour:sync=true")
MOST_SPEED = 1.1  # times that of as many separate processes: more is possible only if the machine's own speed changed
PAYS = 0.9  # of the better time of one process: less is a gain that the noise of a machine cannot explain
COLOURS = ("#555555", "#999999", "#cc79a7", "#0072b2", "#009e73", "#e69f00", "#56b4e9", "#d55e00", "#8c564b", "#bcbd22")
NEWCOMERS = ("bsp", "localsgd", "easgd", "downpour")  # the rules that are also measured untuned
UNTUNED = {"lr": 1.0, "split": None, "every": None, "alpha": None, "unbound": None}


def label_of(contestant: str, workers: int) -> str:
    """The name of a row and of its settings; it says the number of workers where there are more than two."""
    return f"{contestant}, {workers} workers" if workers > 2 else contestant


class Row:
    """The seeds of one contestant at one task."""

    def __init__(self, runs: list[Run], *, is_tuned: bool) -> None:
        self.runs, self._is_tuned = runs, is_tuned
        self.contestant, self.workers, self.setting = runs[0]["contestant"], runs[0]["workers"], runs[0]["setting"]
        self.name = label_of(self.contestant, self.workers)
        self.seconds = [run["to_target_s"] for run in runs]
        self.median_s = None if None in self.seconds else statistics.median(self.seconds)
        samples = [run["to_target_samples"] for run in runs]
        self.samples = None if None in samples else float(statistics.median(samples))
        ends = [run["curve"][-1] for run in runs if run["curve"]]
        self.rate = statistics.median(samples / seconds for seconds, samples, _ in ends) if ends else 0.0
        self.finals = [run["final"] for run in runs if run["final"] is not None]  # None: it has diverged

    @property
    def described(self) -> str:
        """The setting that was chosen, for the table."""
        words = [f"lr x {self.setting['lr']:g}"] + ["batch divided"] * bool(self.setting.get("split"))
        words += [f"{key} {self.setting[key]}" for key in ("every", "alpha") if self.setting.get(key) is not None]
        words += ["cores not bound"] * bool(self.setting.get("unbound"))
        return ", ".join(words + ["not tuned"] * (not self._is_tuned))


def rows_of(runs: Iterable[Run], chosen: Chosen | None = None, place: str = "") -> dict[str, dict[str, Row]]:
    """All rows by task and contestant: those with the chosen settings, or untuned ones where nothing was chosen.

    The runs that chose the settings are left out.
    """
    grouped: dict[str, dict[tuple[int, str], list[Run]]] = {}
    for run in runs:
        if run["task"] == "pool" or run["seed"] == TUNING_SEED or run.get("epochs") or run.get("place", "") != place:
            continue
        task = run["task"] + (f" ({Path(run['data']).stem})" if run["data"] else "")
        label = label_of(run["contestant"], run["workers"])
        if run["setting"] == (chosen or {}).get(task, {}).get(label, UNTUNED):
            grouped.setdefault(task, {}).setdefault((run["workers"] > 2, label), []).append(run)
    return {
        task: {
            label: Row(found, is_tuned=chosen is None or label in chosen.get(task, {}))
            for (_, label), found in sorted(by_label.items(), key=lambda item: item[0][0])
        }
        for task, by_label in grouped.items()
    }


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
    ddp = rows.get(label_of(DDP, row.workers)) or rows.get(DDP)
    return [
        row.name,
        row.described,
        "not reached" if row.median_s is None else f"{row.median_s:.1f}{spread}",
        _number(ratio(row, rows[ALONE].median_s if ALONE in rows else None)),
        _number(ratio(row, baseline_s(rows))),
        _number(ratio(row, ddp.median_s if ddp else None)),
        "" if row.samples is None else f"{row.samples:,.0f}",
        quality,
    ]


INTRODUCTION = """# Does it pay?

Time to the same quality, for rules on 2 workers unless a row says 4, one process, and DistributedDataParallel over
gloo, on a machine with 2 cores. This page is generated from `docs/results.json` by
`python benchmarks/reproduce --report`. On a machine of yours, `make reproduce` measures the fast part,
`python benchmarks/reproduce --full` all of it. The docstring of `benchmarks/reproduce/__main__.py` states the grid by
which every contestant was tuned, `benchmarks/reproduce/tasks.py` describes the experiments.

*Seconds to target* are medians over the seeds, with the range. They count from the first step, without imports and
evaluation. *Better one* is the faster of one process on one core and on all cores, with the task's batch: below 1 the
workers are faster. *Batch x 2* is one process with twice the batch, which is what two workers with whole batches have
together: where it is faster, a larger batch pays more than a second worker. *Final* is the quality after the same
number of samples for all.
"""
HEADINGS = (
    "contestant", "setting", "seconds to target", "/ 1 process", "/ better one", "/ DDP", "samples to target", "final",
)  # fmt: skip
SUMMARY = """Seconds to the target, divided by those of the faster single process (on one core or on all): below 1 the
workers are faster. A star marks a final quality below that of every seed of one process; a dash, a target that was not
reached with every seed.
"""
PLACES = {
    "unequal": """## One worker is half as fast

Worker 1 takes twice as long for each step. The settings are those that were chosen for equal workers. Workers of
asynchronous rules divide the samples by their speed (`worker.sampler(data, balance=True)`), those of synchronous rules
and of DDP equally. The two processes together have 1.5 times the speed of one.
""",
    "network": """## A network of 1 Gbit/s between the workers

Each worker is a machine with an address, in a network namespace, with a round trip of 0.5 ms. The switch between them
is a program that takes part of the same two cores: compare the contestants with each other. Ratios to one process,
which needs no switch, are too high. The settings are those that were chosen on one machine.
""",
}


def write_report(runs: dict[str, Run], chosen: Chosen, *, to_docs: bool) -> None:
    """Print the tables; with `to_docs` write docs/results.md and its pictures too."""
    tasks, console = rows_of(runs.values(), chosen), Console(width=150)
    for task, rows in tasks.items():
        first = next(iter(rows.values())).runs[0]
        table = Table(*HEADINGS, title=f"{task}: {first['metric']} {first['target']:g}", title_justify="left")
        for row in rows.values():
            table.add_row(*cells(row, rows))
        console.print(table)
    page = page_of(runs, chosen)
    if to_docs:
        (ROOT / "docs" / "results.md").write_text(page)
        for task, rows in tasks.items():
            draw(rows, ROOT / "docs" / "pictures" / f"results-{_slug(task)}.png")
        console.print("written: docs/results.md", style="dim")


def page_of(runs: dict[str, Run], chosen: Chosen) -> str:
    """docs/results.md. The cases that do not pay come first."""
    tuned, untuned = rows_of(runs.values(), chosen), rows_of(runs.values())
    for task, rows in untuned.items():  # the single processes and DDP are tuned, to be beaten honestly
        of_task = tuned.get(task, {})  # in the same order
        peers = {name: row for name, row in of_task.items() if row.contestant in PEERS}
        rules = {name: rows[name] for name in [*of_task, *rows] if name in rows and rows[name].contestant in NEWCOMERS}
        untuned[task] = peers | rules
    lines = [INTRODUCTION]
    if missing := [task for task in TASKS if task not in tuned]:
        lines += [f"Tasks that were not measured: {', '.join(missing)}.", ""]
    if missing := [f"`{rule}`" for rule in RULES if not any(rule in rows for rows in tuned.values())]:
        lines += [f"Rules that were not measured: {', '.join(missing)}.", ""]
    lines += ["## Where it does not pay", "", "Tuned by the grid:", "", *_losses(tuned), ""]
    lines += ["Untuned, with the learning rate and the batch of one process:", "", *_losses(untuned), ""]
    lines += ["## In short", "", SUMMARY, "Every contestant tuned by the same grid:", "", *_summary(tuned), ""]
    lines += _doubts(tuned)
    lines += default_lines(tuned, untuned)
    lines += [
        "Rules untuned: `maniple run -n 2 --rule RULE` with the learning rate and the batch of one process, and the "
        "rule's own defaults. One process and DDP are tuned.", "", *_summary(untuned), "",
    ]  # fmt: skip
    for task, rows in tuned.items():
        first = next(iter(rows.values())).runs[0]
        sign = "at least" if first["metric"] == "accuracy" else "at most"
        target = f"{first['target']:.1%}" if first["metric"] == "accuracy" else f"{first['target']:g}"
        lines += [f"## {task}", "", f"Target: {first['metric']} of the test set {sign} {target}.", "", *_table(rows)]
        lines += ["", f"![learning curves of {task}](pictures/results-{_slug(task)}.png)", ""]
        if rules := {name: row for name, row in untuned.get(task, {}).items() if row.contestant not in PEERS}:
            lines += ["Untuned:", "", *_table(rules, untuned[task]), ""]
    for place, text in PLACES.items():
        if found := rows_of(runs.values(), chosen, place):
            lines += [text]
            for task, rows in found.items():
                peers = {name: row for name, row in tuned.get(task, {}).items() if name in {ALONE, ALL_CORES}}
                lines += [f"**{task}**", "", *_table(rows, peers | rows), ""]
    lines += learning_rates(runs.values()) + periods(runs.values(), chosen) + lengths(runs.values(), chosen)
    return "\n".join([*lines, *earlier_tables(runs)]).rstrip() + "\n"


def _table(rows: dict[str, Row], all_rows: dict[str, Row] | None = None) -> list[str]:
    """The rows as Markdown, compared with the single processes and DDP among `all_rows`."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return lines + ["| " + " | ".join(cells(row, all_rows or rows)) + " |" for row in rows.values()]


def _summary(tasks: dict[str, dict[str, Row]]) -> list[str]:
    """A line for each contestant, a column for each task."""
    names = dict.fromkeys(name for rows in tasks.values() for name in rows)
    lines = [f"| contestant | {' | '.join(tasks)} |", "|" + "---|" * (len(tasks) + 1)]
    for name in names:
        cells_of = [_summary_cell(rows.get(name), rows) for rows in tasks.values()]
        lines.append(f"| {name} | {' | '.join(cells_of)} |")
    return lines


def _summary_cell(row: Row | None, rows: dict[str, Row]) -> str:
    if row is None:
        return ""
    share = ratio(row, baseline_s(rows))
    return "-" if share is None else f"{share:.2f}{'*' if is_worse(row, rows) else ''}"


def is_worse(row: Row, rows: dict[str, Row]) -> bool:
    """Whether the median quality at the end is below that of every seed of one process."""
    alone = rows.get(ALONE) or rows.get(ALL_CORES)
    if alone is None or not alone.finals or not row.finals:
        return False
    final = statistics.median(row.finals)
    return final < min(alone.finals) if row.runs[0]["metric"] == "accuracy" else final > max(alone.finals)


def _losses(tasks: dict[str, dict[str, Row]]) -> list[str]:
    lines: list[str] = []
    for task, rows in tasks.items():
        base = baseline_s(rows)
        if base is None:
            lines.append(f"- **{task}**: one process did not reach the target with every seed, so nothing is compared.")
            continue
        default = rows.get(DEFAULT)
        for name in (TWICE, TWICE_ALL_CORES):
            share, least = ratio(rows[name], base) if name in rows else None, ratio(default, base) if default else None
            if share is not None and (least is None or share < least):
                found = "did not reach the target" if least is None else f"{least:.2f}"
                lines.append(f"- **{task}, {name}**, without workers: {share:.2f}; `{DEFAULT}`: {found}.")
        for name, row in rows.items():
            share = ratio(row, base)
            if row.contestant in PEERS:
                continue
            if share is None:
                lines.append(f"- **{task}, {name}**: the target was not reached with every seed.")
            elif share > PAYS:
                lines.append(f"- **{task}, {name}**: {share:.2f} of the time of the better single process.")
    return lines or ["Every rule was faster than one process in every task."]


def _doubts(tasks: dict[str, dict[str, Row]]) -> list[str]:
    """A warning of rows that are faster than the single process beside them could explain."""
    lines = [
        f"- {task}, {name}: {row.rate:,.0f} samples/s, where one process makes {rows[ALONE].rate:,.0f}"
        for task, rows in tasks.items()
        for name, row in rows.items()
        if ALONE in rows and row.contestant not in PEERS and row.rate > MOST_SPEED * row.workers * rows[ALONE].rate
    ]
    return ["**Not measured together**, or the speed of the machine has changed:", "", *lines, ""] if lines else []


DEFAULT_TEXT = """The default on one machine, `bsp`, with the settings of this table. *Time* to the target follows
from *speed*, samples per second, and from *samples* to the target. The limit of the speed is that of processes that do
not wait for each other, each as fast as one alone. *Least*: the time that such processes would need, as a share of that
of one process on all cores, for the same number of samples. *Untuned*: the time / all cores with the learning rate and
the batch of one process; it is below that of the chosen setting where the one seed of the grid has misled. *Alone*: one
process on one core, and its final quality.

| task | time / all cores | untuned | least | / DDP | speed / all cores | / limit | samples / alone | final | alone |
|---|---|---|---|---|---|---|---|---|---|"""
REASONS = """Where `bsp` takes much more than half of the time, the table shows why. *Least*: torch's threads make one
process faster on all cores, so that workers without any cost could gain no more than that column says. *Speed / limit*
is what the barriers cost, and, if the batch is divided, that a step on half of a batch takes more than half of the
time. *Samples* above 1: a step on whole batches has twice the batch of one process, and may learn less from each
sample.
"""
DEFAULT = "bsp"  # of workers on one machine, see `Job.with_default_rule`


def default_lines(tuned: dict[str, dict[str, Row]], untuned: dict[str, dict[str, Row]]) -> list[str]:
    """The default rule against one process with as many threads and against DDP, and where the difference is from."""
    lines: list[str] = []
    for task, rows in tuned.items():
        if {DEFAULT, ALONE, ALL_CORES} <= rows.keys():
            row, alone, all_cores = rows[DEFAULT], rows[ALONE], rows[ALL_CORES]
            newcomer = untuned.get(task, {}).get(DEFAULT)
            numbers = [
                ratio(row, all_cores.median_s),
                ratio(newcomer, all_cores.median_s) if newcomer else None,
                all_cores.rate / (row.workers * alone.rate),
                ratio(row, rows[DDP].median_s if DDP in rows else None),
                row.rate / all_cores.rate,
                row.rate / (row.workers * alone.rate),
                row.samples / alone.samples if row.samples and alone.samples else None,
            ]
            finals = [cells(one, rows)[-1] for one in (row, alone)]
            lines.append(f"| {task} | {' | '.join([*map(_number, numbers), *finals])} |")
    if not lines:
        return []
    return [DEFAULT_TEXT, *lines, "", REASONS]


def draw(rows: dict[str, Row], path: Path) -> None:
    """Draw the learning curves of all contestants: the median over the seeds, and the target."""
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    first = next(iter(rows.values())).runs[0]
    for row, colour in zip((row for row in rows.values() if len(row.finals) == len(row.runs)), COLOURS, strict=False):
        # Medians at equal numbers of samples, since the runs of one contestant differ in speed.
        curves = [np.array(run["curve"]).T for run in row.runs]
        counts = np.linspace(0, min(samples[-1] for _, samples, _ in curves), 200)
        times = np.median([np.interp(counts, samples, seconds) for seconds, samples, _ in curves], 0)
        values = [np.interp(counts, samples, reached) for _, samples, reached in curves]
        is_main = row.name in PEERS | {"bsp", "localsgd", "easgd"}
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
    if ALONE in rows:  # a contestant that takes much longer would leave no room for the others
        axes.set_xlim(0, 1.5 * max(run["curve"][-1][0] for run in rows[ALONE].runs))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"{first['metric']} of the test set")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _slug(task: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in task).strip("-")
