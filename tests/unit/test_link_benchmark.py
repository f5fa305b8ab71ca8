"""The arithmetic of `benchmarks/link`: what is measured, and what is extrapolated from where."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "link"


@pytest.fixture
def link(monkeypatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("link_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def result(steps_per_s: float, *losses: float) -> dict[str, Any]:
    """A run with a copy every 10 steps."""
    curve = [(10 * i, 10 * i / steps_per_s, loss) for i, loss in enumerate(losses, 1)]
    return {"curve": curve, "steps_per_s": steps_per_s, "cpu_share": 1.0, "load": 1.0}


def test_a_loss_is_reached_by_the_median_of_three_copies_between_two_of_them(link):
    curve = result(2.0, 8.0, 6.0, 3.0, 6.0, 5.0, 4.0, 4.0)["curve"]  # medians 7, 6, 6, 5, 5, 4, 4
    assert link.reach(curve, 5.5) == pytest.approx((35, 17.5))
    assert link.reach(curve, 3.5) is None
    assert link.reach([], 3.5) is None


def test_a_run_that_was_stopped_is_extrapolated_by_the_steps_of_the_same_computation(link):
    found = {
        (2, "", "one process"): result(10.0, 8.0, 6.0, 5.0, 4.0),
        (2, "lan", "BSP"): result(5.0, 8.0, 6.0, 4.0, 4.0),
        (2, "home", "DDP"): result(0.1, 8.0),
        (2, "home", "EASGD"): result(1.0, 8.0),
        (2, "home", "DiLoCo"): result(9.0, 8.0, 6.0, 4.0, 4.0),
    }
    rows = {row["contestant"]: row for row in link.table(found, 5.0, link.contestants(50))}
    assert rows["BSP"]["how"] == rows["DiLoCo"]["how"] == "measured"
    assert rows["DDP"]["how"] == "extrapolated"  # it computes what BSP does, which reached the loss on another line
    assert rows["DDP"]["s to loss"] == pytest.approx(rows["BSP"]["steps to loss"] / 0.1)
    assert rows["EASGD"]["how"] == "not reached"  # its steps depend on the line
    assert rows["DiLoCo"]["faster than DDP"] == pytest.approx(90.0)
    assert rows["DDP"]["of one process"] == pytest.approx(0.01)


def test_steps_per_second_are_those_of_whole_periods_after_the_first(link):
    seldom = link.contestants(2)["DiLoCo"]
    ends = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0]  # the first steps are slow, and the last period is not complete
    assert link.speed_of(seldom, [{"ends": ends, "cpu_s": 50.0}])["steps_per_s"] == pytest.approx(1.0)
