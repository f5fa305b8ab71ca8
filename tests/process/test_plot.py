"""Real runs of one and of two workers, drawn, compared and exported."""

import csv
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from maniple.record import read_events
from tests.conftest import require
from tests.process.conftest import BARE, MANIPLE, Run
from tests.waiting import PATIENCE_S

CHROMIUM = Path("/usr/bin/chromium")
ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCRIPT = """
    import time
    import numpy as np
    import maniple

    worker = maniple.join()
    x = {"w": np.full(1000, 4.0)}
    replica = worker.share(x)
    for indices in worker.sampler(600).batches(10):
        time.sleep(0.01)
        x["w"] *= 0.97
        replica.step()
        worker.log(loss=float(np.square(x["w"]).mean()))
    with replica.center():
        worker.log(val_loss=float(np.square(x["w"]).mean()))
"""


class Pair(NamedTuple):
    folder: Path
    one: Path
    two: Path
    table: Path  # exported while the second run went on


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "script.py").write_text("\n".join(line[4:] for line in SCRIPT.splitlines()))
    for name, workers in (("one", 1), ("two", 2)):
        command = [str(MANIPLE), "run", "--name", name, "-n", str(workers), "script.py"]
        run = Run(folder, name, command, BARE)
        if workers == 2:
            run.await_event(0, "log")
            followed = subprocess.run(
                [MANIPLE, "export", run.folder, "--to", "csv", "--follow", "-o", folder / "table"],
                capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
            assert followed.returncode == 0, followed.stderr
        assert run.wait() == 0, run.output
    return Pair(folder, folder / "runs/one", folder / "runs/two", folder / "table/values.csv")


def maniple(*words: object, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([MANIPLE, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_runs_are_drawn_on_one_clock(pair, tmp_path, monkeypatch):
    require("matplotlib", find_spec("matplotlib") is not None, "matplotlib is not installed")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    assert maniple("plot", pair.one, pair.two, cwd=tmp_path) == "drawn: plot.png\n"
    picture = (tmp_path / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    words = ("plot", pair.two, "--value", "val_loss", "--against", "epochs", "--log", "-o", "center.svg")
    maniple(*words, cwd=tmp_path)
    drawing = (tmp_path / "center.svg").read_text()
    assert drawing.startswith("<?xml") and "</svg>" in drawing


def test_a_value_that_was_not_logged_is_refused_with_those_that_were(pair, tmp_path):
    printed = maniple("plot", pair.one, "--value", "valloss", cwd=tmp_path, code=2)
    assert "Logged values: loss, val_loss. Did you mean 'val_loss'?" in printed


def test_a_report_is_one_page_that_needs_no_network(pair, tmp_path):
    require("chromium", CHROMIUM.exists() and find_spec("playwright") is not None, "no Chromium, or no playwright")
    require("plotly", find_spec("plotly") is not None, "plotly is not installed")
    from playwright.sync_api import sync_playwright

    maniple("plot", pair.one, pair.two, "-o", "report.html", cwd=tmp_path)
    asked: list[str] = []
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        page = browser.new_page(color_scheme="dark")
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("#speedup .scatterlayer .trace")
        lines = page.locator("#value .scatterlayer .trace")
        assert lines.count() == 5  # three workers, two means
        page.uncheck("#workers")
        page.select_option("#against", "samples")
        page.wait_for_function("document.querySelectorAll('#value .scatterlayer .trace').length == 2")
        assert "samples of all workers" in page.locator("#value").inner_text()
        assert page.locator("#table").inner_text().split()[:3] == ["run", "one", "two"]
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        browser.close()
    assert errors == []
    assert asked == [(tmp_path / "report.html").as_uri()]


def test_two_runs_are_compared(pair, tmp_path):
    found = json.loads(maniple("compare", pair.one, pair.two, "--target", "8", "--json", cwd=tmp_path))
    one, two = found["runs"]
    assert (one["name"], one["workers"], one["samples"], one["speedup"], one["exit_code"]) == ("one", 1, 600, 1.0, 0)
    assert (two["workers"], two["rule"], two["samples"]) == (2, "easgd", 600)
    assert two["speedup"] == pytest.approx(two["rate"] / one["rate"])
    assert 0 < two["busy_workers"] <= 2
    assert one["target_s"] > 0 and two["target_s"] > 0 and found["falling"] is True
    assert found["differences"] == {"workers": [1, 2]}
    table = maniple("compare", pair.one, pair.two, "--target", "8", cwd=tmp_path)
    assert "time to loss at or below 8" in table and "settings that differ" in table
    typo = subprocess.run([MANIPLE, "compare", pair.one, "--value", "los"], capture_output=True, text=True, timeout=60)
    assert typo.returncode == 2 and "Did you mean 'loss'?" in typo.stderr


def test_one_worker_is_measured_before_the_run_and_the_run_stops_at_its_target(pair, tmp_path):
    options = [
        "--baseline",
        "0.3",
        "--target",
        "loss=8",
        "--stop-at-target",
        "--name",
        "both",
        "--runs",
        tmp_path / "runs",
    ]
    printed = maniple("run", "-n", 2, *options, pair.folder / "script.py", cwd=tmp_path)
    both, alone = (
        json.loads((tmp_path / "runs" / name / "run.json").read_text()) for name in ("both", "both-baseline")
    )
    assert (alone["asked"]["workers"], alone["asked"]["total_duration"], alone["exit_code"]) == (1, 0.3, 0)
    assert (tmp_path / "runs/last").resolve().name == "both"
    base, result = both["baseline"], both["result"]
    assert (base["name"], base["workers"], base["unit"]) == ("both-baseline", 1, "samples")
    assert base["rate"] == pytest.approx(alone["result"]["rate"])
    assert result["speedup"] == pytest.approx(result["rate"] / base["rate"])
    assert result["target"]["reached_s"] > 0 and result["target"]["falling"] is True
    assert "measuring the baseline: one worker alone for 0.3 s" in printed
    assert f"speed-up {result['speedup']:.2f}: " in printed and "target loss 8: reached after " in printed
    shown = json.loads(maniple("watch", "--once", "--json", tmp_path / "runs/both", cwd=tmp_path).splitlines()[-1])
    assert shown["totals"]["speedup"] == pytest.approx(result["speedup"])
    assert shown["totals"]["target_s"] == pytest.approx(result["target"]["reached_s"])
    (one,) = json.loads(maniple("compare", tmp_path / "runs/both", "--json", cwd=tmp_path))["runs"]
    assert (one["baseline"], one["speedup"]) == ("both-baseline", pytest.approx(result["speedup"]))
    assert one["target_s"] == pytest.approx(result["target"]["reached_s"])


def test_a_run_stops_at_its_target_with_exit_code_0(tmp_path):
    script = SCRIPT.replace("worker.sampler(600)", "worker.sampler(600_000)")  # an hour and a half
    (tmp_path / "script.py").write_text("\n".join(line[4:] for line in script.splitlines()))
    printed = maniple("run", "--target", "loss=8", "--stop-at-target", "--name", "run", "script.py", cwd=tmp_path)
    assert "everybody stops: target loss 8: reached after" in printed


def test_an_export_that_follows_a_run_has_all_of_its_rows(pair):
    with pair.table.open(newline="") as file:
        found = {(row["worker"], row["timestamp"], row["name"]): row for row in csv.DictReader(file)}
    logged = [
        (str(rank) if "center" not in row else "center", row)
        for rank in (0, 1)
        for row in read_events(pair.two / f"events/worker-{rank}.jsonl")
        if row["event"] == "log"
    ]
    assert len(logged) >= 62  # leases of the two may end in smaller batches
    for who, row in logged:
        name = "val_loss" if who == "center" else "loss"
        line = found[who, repr(row["timestamp"]), name]
        assert (float(line["value"]), int(line["step"])) == (row[name], row["step"])


def test_weights_and_biases_takes_a_run_and_sends_nothing(pair, tmp_path, monkeypatch):
    require("wandb", find_spec("wandb") is not None, "wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert "exported" in maniple("export", pair.two, "--to", "wandb", "-o", "kept", cwd=tmp_path)
    (kept,) = tmp_path.glob("kept/wandb/offline-run-*/*.wandb")
    exported = kept.read_bytes()
    assert all(name in exported for name in (b"worker-0/loss", b"worker-1/loss", b"center/val_loss"))
