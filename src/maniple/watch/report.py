"""A report: one page of HTML with everything in it, that needs neither a server nor a network."""

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maniple.errors import InvalidArgument
from maniple.record.times import PARTS, UNMEASURED, WORDS
from maniple.watch import overlay, palette
from maniple.watch.canvas import write_text
from maniple.watch.compare import cells, differences, summarize
from maniple.watch.course import WINDOW
from maniple.watch.plot import label
from maniple.watch.runs import Run


def write(
    runs: list[Run],
    path: Path,
    *,
    value: str = "loss",
    against: str = "time",
    window: int = WINDOW,
    is_log: bool = False,
) -> None:
    """Write the report of `runs` to `path`; the page begins with the axis `against`."""
    page = (resources.files("maniple.watch") / "report.html").read_text()
    told = contents(runs, value, window=window) | {"against": against, "log": is_log}
    text = msgspec.json.encode(told, enc_hook=str).decode().replace("<", "\\u003c")  # no name can end the script
    before, _, rest = page.partition("/*PLOTLY*/")
    middle, _, after = rest.partition("/*DATA*/")
    write_text(path, f"{before}{plotly_js()}{middle}{text}{after}")


def contents(runs: list[Run], value: str, *, window: int = WINDOW) -> dict[str, Any]:
    """All that the page shows, as JSON knows it."""
    unit = overlay.time_unit(runs)[1]
    known = overlay.known_axes(runs)
    base = overlay.baseline(runs)
    return {
        "value": value,
        "axes": {against: overlay.axis_words(against, unit) for against in known},
        "runs": [
            {
                "name": run.name,
                "label": label(run),
                "colour": palette.colour(i),
                "note": "" if run.overall.measures_data else UNMEASURED,
            }
            for i, run in enumerate(runs)
        ],
        "lines": _lines(runs, value, known, window),
        "shares": {part: [100 * overlay.shares(run)[part] for run in runs] for part in PARTS},
        "parts": palette.PARTS,
        "words": WORDS,
        "speedups": overlay.speedups(runs),
        "baseline": base.title if base else "",
        "rule": palette.RULE,
        "table": [cells(one, value, None) for one in summarize(runs, value, window=window)],
        "differences": differences(runs),
        "settings": [run.settings for run in runs],
    }


def _lines(runs: list[Run], value: str, known: list[str], window: int) -> list[dict[str, Any]]:
    drawn = {against: overlay.lines(runs, value, against=against, window=window) for against in known}
    return [
        {
            "run": line.run,
            "who": line.who,
            "strong": line.is_strong,
            "y": _rounded(line.ys),
            "x": {against: _rounded(lines[i].xs) for against, lines in drawn.items()},
        }
        for i, line in enumerate(drawn["time"])
    ]


def _rounded(values: np.ndarray) -> list[float]:
    """To six digits: more cannot be seen, and make a large page."""
    with np.errstate(divide="ignore"):
        digits = 5 - np.floor(np.log10(np.abs(values)))
    scale = 10.0 ** np.where(np.isfinite(digits), np.clip(digits, -300, 300), 0)
    return (np.round(values * scale) / scale).tolist()


def plotly_js() -> str:
    """The script that draws, which the plotly wheel carries; found without importing plotly, which is slow."""
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if path is None or not path.exists():
        raise InvalidArgument(
            "a report cannot be made: plotly is not installed. `pip install 'maniple[plot]'` brings it, or draw a .png."
        )
    return path.read_text().replace("</script", "<\\/script")
