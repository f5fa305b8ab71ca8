"""Named series of logged values: which numbers they hold, and that a script cannot fill the memory of a viewer."""

import pytest

from maniple.monitor import CENTER, NamedSeries, Series


def log(timestamp: float, **values: object) -> dict:
    return {"event": "log", "timestamp": timestamp, "step": 1, **values}


def test_numbers_are_kept_by_name_and_worker_and_anything_else_is_skipped():
    series = NamedSeries(100)
    series.add_rows(3, [log(1.0, loss=0.5, note="warm", sizes=[1]), log(2.0, loss=1, done=True)])
    assert list(series.named) == ["loss"]
    assert series.named["loss"][3].points() == ([1.0, 2.0], [0.5, 1.0])


def test_values_of_the_center_are_a_series_of_their_own():
    series = NamedSeries(100)
    series.add_rows(0, [log(1.0, loss=0.5), log(2.0, loss=0.25, center=True), log(3.0, loss=0.125, center=False)])
    assert series.named["loss"][0].points() == ([1.0, 3.0], [0.5, 0.125])
    assert series.named["loss"][CENTER].points() == ([2.0], [0.25])


def test_values_that_are_not_finite_are_counted_and_leave_a_gap():
    series = NamedSeries(100)
    series.add_rows(0, [log(1.0, loss="nan"), log(2.0, loss=0.5), log(3.0, loss="-inf"), log(4.0, loss=10**400)])
    assert series.non_finite == {"loss": 2}
    assert series.named["loss"][0].points() == ([2.0], [0.5])


def test_a_script_that_makes_up_names_fills_no_memory():
    series = NamedSeries(100, limits={"loss": 5})
    series.add_rows(0, [log(1.0, **{f"value_{k}": k for k in range(500)})])
    assert len(series.named) == 100
    series.add_rows(0, [log(2.0, value_0=7, value_499=7, loss=1.0)])
    assert series.named["value_0"][0].points() == ([1.0, 2.0], [0, 7])
    assert "value_499" not in series.named and "loss" in series.named, "a name that was asked for is always kept"


def test_an_error_leaves_a_series_as_it_was():
    series = Series()
    series.add([1.0], [2.0])
    with pytest.raises(ValueError, match="could not convert"):
        series.add([2.0], ["x"])  # type: ignore[list-item]
    assert series.points() == ([1.0], [2.0]) and series.points(1) == ([], [])
