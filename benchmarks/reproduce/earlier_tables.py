"""The tables of the systems that came before, with their own numbers beside ours."""

import statistics
from typing import Any

ALONE = "1 process"
PLATOON = """## Platoon's table: an LSTM, EASGD every 10 steps

Seconds for a fixed number of minibatches, 500 here. Platoon's are from two K80 with 4 GPUs; here, 3 and 4 workers share
2 cores.

| | normal | 1 worker | 2 workers | 3 workers | 4 workers |
|---|---|---|---|---|---|"""
PARALLEL_TRAINING = """## Parallel-training's table: seconds per 5,120 images

The networks of `examples/models` for images of 32 x 32 pixels, on a CPU with 2 cores, which 4 workers share.
Parallel-training's numbers (BSP) are for ImageNet, on GPUs; it left EASGD "to be added".

| network | 1 process | BSP, 2 | BSP, 4 | EASGD, 2 | EASGD, 4 | theirs, 1 GPU | 2 GPUs | 4 GPUs |
|---|---|---|---|---|---|---|---|---|"""
SYNKHRONOS = """## Synkhronos' experiment: the speed-up of a pool against the batch

A step of an MLP (784-512-512-10) on a pool of 2 workers, against one process with one thread. Synkhronos reports the
trend, and 7.5 times one GPU on 8.

| batch | one process, images/s | pool, images/s | speed-up |
|---|---|---|---|"""


def earlier_tables(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of all tables that were measured."""
    passes: dict[tuple[str, str, int], list[float]] = {}
    for run in runs.values():
        if run.get("epochs") == 1 and (run["contestant"] != "easgd" or run["setting"]["every"] == 10):
            passes.setdefault((run["task"], run["contestant"], run["workers"]), []).append(run["seconds"])
    times = {key: statistics.median(values) for key, values in passes.items()}
    lines: list[str] = []
    if (normal := times.get(("reviews", ALONE, 1))) is not None:
        ours = [normal, *(times.get(("reviews", "easgd", count)) for count in (1, 2, 3, 4))]
        lines += [
            PLATOON,
            _line("ours, s", ours, ".2f"),
            _line("ours, speed-up", [normal / one if one else None for one in ours], ".2f"),
            _line("Platoon, s", [870, 912, 477, 329, 254], ".0f"),
            _line("Platoon, speed-up", [1.00, 0.95, 1.82, 2.65, 3.42], ".2f"),
            "",
        ]
    if networks := [name for name in ("alexnet", "googlenet", "vgg", "resnet") if (name, ALONE, 1) in times]:
        lines.append(PARALLEL_TRAINING)
        theirs = {"alexnet": [31.4, 16.8, 9.2], "googlenet": [147.2, 81.7, 57.2], "vgg": [410.3, 216.0, 113.8]}
        for name in networks:
            keys = [(name, ALONE, 1), *((name, rule, count) for rule in ("bsp", "easgd") for count in (2, 4))]
            lines.append(_line(name, [*map(times.get, keys), *theirs.get(name, [None] * 3)], ".1f"))
        lines.append("")
    if "pool" in runs:
        lines.append(SYNKHRONOS)
        for row in runs["pool"]["rows"]:
            lines.append(f"| {row['batch']} | {row['one']:,.0f} | {row['pool']:,.0f} | {row['speed-up']:.2f} |")
        lines.append("")
    return lines


def _line(name: str, values: list[float | None], form: str) -> str:
    return f"| {name} | " + " | ".join("" if value is None else format(value, form) for value in values) + " |"
