"""The arithmetic and the page of `make reproduce`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reproduce"


@pytest.fixture
def reproduce(monkeypatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("reproduce_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_target_is_reached_by_the_median_of_three_values_not_by_one_lucky_one(reproduce):
    values = [0.1, 0.5, 0.95, 0.6, 0.7, 0.9, 0.92]
    curve = [[float(i), 100 * i, value] for i, value in enumerate(values)]
    found = reproduce.time_to_target(curve, "accuracy", 0.8)
    # The medians are 0.3 (of two), 0.5, 0.6, 0.7, 0.7, 0.9, 0.91 (of two).
    assert found["to_target_s"] == pytest.approx(4.5)
    assert found["to_target_samples"] == 450
    assert found["final"] == 0.92


def test_loss_is_reached_from_above_and_may_not_be_reached(reproduce):
    curve = [[0.0, 0, 3.0], [1.0, 10, 2.0], [2.0, 20, 1.0], [3.0, 30, 0.9]]
    assert reproduce.time_to_target(curve, "loss", 0.5)["to_target_s"] is None
    assert 1.0 < reproduce.time_to_target(curve, "loss", 1.5)["to_target_s"] < 2.0


def run_of(contestant: str, seconds: float | None, seed: int = 0) -> dict:
    curve = [[0.0, 0, 0.1], [10.0, 100, 0.95]]
    return {
        "task": "digits", "contestant": contestant, "workers": 2, "setting": {"lr": 1.0}, "seed": seed, "data": "",
        "curve": curve, "metric": "accuracy", "target": 0.9, "to_target_s": seconds, "to_target_samples": 90,
        "final": 0.95,
    }  # fmt: skip


def test_cases_that_do_not_pay_come_first_on_the_page(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    runs = [run_of("1 process", 10.0, seed) for seed in range(3)]
    runs += [run_of("1 process, all cores", 8.0), run_of("DDP", 6.0), run_of("bsp", 4.0)]
    runs += [run_of("easgd", 7.6), run_of("asgd", None), run_of("bsp", 99.0, seed=report.TUNING_SEED)]
    tasks = report.rows_of(runs)
    page = "\n".join(report._page(tasks))
    losses = page[page.index("does not pay") : page.index("## digits")]
    assert "digits, easgd**: 0.95" in losses  # against the better single process
    assert "digits, asgd**: the target was not reached" in losses
    assert "bsp" not in losses
    assert "| bsp | lr x 1 | 4.0 | 0.40 | 0.50 | 0.67 |" in page
    assert len(tasks["digits"]["1 process"].runs) == 3


def test_pictures_show_every_task(reproduce, tmp_path):
    pytest.importorskip("matplotlib")
    import report  # pyright: ignore[reportMissingImports]

    rows = report.rows_of([run_of("1 process", 10.0, seed) for seed in range(2)])["digits"]
    report.draw(rows, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("contestant", ["1 process", "DDP", "easgd:sync=true"])
def test_commands_say_what_a_case_is(reproduce, contestant, tmp_path):
    setting = reproduce.Setting(lr=2.0, every=3, alpha="0.2")
    case = reproduce.Case("digits", contestant, 2, setting, 5)
    commands, variables = reproduce.command_of(case, tmp_path / "out", tmp_path)
    assert len(commands) == len(variables) == (2 if contestant == "DDP" else 1)
    words = " ".join(commands[0])
    assert "--lr 2.0" in words and "--seed 5" in words
    if contestant.startswith("easgd"):
        assert "--rule easgd:sync=true,alpha=0.2" in words and "--every 3" in words


def test_tables_of_earlier_systems_have_their_numbers_beside_ours(reproduce):
    from earlier_tables import earlier_tables  # pyright: ignore[reportMissingImports]

    def timed(task: str, contestant: str, workers: int, seconds: float) -> dict:
        return {"task": task, "contestant": contestant, "workers": workers, "epochs": 1, "seconds": seconds}

    runs = [timed("reviews", "1 process", 1, 4.0), timed("reviews", "easgd", 2, 2.0), timed("vgg", "1 process", 1, 9.0)]
    runs = {str(i): run for i, run in enumerate(runs)} | {
        "pool": {"task": "pool", "rows": [{"batch": 64, "one": 1000.0, "pool": 1500.0, "speed-up": 1.5}]}
    }
    page = "\n".join(earlier_tables(runs))
    assert "| ours, speed-up | 1.00 |  | 2.00 |  |  |" in page
    assert "| vgg | 9.0 |  |  |  |  | 410.3 | 216.0 | 113.8 |" in page
    assert "| 64 | 1,000 | 1,500 | 1.50 |" in page


def test_contestant_that_diverges_is_said_to_and_ends_nothing(reproduce, tmp_path):
    import report  # pyright: ignore[reportMissingImports]

    assert reproduce.time_to_target([], "", 0)["final"] is None
    diverged = run_of("easgd", None) | {"curve": [], "final": None}
    rows = report.rows_of([run_of("1 process", 10.0), diverged])["digits"]
    assert report.cells(rows["easgd"], rows)[2] == "diverged"
    report.draw(rows, tmp_path / "curves.svg")
