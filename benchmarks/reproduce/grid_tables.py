"""Tables of what a learning rate, a batch, a period, an alpha and the length of a run change."""

import statistics
from collections.abc import Iterable
from typing import Any

from earlier_tables import ALONE
from tasks import EPOCHS

TUNING_SEED = 100  # of the runs that choose the settings
OF_LENGTHS = (ALONE, "bsp", "easgd")  # the contestants of shorter and longer runs

Run = dict[str, Any]
Chosen = dict[str, dict[str, Any]]  # the tuned settings by task and contestant

RATES = """## Learning rate and batch

Samples to the target on 2 workers, divided by those of one process at its best learning rate: near 1, their samples
count as much as in plain training. *Whole*: each worker has the batch of one process; *divided*: the workers share it.
A dash: not reached; empty: not tried. These are the runs that chose the settings, one seed each, with default periods.
"""
# Learning rate, divided batch. Rates beyond these are tried only where the best is at the edge.
RATE_COLUMNS = ((0.5, None), (1.0, None), (2.0, None), (4.0, None), (0.5, True), (1.0, True), (2.0, True))


def learning_rates(runs: Iterable[Run]) -> list[str]:
    """Tables of what a change of the learning rate and of the batch does to each contestant."""
    found: dict[str, dict[str, dict[tuple[float, bool | None], Run]]] = {}
    for run in runs:
        setting = run.get("setting", {})
        is_tuning = run.get("seed") == TUNING_SEED and run["workers"] <= 2 and not run["data"]
        if is_tuning and setting.get("every") is None and setting.get("alpha") is None:
            of_task = found.setdefault(run["task"], {}).setdefault(run["contestant"], {})
            of_task[setting["lr"], setting["split"]] = run
    lines: list[str] = []
    for task, contestants in found.items():
        alone = [run["to_target_samples"] for run in contestants.get(ALONE, {}).values()]
        best = min((samples for samples in alone if samples is not None), default=None)
        if best is None:
            continue
        lines += [f"**{task}**", ""]
        lines += ["| contestant | whole, lr x 0.5 | lr x 1 | lr x 2 | lr x 4 | divided, lr x 0.5 | lr x 1 | lr x 2 |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for name, by_setting in contestants.items():
            row = [by_setting[key]["to_target_samples"] if key in by_setting else 0 for key in RATE_COLUMNS]
            words = ["" if samples == 0 else "-" if samples is None else f"{samples / best:.2f}" for samples in row]
            lines.append(f"| {name} | {' | '.join(words)} |")
        lines.append("")
    return [RATES, *lines] if lines else []


PERIODS = """## Period and alpha

Seconds to the target with other periods, divided by those with the default (10 steps, for Downpour 1), at the learning
rate and batch that were chosen; for EASGD also with alpha 0.2, divided by those with 0.9 / workers at the period that
was chosen. A dash: not reached; where the default did not reach it, the seconds of the others. One seed each.

| task | rule | 3 steps | 10 steps | 30 steps | alpha 0.2 |
|---|---|---|---|---|---|"""


def periods(runs: Iterable[Run], chosen: Chosen) -> list[str]:
    """A table of what other periods and alphas do to each rule."""
    found: dict[tuple[str, str], dict[tuple[int | None, str | None], float | None]] = {}
    for run in runs:
        best = chosen.get(run["task"], {}).get(run.get("contestant", ""))
        if run.get("seed") == TUNING_SEED and best and not run["data"] and run["workers"] == 2:
            setting = run["setting"]
            if (setting["lr"], setting["split"]) == (best["lr"], best["split"]):
                of_rule = found.setdefault((run["task"], run["contestant"]), {})
                of_rule[setting["every"], setting["alpha"]] = run["to_target_s"]
    lines: list[str] = []
    for (task, name), times in found.items():
        base_s = times.get((None, None))
        if len(times) < 2 or not any(times.values()):
            continue
        every = chosen[task][name]["every"]  # alpha was tried at the chosen period
        base_alpha_s = times.get((every, None))
        row = [_share(times, (steps, None), base_s) for steps in (3, 10, 30)]
        if base_s is None and not name.startswith("downpour"):
            row[1] = "-"  # the default itself
        row.append(_share(times, (every, "0.2"), base_alpha_s))
        lines.append(f"| {task} | {name} | {' | '.join(row)} |")
    return [PERIODS, *lines, ""] if lines else []


def _share(
    times: dict[tuple[int | None, str | None], float | None], key: tuple[int | None, str | None], base_s: float | None
) -> str:
    """A time as a share of another, or in seconds if there is no other; a dash if the target was not reached."""
    if key not in times:
        return ""
    if (found := times[key]) is None:
        return "-"
    return f"{found:.1f} s" if base_s is None else f"{found / base_s:.2f}"


LENGTHS = """## Short and long runs

The quality at the end of runs of other lengths, whose learning rate decreases to zero over the run, with the settings
that were chosen for the length in bold. Medians over the seeds, of which other lengths may have fewer.

| task | epochs | 1 process | bsp | easgd |
|---|---|---|---|---|"""


def lengths(runs: Iterable[Run], chosen: Chosen) -> list[str]:
    """A table of the final quality against the length of the run."""
    found: dict[str, dict[int, dict[str, list[Run]]]] = {}
    for run in runs:
        name = run.get("contestant", "")
        is_usual = name in OF_LENGTHS and run["seed"] != TUNING_SEED and not run["data"] and not run["place"]
        is_usual = is_usual and run["workers"] <= 2
        if is_usual and run["setting"] == chosen.get(run["task"], {}).get(name) and run["final"] is not None:
            found.setdefault(run["task"], {}).setdefault(run.get("epochs") or 0, {}).setdefault(name, []).append(run)
    lines: list[str] = []
    for task, by_epochs in found.items():
        for epochs, by_name in sorted(by_epochs.items(), key=lambda item: item[0] or EPOCHS[task]):
            cells = [_final(by_name.get(name, [])) for name in OF_LENGTHS]
            length = str(epochs) if epochs else f"**{EPOCHS[task]}**"
            if len(by_epochs) > 1:
                lines.append(f"| {task} | {length} | {' | '.join(cells)} |")
    return [LENGTHS, *lines, ""] if lines else []


def _final(runs: list[Run]) -> str:
    """The median quality at the end."""
    if not runs:
        return ""
    final = statistics.median(run["final"] for run in runs)
    return f"{final:.1%}" if runs[0]["metric"] == "accuracy" else f"{final:.3f}"
