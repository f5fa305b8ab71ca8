"""Runs drawn and compared: what the lines, speed-ups and tables say, from rows that the tests write."""

import importlib.util
import json
import math
import os
import re
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from maniple.cli import cli
from maniple.connection.find_host import find_host
from maniple.errors import InvalidArgument
from maniple.monitor.target import parse_target
from maniple.monitor.value_series import running_mean, value_series
from maniple.watch import overlay, report
from maniple.watch.compare import NOT_GIVEN, baseline, cells, differences, resolve_target, speedups, summarize
from maniple.watch.plot import draw, label, shortened
from maniple.watch.run_reader import check_value, open_runs
from tests.unit.engines import engine
from tests.written import T0, Written


@pytest.fixture
def make(tmp_path):
    """Makes the folder of a run of so many workers that trained for 10 s; `rate` is of one of them."""

    def make(name="run", workers=1, rate=10, rule="EASGD(alpha='auto')", losses=(4.0, 3.0, 2.0, 1.0), **asked):
        written = Written(tmp_path / name)
        written.folder.describe(asked={"workers": workers, "rule": None, **asked}, exit_code=0, versions={"numpy": "2"})
        for rank in range(workers):
            written.row(rank, "join", 0)
            written.row(rank, "share", 0, rule=rule, pace="Every(10)", wire="float32")
            written.row(rank, "sampler", 0, size=50, validation=False)
            for i, loss in enumerate(losses):
                written.row(rank, "log", 2.0 * (i + 1), step=i, loss=loss)
            written.progress(rank, 10, step=10, samples=10 * rate, exchange=1.0, data=0.5, staleness=2.0, ages=[0, 1])
        return written

    return make


def opened(*written, value="loss"):
    return open_runs([one.folder.path for one in written], value)


def test_run_that_is_named_twice_is_read_once(make, tmp_path):
    one, two = make("one"), make("two", workers=2)
    (tmp_path / "last").symlink_to("two")
    runs = open_runs([one.folder.path, tmp_path / "last", two.folder.path], "loss")  # as the shell expands runs/*
    assert [run.name for run in runs] == ["one", "two"]


# The course of a value


def test_a_running_mean_is_that_of_the_last_values():
    ys = np.array([4.0, 2.0, 6.0, 0.0])
    assert running_mean(ys, 2).tolist() == [4.0, 3.0, 4.0, 3.0]
    assert running_mean(ys, 1).tolist() == ys.tolist()
    assert running_mean(ys, 10).tolist() == [4.0, 3.0, 4.0, 3.0]
    assert running_mean(ys[:0], 3).tolist() == []


def test_one_huge_value_does_not_spoil_the_mean_of_those_after_it():
    ys = np.array([1.0, 1e300, *[1.0] * 50])
    assert running_mean(ys, 5)[10:].tolist() == [1.0] * 42


def test_the_curve_is_the_mean_over_the_workers_of_what_each_logged_last(make):
    written = Written(make().folder.path.parent / "two")
    for rank, at, loss in ((0, 1, 8.0), (1, 2, 4.0), (0, 3, 6.0), (1, 4, 2.0)):
        written.row(rank, "log", at, step=0, loss=loss)
    whole = value_series(opened(written)[0].state, "loss", window=1)
    assert (whole.xs - T0).tolist() == [1, 2, 3, 4]
    assert whole.ys.tolist() == [8.0, 6.0, 5.0, 4.0]
    assert value_series(opened(written)[0].state, "loss", window=2).ys.tolist() == [8.0, 6.0, 5.5, 5.0]


def test_a_dead_worker_does_not_count_until_it_is_back(make):
    written = Written(make().folder.path.parent / "died")
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.row(rank, "log", 1, step=0, loss=8.0 * (rank + 1))
    written.row("host", "exit", 2, worker=1, exit_code=-9, died=True)
    written.row(0, "log", 3, step=1, loss=4.0)
    written.row("host", "started", 4, worker=1)
    written.row(1, "log", 5, step=0, loss=2.0)
    assert value_series(opened(written)[0].state, "loss", window=1).ys.tolist() == [12.0, 4.0, 3.0]


def test_the_curve_is_that_of_the_center_where_it_was_evaluated(make):
    written = make()
    written.row(0, "log", 3, step=1, loss=0.5, center=True)
    whole = value_series(opened(written)[0].state, "loss")
    assert (whole.is_center, whole.ys.tolist()) == (True, [0.5])


def test_a_target_is_reached_from_the_side_from_which_the_value_comes(make):
    falls, rises = make("falls"), make("rises", losses=(0.1, 0.5, 0.9, 0.2))
    runs = opened(falls, rises)
    first, second = (value_series(run.state, "loss", window=1) for run in runs)
    assert resolve_target(runs, parse_target("loss=2")).falling
    assert resolve_target(runs[1:], parse_target("loss=0.5")) == parse_target("loss>=0.5")
    assert resolve_target(runs[1:], parse_target("loss<=0.5")).falling, "as written"
    assert parse_target("loss<=2").reached(first) == T0 + 6
    assert parse_target("loss>=0.5").reached(second) == T0 + 4
    assert parse_target("loss<=0.5").reached(first) is None and parse_target("loss<=0.5").best(first) == 1.0


# Lines on one clock


def test_lines_begin_when_the_first_worker_does_and_have_each_worker_and_their_mean(make):
    runs = opened(make("one"), make("two", workers=2))
    lines = overlay.lines(runs, "loss", window=1)
    assert [(line.run, line.who, line.is_strong) for line in lines] == [
        (0, "worker 0", False), (0, "running mean", True),
        (1, "worker 0", False), (1, "worker 1", False), (1, "mean of the workers", True),
    ]  # fmt: skip
    assert all(line.xs.tolist() == [2.0, 4.0, 6.0, 8.0] for line in lines)
    samples = overlay.lines(runs, "loss", against="samples", window=1)
    assert [samples[i].xs.tolist() for i in (0, 4)] == [[20, 40, 60, 80], [40, 80, 120, 160]]
    assert overlay.lines(runs, "loss", against="epochs")[0].xs.tolist() == pytest.approx([0.4, 0.8, 1.2, 1.6])


def test_long_lines_are_short_and_keep_their_peaks(make, monkeypatch):
    monkeypatch.setattr(overlay, "_THIN_POINTS", 200)
    losses = [float(i % 7) for i in range(3000)]
    losses[1500] = 99.0
    thin, strong = overlay.lines(opened(make(losses=losses)), "loss", window=1)
    assert len(thin.xs) <= 202 and len(strong.xs) == 3000
    assert thin.ys.max() == 99.0


def test_runs_that_count_no_samples_are_drawn_against_time_only(make):
    runs = opened(make("counted"), make("uncounted", rate=0))
    assert overlay.known_axes(runs) == ["time"]
    assert overlay.known_axes(runs[:1]) == ["time", "samples", "epochs"]
    with pytest.raises(InvalidArgument, match="uncounted cannot be drawn against samples: it counted none"):
        overlay.check_axis(runs, "samples")


def test_hours_are_not_shown_in_seconds(make):
    written = make()
    assert overlay.time_unit(opened(written)) == (1.0, "seconds")
    written.row(0, "log", 20_000, step=9, loss=0.5)
    assert overlay.time_unit(opened(written)) == (3600.0, "hours")


# Speed-ups


def test_speed_ups_are_over_the_fastest_run_with_one_worker(make):
    runs = opened(
        make("slow", rate=5), make("one", rate=10), make("two", workers=2, rate=9),
        make("bsp", workers=4, rate=8, rule="BSP()"),
    )  # fmt: skip
    assert baseline(runs).name == "one"
    curves = {one.rule: (one.workers, pytest.approx(one.times)) for one in speedups(runs)}
    assert curves == {"easgd": ([1, 1, 2], [0.5, 1.0, 1.8]), "bsp": ([1, 4], [1.0, 3.2])}


def test_without_a_run_of_one_worker_the_smallest_is_the_baseline_and_it_is_no_speed_up(make):
    runs = opened(make("two", workers=2), make("four", workers=4))
    assert baseline(runs).title == "speed relative to 2 workers (no run with one was given)"
    assert speedups(runs)[0].times == pytest.approx([1.0, 2.0])


def test_runs_of_equal_size_or_that_count_different_things_have_no_speed_up(make):
    assert speedups(opened(make("a"), make("b"))) == []
    assert speedups(opened(make("c"), make("d", workers=2, rate=0))) == []


def test_a_run_has_one_colour_in_all_panels(make, tmp_path, monkeypatch):
    to_hex = engine("matplotlib.colors").to_hex
    runs = opened(
        make("four", workers=4, rate=8, rule="BSP()"), make("one", rate=10), make("two", workers=2, rate=9),
        make("bsp", workers=2, rate=7, rule="BSP()"),
    )  # fmt: skip
    figures = []
    monkeypatch.setattr("maniple.watch.plot.save", lambda figure, path: figures.append(figure))
    draw(runs, tmp_path / "plot.png")
    values, times, faster = figures[0].axes
    for i, run in enumerate(runs):
        (line,) = (line for line in values.get_lines() if line.get_label().startswith(label(run)))
        (tick,) = (tick for tick in times.get_yticklabels() if tick.get_text().startswith(run.name))
        environment = [run.workers, run.overall.rate / runs[1].overall.rate]
        points = [
            to_hex(colour)
            for drawn in faster.collections
            for at, colour in zip(drawn.get_offsets(), drawn.get_facecolors(), strict=True)
            if np.allclose(at, environment)
        ]
        assert {line.get_color(), tick.get_color(), *points} == {overlay.colour(i)} and points
    others = {overlay.colour(i) for i in range(len(runs))}
    assert not any(to_hex(line.get_color()) in others for line in faster.get_lines()), "a rule is no run"
    contents = report.contents(runs, "loss")
    for one in contents["speedups"]:
        assert [runs[i].workers for i in one.runs] == one.workers


def test_shares_of_time_add_up(make):
    (run,) = opened(make())
    assert overlay.shares(run) == pytest.approx({"compute": 0.85, "exchange": 0.1, "data": 0.05, "others": 0.0})


# Tables


def test_a_summary_has_the_numbers_of_a_run(make):
    runs = opened(make("one"), make("two", workers=2, rate=9))
    target = resolve_target(runs, parse_target("loss=2"), window=1)
    one, two = summarize(runs, "loss", target=target, window=1)
    assert (two.workers, two.rule, two.rate, two.speedup, two.measures["busy_workers"]) == (
        2,
        "easgd",
        18.0,
        1.8,
        pytest.approx(1.7),
    )
    assert (two.measures["sync_share"], two.measures["staleness"], two.final, two.final_of, two.exit_code) == (
        pytest.approx(0.1), 2.0, 1.0, "workers", 0,
    )  # fmt: skip
    assert (one.target_s, one.target_samples, two.target_samples) == (6.0, 60.0, 108.0)
    assert two.target_speedup == 1.0
    words = cells(two, "loss", target)
    assert (words["speed-up"], words["time to loss at or below 2"], words["last loss"]) == (
        "1.80",
        "6.0 s",
        "1 (workers)",
    )


def test_there_is_no_speed_up_without_a_run_of_one_worker(make):
    (two,) = summarize(opened(make(workers=2)), "loss")
    assert two.speedup is None and two.measures["busy_workers"] == pytest.approx(1.7)
    words = cells(two, "loss", None)
    assert (words["speed-up"], words["busy workers"]) == ("–", "1.70")


def test_what_never_happened_is_not_made_up(make):
    written = make()
    written.row(0, "log", 9, step=5, loss="nan")
    runs = opened(written)
    (one,) = summarize(runs, "loss", target=resolve_target(runs, parse_target("loss=0")), window=1)
    assert (one.target_s, one.not_finite) == (None, 1)
    assert cells(one, "loss", None)["last loss"] == "1 (workers, 1 not finite)"
    (other,) = summarize(runs, "unknown")
    assert other.final is None and json.dumps(other.as_row())


def test_settings_that_differ_are_listed_and_others_not(make):
    same = {"args": ["--lr", "0.1"], "patience": 0}
    first = make("a", seed=0, script="x.py", **same)
    runs = opened(first, make("b", workers=2, seed=1, script="y.py", rule="BSP()", **same))
    assert differences(runs) == {
        "workers": [1, 2], "seed": [0, 1], "script": ["x.py", "y.py"], "rule": ["EASGD(alpha='auto')", "BSP()"],
    }  # fmt: skip


# Names and refusals


def test_runs_of_the_same_name_are_distinguished(make):
    assert [run.name for run in opened(make("a/run"), make("b/run"), make("c"))] == ["a/run", "b/run", "c"]


def test_a_value_that_was_not_logged_is_refused_with_those_that_were(make):
    runs = opened(make())
    check_value(runs, "loss")
    with pytest.raises(InvalidArgument, match=r"no value named 'losss' .* Logged values: loss. Did you mean 'loss'?"):
        check_value(runs, "losss")


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="is not a run folder: it has no events"):
        open_runs([tmp_path], "loss")
    (tmp_path / "events").mkdir()
    with pytest.raises(InvalidArgument, match="has no rows yet"):
        open_runs([tmp_path], "loss")


def test_a_picture_that_cannot_be_made_is_refused_with_what_to_do(make, tmp_path, monkeypatch):
    runs = opened(make())
    if "matplotlib" in sys.modules or engine("matplotlib"):
        with pytest.raises(InvalidArgument, match=r"nowhere/x.png cannot be written: No such file or directory"):
            draw(runs, tmp_path / "nowhere/x.png")
    with pytest.raises(InvalidArgument, match=r"nowhere/x.html cannot be written: No such file or directory"):
        report.write(runs, tmp_path / "nowhere/x.html")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r"plotly is not installed. `pip install 'maniple\[plot\]'`"):
        report.write(runs, tmp_path / "x.html")


def test_names_are_drawn_as_they_are_whatever_signs_they_have(make, tmp_path):
    engine("matplotlib")
    draw(opened(make("_$\\frac{"), make("<b>&amp; " + "x" * 150, workers=2)), tmp_path / "x.svg", value="loss")
    drawing = (tmp_path / "x.svg").read_text()
    assert "_$\\frac{, 1 worker (running mean)" in drawing and "&lt;b&gt;&amp;amp; xxx" in drawing


def test_long_names_lose_their_middle():
    assert shortened("short") == "short"
    assert len(shortened("x" * 200)) <= 44 and "…" in shortened("x" * 200)


# The report


def test_a_report_holds_everything_and_no_name_can_break_out_of_it(make, tmp_path):
    engine("plotly")
    written = make("<b>", script="<script>alert(1)</script>")
    report.write(opened(written, make("two", workers=2)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r"^const data = (.*);$", page, re.M)[1])
    assert [run["name"] for run in data["runs"]] == ["<b>", "two"]
    assert data["lines"][1]["x"] == {"time": [2, 4, 6, 8], "samples": [20, 40, 60, 80], "epochs": [0.4, 0.8, 1.2, 1.6]}
    assert data["speedups"][0]["times"] == [1.0, 2.0]
    assert page.count("<script>") == page.count("</script>") == 2


def test_numbers_of_a_page_are_rounded_and_stay_what_they_are():
    values = np.array([0.0, 1.23456789, -1e-9, 1e12, 1e300, 5e-324])
    assert report._rounded(values)[:2] == [0.0, 1.23457]
    assert all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-300) for a, b in zip(report._rounded(values), values, strict=True)
    )


# Side by side


def compared(width: int | None, *written, options=()) -> list[str]:
    env = {"COLUMNS": str(width) if width else None}
    done = CliRunner(env=env).invoke(cli, ["compare", *options, *(str(one.folder.path) for one in written)])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


@pytest.fixture
def five(make):
    args = ["--lr", "0.1", "--momentum", "0.9", "--data", "/data/fashion-mnist/train", "--epochs", "10"]
    names = [f"fashion-{rule}-20261117-1{k}5501" for k, rule in enumerate(("one", "easgd", "easgd", "bsp", "bsp"))]
    return [make(name, workers=k // 2 + 1, rate=10 + k, args=args[: 2 * k]) for k, name in enumerate(names)]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_runs_that_do_not_fit_side_by_side_stand_below_each_other_and_nothing_is_torn(five, width):
    lines = compared(width, *five, options=["--target", "2"])
    assert max(map(len, lines)) <= width
    for one in five:
        assert any(line.startswith(one.folder.path.name + " ") for line in lines), "a name that can be read"
    head = " ".join(" ".join(lines[: [line.startswith("run ") for line in lines].index(True) + 1]).split())
    assert "workers" in head and "last loss" in head
    text = " ".join(" ".join(lines).split())
    assert "left out: " in text and "as does --json." in text
    assert "/data/fashion-mnist/train" in "".join(line.strip() for line in lines), "settings are whole"


def test_a_terminal_as_wide_as_was_said_shows_all_and_so_does_a_file(five):
    (needed,) = re.findall(r"A terminal of (\d+) columns", " ".join(compared(80, *five)))
    shown, whole = compared(int(needed), *five), compared(None, *five)
    assert not any("left out" in line for line in [*shown, *whole])
    assert max(map(len, shown)) <= int(needed)
    assert whole[0].split() == ["run", *(one.folder.path.name for one in five)], "side by side"


def test_a_run_that_failed_is_seen_in_a_narrow_terminal(five):
    five[2].folder.describe(exit_code=3)
    lines = compared(80, *five)
    rows = [line.split() for line in lines if line.startswith("fashion-") and "left" not in line]
    assert "code" in " ".join(lines[:3]) and [row[-1] for row in rows] == ["0", "0", "3", "0", "0"]


# Where a run stands


def test_a_remote_run_that_sends_nothing_is_shown_without_rates_and_as_unreachable(tmp_path):
    written = Written(tmp_path / "run")
    written.folder.describe(asked={"script": "train.py"}, lineage="0" * 16, node="elsewhere")
    for at in (1.0, 2.0):
        written.progress(0, at, step=int(10 * at), samples=int(1000 * at))
    printed = CliRunner().invoke(cli, ["watch", "--once", str(written.folder.path)]).output
    assert "the host cannot be checked from here: it is on elsewhere" in printed and "No row was written for" in printed
    assert "step 20 speed 0 samples/s" in printed


@pytest.mark.parametrize(
    "asked, command",
    [
        ({"script": "train.py"}, "maniple run --resume {run}"),
        ({"script": None, "model": "net.py:Net"}, "maniple run --resume {run}"),
        ({"script": None}, "maniple serve --resume {run}"),
        ({"script": "train.py", "launcher": "torchrun"}, "MANIPLE_RESUME={run} in the environment of torchrun"),
        ({"script": "train.py", "ray": {}, "launcher": "maniple"}, "maniple run --resume {run}"),
        (
            {"script": "train.py", "args": ["--lr", "1"], "workers": 3, "ray": {"cpus": 1}},
            "maniple submit --ray -n 3 --resume {run} train.py --lr 1",
        ),
    ],
)
def test_a_dead_host_is_reported_with_the_command_that_continues_the_run(tmp_path, asked, command):
    written = Written(tmp_path / "run")
    written.folder.describe(asked=asked, lineage="0" * 16, node=os.uname().nodename)
    where = find_host(tmp_path / "run")
    assert where.is_dead and where.description.endswith("To continue: " + command.format(run=tmp_path / "run"))


# Targets, bands and recorded baselines


def test_the_clock_of_a_plot_starts_at_the_first_step_of_each_run(make, tmp_path):
    for name, start_up in (("fast", 2.3), ("slow", 3.3)):
        written = Written(tmp_path / name)
        written.row(0, "join", 0)
        written.row(0, "log", start_up - 1, step=0, loss=9.0)  # validated before the first step
        written.progress(0, start_up, step=1, samples=1, elapsed=start_up - 0.5)
        written.row(0, "log", start_up, step=1, loss=4.0)
        written.row(0, "log", start_up + 5, step=9, loss=2.0)
    runs = open_runs([tmp_path / "fast", tmp_path / "slow"], "loss")
    for line in overlay.lines(runs, "loss", window=1):
        assert line.xs.tolist() == pytest.approx([0.0, 0.0, 5.0])
    assert overlay.axis_title("time", "seconds") == "seconds since the first step"


def test_more_than_three_workers_are_a_band_and_fewer_are_lines_with_names(make, tmp_path, monkeypatch):
    engine("matplotlib")
    few, many = make("few", workers=3), make("many", workers=4)
    for rank in range(4):
        many.row(rank, "log", 9, step=9, loss=float(rank))
    runs = opened(few, many)
    assert [line.who for line in overlay.lines(runs, "loss") if line.run == 1] == ["mean of the workers"]
    (band,) = overlay.bands(runs, "loss", window=1)
    assert (band.run, band.who) == (1, "lowest to highest of 4 workers")
    assert (band.low[-1], band.high[-1], band.xs[-1]) == (0.0, 3.0, 9.0)
    figures = []
    monkeypatch.setattr("maniple.watch.plot.save", lambda figure, path: figures.append(figure))
    draw(runs, tmp_path / "plot.png")
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert {"few, worker 0", "few, worker 2", "many, lowest to highest of 4 workers"} <= set(names)
    assert not any(name.startswith("many, worker") for name in names)
    (found,) = report.contents(runs, "loss", window=1)["bands"]
    assert (found["run"], found["low"][-1], found["high"][-1], found["x"]["time"][-1]) == (1, 0.0, 3.0, 9.0)


def test_a_target_is_a_dashed_line_with_a_mark_where_a_run_reaches_it(make, tmp_path, monkeypatch):
    engine("matplotlib")
    runs = opened(make("never", losses=(4.0, 3.0)), make("reached"))
    target = parse_target("loss<=2")
    figures = []
    monkeypatch.setattr("maniple.watch.plot.save", lambda figure, path: figures.append(figure))
    draw(runs, tmp_path / "plot.png", target=target, window=1)
    axes = figures[0].axes[0]
    (line,) = (line for line in axes.get_lines() if line.get_label() == "target loss at or below 2")
    assert line.get_linestyle() == "--" and set(line.get_ydata()) == {2.0}
    (mark,) = (one for one in axes.collections if one.get_label() == "reached, reached after 6.0 s")
    assert mark.get_offsets().tolist() == [[6.0, 2.0]]
    contents = report.contents(runs, "loss", target=target, window=1)
    assert contents["target"] == {"y": 2.0, "text": "target loss at or below 2"}
    assert contents["marks"] == [
        {"run": 1, "text": "reached after 6.0 s", "y": 2.0, "x": {"time": 6.0, "samples": 60.0, "epochs": 1.2}}
    ]
    assert "time to loss at or below 2" in contents["table"][0]


def test_a_run_is_compared_by_its_own_target_unless_another_is_given(make):
    two = make("two", workers=2, target="loss=2.5")
    assert any("time to loss at or below 2.5" in line for line in compared(None, two))
    assert any("time to loss at or below 1.5" in line for line in compared(None, two, options=["--target", "1.5"]))
    assert any("time to loss at or above 3" in line for line in compared(None, two, options=["--target", "loss>=3"]))
    assert any("time to loss at or above 2.5" in line for line in compared(None, two, options=["--above"]))
    done = CliRunner().invoke(cli, ["compare", "--value", "a", "--target", "b=1", str(two.folder.path)])
    assert "is for the value b, but --value is a" in str(done.exception)


def test_a_recorded_baseline_counts_where_no_run_with_one_worker_is_given(make):
    two = make("two", workers=2, rate=9)
    recorded = {"name": "alone", "workers": 1, "rate": 10.0, "unit": "samples", "target": "loss<=2.5", "target_s": 9.0}
    two.folder.describe(baseline=recorded)
    (found,) = summarize(opened(two), "loss", target=parse_target("loss<=2.5"), window=1)
    assert (found.speedup, found.baseline) == (pytest.approx(1.8), "alone")
    assert (found.target_s, found.target_speedup) == (6.0, 1.5)
    (curve,) = speedups(opened(two))
    assert (curve.workers, curve.times, curve.runs) == ([1, 2], [1.0, pytest.approx(1.8)], [NOT_GIVEN, 0])
    assert "speed-ups are over the recorded baseline alone, 10 samples/s." in compared(None, two)
    runs = opened(two, make("one", rate=12))
    assert [one.baseline for one in summarize(runs, "loss")] == ["one", "one"], "a run that is given counts more"
