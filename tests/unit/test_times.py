"""Where the time of a model's training went, epoch by epoch, from the rows of a run."""

import pytest

from maniple.errors import InvalidArgument
from maniple.record.times import PARTS, abandoned, gather, read_times, shares
from tests.written import Written


def row(epoch: int, batches: int = 1, loss: float = 0.0, **values: object) -> dict:
    return {"event": "times", "epoch": epoch, "batches": batches, "loss": loss, **dict.fromkeys(PARTS, 0.0), **values}


def test_rows_of_an_epoch_are_added_and_its_loss_is_the_mean_over_its_batches():
    rows = [row(1, 3, 1.0, compute=2.0, lr=0.1), row(1, 1, 5.0, exchange=0.5, lr=0.2), row(0, 2, 3.0)]
    first, second = gather({0: rows}).workers[0]
    assert (first.number, second.number) == (0, 1)
    assert (second.batches, second.loss, second.seconds, second.lr) == (4, 2.0, 2.5, 0.2)
    assert second.split == {"compute": 2.0, "exchange": 0.5, "data": 0.0, "others": 0.0}


@pytest.mark.parametrize(("values", "is_measured"), [({}, False), ({"data": 0.1}, True), ({"measures_data": 1}, True)])
def test_it_is_known_whether_the_time_for_data_was_measured(values, is_measured):
    (epoch,) = gather({0: [row(0, **values)]}).workers[0]
    assert epoch.measures_data is is_measured


def test_means_of_validations_are_numbers_by_name():
    validated = {"event": "validated", "timestamp": 1.0, "epoch": 2, "loss": 0.5, "error": "nan", "name": "x"}
    means = gather({0: [validated]}).validated[2]
    assert means.keys() == {"loss", "error"} and means["loss"] == 0.5 and means["error"] != means["error"]


@pytest.mark.parametrize("damage", [{"epoch": "one"}, {"batches": None}, {"loss": [1]}, {"lr": "warm"}])
def test_a_row_that_maniple_did_not_write_is_passed_over(damage):
    epochs = gather({0: [row(1, 2, 1.0), row(1) | damage]}).workers[0]
    assert [(epoch.number, epoch.batches) for epoch in epochs] == [(1, 2)]


def test_a_worker_without_rows_has_no_epochs():
    assert gather({0: [], 1: [row(0)]}).workers.keys() == {1}


def test_training_after_a_snapshot_that_was_restored_is_abandoned():
    rows = [
        {"event": "restored", "saved": 5.0, "timestamp": 9.0},
        {"event": "adopted", "timestamp": 12.0},
        {"event": "x"},
    ]
    assert abandoned(rows) == [(5.0, 9.0)]


def test_a_run_without_times_says_which_runs_have_them(tmp_path):
    written = Written(tmp_path)
    with pytest.raises(InvalidArgument, match=r"has no rows `times`.*maniple run --model"):
        read_times(written.folder.path)


def test_shares_leave_out_what_took_no_time():
    split = dict(zip(PARTS, (9.0, 1.0, 0.0, 0.0), strict=True))
    assert shares(split, measures_data=True) == "10.0 s: compute 90 %, exchange 10 %"
    assert shares(split, measures_data=False).endswith(", data not measured")
    assert shares(dict.fromkeys(PARTS, 0.0), measures_data=True) == "0.0 s: "
