"""Standings as a person sees them."""

from dataclasses import replace

from rich.console import Console

from maniple.launch.table import chosen, columns, left_out, live_table, plain_lines, total_line
from maniple.story import Standing, Totals
from maniple.story.standing import Counts

TRAINING = Standing("training", Counts(step=1200, samples=4800), samples_per_s=1234.5, loss=0.12345, sync_share=0.051)


def drawn(standings: dict[int, Standing], totals: Totals, height: int, **options) -> str:
    console = Console(width=100, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(live_table(standings, totals, height=height, **options))
    return capture.get()


def test_a_worker_in_columns():
    assert columns(TRAINING) == {
        "state": "training", "step": "1,200", "speed": "1,234 samples/s", "loss": "0.1235", "sync": "5.1%",
        "staleness": "–",
    }  # fmt: skip


def test_steps_are_shown_where_nobody_counts_samples():
    assert columns(Standing("training", Counts(step=5), steps_per_s=7.0))["speed"] == "7 steps/s"


def test_who_was_started_again_is_told_apart():
    assert columns(Standing("training", lives=3))["state"] == "training (life 3)"


def test_who_waits_says_for_whom_and_for_how_long():
    one = Standing("training", samples_per_s=33.0)
    one.wait({"event": "waiting", "for": [2], "seconds": 14.2})
    assert columns(one)["state"] == "waiting for worker 2 (14 s)" and columns(one)["speed"] == "0 steps/s"
    one.wait({"event": "waiting", "for": [0, 2], "seconds": 16.2})
    assert columns(one)["state"] == "waiting for workers 0, 2 (16 s)"
    one.wait({"event": "waited", "for": [0, 2], "seconds": 17.0})
    assert columns(one)["state"] == "training"
    one.wait({"event": "waiting", "for": [2], "seconds": 2.0})
    one.turn("dead", 1.0)
    assert columns(one)["state"] == "dead"


def test_who_is_done_shows_its_mean_speed():
    assert columns(Standing("done", Counts(samples=500, elapsed_s=10.0)))["speed"] == "50 samples/s"


def test_the_run_in_one_line():
    totals = Totals(live=3, samples=9, samples_per_s=5000.4, workers=4, busy_workers=3.71, goodput=0.934, version=12345)
    assert total_line(totals) == "5,000 samples/s, busy 3.71 of 4 workers, goodput 93%, center version 12,345"
    assert total_line(replace(totals, live=0)).startswith("5,000 samples/s in the mean, busy 3.71")


def test_a_crowd_fits_into_the_terminal_and_those_in_trouble_are_seen():
    crowd = {rank: Standing("dead" if rank == 60 else "training") for rank in range(64)}
    text = drawn(crowd, Totals(steps=1), height=24)
    assert len(text.splitlines()) <= 24
    assert "W60" in text and "dead" in text
    assert "43 more: 43 training" in text


def test_all_are_shown_where_there_is_room():
    few = dict.fromkeys(range(3), TRAINING)
    assert chosen(few, 10) == [0, 1, 2]
    assert left_out(few, [0, 1, 2]) == ""
    text = drawn(few, Totals(), height=24)
    assert "W2" in text and "more" not in text


def test_progress_bars_stand_below_the_workers_and_leave_them_room():
    few = dict.fromkeys(range(2), TRAINING)
    bars = {1: ("epochs 1/3", "steps 5/9"), 0: ("epochs 2/3", "s" * 200)}
    text = drawn(few, Totals(steps=1), height=24, bars=bars).splitlines()
    assert text[3:5] == ["W0 | epochs 2/3", "W0 | " + "s" * 94 + "…"] and text[5:7] == [
        "W1 | epochs 1/3",
        "W1 | steps 5/9",
    ]
    assert [line[:7] for line in drawn(few, Totals(steps=1), height=7, bars=bars).splitlines()[3:5]] == [
        "W0 | ss", "W1 | st",
    ]  # fmt: skip
    crowd = dict.fromkeys(range(64), TRAINING)
    many = drawn(crowd, Totals(steps=1), height=24, bars=dict.fromkeys(range(64), ("a bar",)))
    assert len(many.splitlines()) <= 24 and "a bar" not in many


def test_plain_lines_say_the_same():
    lines = plain_lines({0: TRAINING}, Totals(steps=1, samples=1, samples_per_s=2.0))
    assert lines[0] == "W0 : state training step 1,200 speed 1,234 samples/s loss 0.1235 sync 5.1% staleness –"
    assert lines[1].startswith("all: 2 samples/s")
