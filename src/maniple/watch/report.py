"""Reports: one HTML page with data and scripts in it, that needs neither a server nor a network."""

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maniple.errors import InvalidArgument
from maniple.monitor.target import Target
from maniple.monitor.value_series import WINDOW
from maniple.record.times import PARTS, UNMEASURED, WORDS
from maniple.watch import overlay
from maniple.watch.compare import baseline, cells, differences, speedups, summarize
from maniple.watch.plot import label, write_text
from maniple.watch.run_reader import Run


def write(
    runs: list[Run],
    path: Path,
    *,
    value: str = "loss",
    target: Target | None = None,
    against: str = "time",
    window: int = WINDOW,
    is_log: bool = False,
) -> None:
    """Write the report of `runs` to `path`; the page opens with the axis `against`."""
    page = (resources.files("maniple.watch") / "report.html").read_text()
    data = contents(runs, value, target=target, window=window) | {"against": against, "log": is_log}
    text = msgspec.json.encode(data, enc_hook=str).decode().replace("<", "\\u003c")  # no name can end the script
    before, _, rest = page.partition("/*PLOTLY*/")
    middle, _, after = rest.partition("/*DATA*/")
    script = plotly_js().read_text().replace("</script", "<\\/script")
    write_text(path, f"{before}{script}{middle}{text}{after}")


def contents(runs: list[Run], value: str, *, target: Target | None = None, window: int = WINDOW) -> dict[str, Any]:
    """All that the page shows, for JSON."""
    unit = overlay.time_unit(runs)[1]
    known = overlay.known_axes(runs)
    base = baseline(runs)
    return {
        "value": value,
        "axes": {against: overlay.axis_title(against, unit) for against in known},
        "runs": [
            {
                "name": run.name,
                "label": label(run),
                "colour": overlay.colour(i),
                "note": "" if run.overall.measures_data else UNMEASURED,
            }
            for i, run in enumerate(runs)
        ],
        "lines": _lines(runs, value, known, window),
        "bands": _bands(runs, value, known, window),
        "target": None if target is None else {"y": target.value, "text": f"target {target.name} {target.text}"},
        "marks": [] if target is None else _marks(runs, target, known, window),
        "shares": {part: [100 * overlay.shares(run)[part] for run in runs] for part in PARTS},
        "parts": overlay.PART_COLOURS,
        "words": WORDS,
        "speedups": speedups(runs),
        "baseline": base.title if base else "",
        "rule": overlay.RULE,
        "ideal": overlay.IDEAL,
        "styles": [style for _, style in overlay.STYLES],
        "markers": [marker for _, marker in overlay.MARKERS],
        "table": [cells(one, value, target) for one in summarize(runs, value, target=target, window=window)],
        "differences": differences(runs),
        "settings": [run.settings for run in runs],
    }


def _lines(runs: list[Run], value: str, known: list[str], window: int) -> list[dict[str, Any]]:
    by_axis = {against: overlay.lines(runs, value, against=against, window=window) for against in known}
    return [
        {
            "run": line.run,
            "who": line.who,
            "strong": line.is_strong,
            "y": _rounded(line.ys),
            "x": {against: _rounded(lines[i].xs) for against, lines in by_axis.items()},
        }
        for i, line in enumerate(by_axis["time"])
    ]


def _bands(runs: list[Run], value: str, known: list[str], window: int) -> list[dict[str, Any]]:
    by_axis = {against: overlay.bands(runs, value, against=against, window=window) for against in known}
    return [
        {
            "run": band.run,
            "who": band.who,
            "low": _rounded(band.low),
            "high": _rounded(band.high),
            "x": {against: _rounded(bands[i].xs) for against, bands in by_axis.items()},
        }
        for i, band in enumerate(by_axis["time"])
    ]


def _marks(runs: list[Run], target: Target, known: list[str], window: int) -> list[dict[str, Any]]:
    by_axis = {against: overlay.target_marks(runs, target, against=against, window=window) for against in known}
    return [
        {"run": mark.run, "text": mark.text, "y": mark.y, "x": {name: marks[i].x for name, marks in by_axis.items()}}
        for i, mark in enumerate(by_axis["time"])
    ]


def _rounded(values: np.ndarray) -> list[float]:
    """To six digits: more cannot be seen and would make the page large."""
    with np.errstate(divide="ignore"):
        digits = 5 - np.floor(np.log10(np.abs(values)))
    scale = 10.0 ** np.where(np.isfinite(digits), np.clip(digits, -300, 300), 0)
    return (np.round(values * scale) / scale).tolist()


def plotly_js() -> Path:
    """plotly.js, which the plotly wheel contains; located without importing plotly, which takes a second."""
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if path is None or not path.exists():
        raise InvalidArgument(
            "charts in HTML are not possible: plotly is not installed. `pip install 'maniple[plot]'` installs it, or "
            "draw a .png instead."
        )
    return path
