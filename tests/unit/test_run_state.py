"""The state of a run: workers, totals and curves that a person can trust, from rows alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.launch.terminal import RunMonitor
from maniple.monitor import CENTER, RunState, Series
from maniple.monitor.run_state import sum_samples
from maniple.monitor.series import TimeSplit
from tests.written import T0, Written


@pytest.fixture
def written(tmp_path) -> Written:
    return Written(tmp_path / "run")


# Series: bounded, with all peaks


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(2, 50))
def test_a_series_stays_small_and_keeps_its_extremes_and_its_ends(values, limit):
    series = Series(limit)
    for x, y in enumerate(values):
        series.add([float(x)], [y])
    xs, ys = series.points()
    assert len(xs) <= 4 * limit
    assert xs == sorted(xs)
    assert (min(ys), max(ys)) == (min(values), max(values))
    assert (xs[0], ys[0], xs[-1], ys[-1]) == (0.0, values[0], len(values) - 1.0, values[-1])
    assert set(zip(xs, ys, strict=True)) <= {(float(x), y) for x, y in enumerate(values)}


def test_a_long_series_is_as_fine_at_its_beginning_as_at_its_end():
    series = Series(100)
    for x in range(100_000):
        series.add([float(x)], [math.sin(x)])
    steps = np.diff(series.points()[0])
    assert len(series) <= 400
    assert steps.max() < 5 * 100_000 / 100  # no stretch was thinned out again and again


def test_points_are_only_added_while_the_epoch_stays():
    series, known, epoch = Series(20), ([], []), 0
    for x in range(1000):
        series.add([float(x)], [x * 0.5])
        if series.generation != epoch:
            known, epoch = series.points(), series.generation
        else:
            xs, ys = series.points(len(known[0]))
            known = (known[0] + xs, known[1] + ys)
        assert known == series.points()


def test_equal_moments_are_kept_as_one_stretch():
    series = Series(5)
    for y in range(100):
        series.add([7.0], [float(y)])
    assert set(series.points()[1]) >= {0.0, 99.0} and len(series) <= 20


# Time splits


def test_a_time_split_stays_short_and_no_second_is_lost():
    split = TimeSplit(limit=10)
    for i in range(1, 1001):
        split.add(np.array([[i - 1.0, i, 0.5, 0.25, 0.125, 0.125]]))
    stretches = split.intervals
    assert len(split) <= 20
    assert (stretches[0][0], stretches[-1][1]) == (0.0, 1000.0)
    assert np.sum(stretches, axis=0)[2:].tolist() == [500.0, 250.0, 125.0, 125.0]


# Workers


def test_rates_split_and_staleness_of_a_worker(written):
    written.row(0, "join", 0)
    written.progress(0, 1.0, step=10, samples=100, exchange=0.2, bytes=1000, cpu=1.0, exchanges=2)
    newest = {"exchanges": 4, "staleness": 3.0, "ages": [1, 0, 1], "sync_share": 0.15, "cpu": 2.5, "memory": 4096}
    written.progress(0, 2.0, step=30, samples=300, exchange=0.3, data=0.1, bytes=3000, **newest)
    written.row(0, "log", 2.0, step=30, loss=0.25)
    state = written.run_state()
    one = state.workers[0]
    assert (one.state, one.now.step) == ("training", 30)
    rates = {"samples_per_s": 200.0, "bytes_per_s": 2000.0, "cores": 1.5}
    assert one.values.items() >= rates.items()
    newest = {"staleness": 3.0, "sync_share": 0.15, "loss": 0.25, "memory_bytes": 4096, "gpu_memory_bytes": None}
    assert one.values.items() >= newest.items()
    assert one.now.split == pytest.approx({"compute": 1.6, "exchange": 0.3, "data": 0.1, "others": 0.0})
    assert state.ages == {0: 1, 1: 0, 2: 1}


def test_rows_in_several_files_give_the_same_state(written):
    for rank in (1, 10):
        written.row(rank, "join", 0, node="a")
        for at in range(1, 30):
            written.progress(
                rank, at, step=10 * at, samples=100 * at, exchanges=at, ages=[1, 2], staleness=1.0, bytes=at
            )
            written.row(rank, "log", at, step=10 * at, loss=1.0 / at)
    written.row("host", "end", 40, exit_code=0)
    whole = written.run_state()
    for who, lines in ((1, 7), (10, 20), ("host", 1)):
        written.divide(who, lines)
    divided = written.run_state()
    assert divided.totals() == whole.totals()
    assert divided.workers == whole.workers and list(divided.workers) == [1, 10]
    assert (divided.ages, divided.host_exit_code) == (whole.ages, 0)
    for rank in (1, 10):
        assert divided.logged.named["loss"][rank].points() == whole.logged.named["loss"][rank].points()
        assert divided.time_splits[rank].intervals.tolist() == whole.time_splits[rank].intervals.tolist()


def test_a_worker_that_died_and_came_back_keeps_what_it_had_done(written):
    written.row("server", "joined", 0, worker=0, live=1)
    written.row(0, "join", 0, node="a")
    written.progress(0, 1, step=10, samples=100, exchanges=3)
    written.row("host", "exit", 2, worker=0, exit_code=-9, died=True)
    assert written.run_state().workers[0].state == "dead"
    written.row("host", "started", 2.5, worker=0)
    written.row("server", "restarted", 3, worker=0, live=1)
    written.row(0, "join", 3, node="a", restarts=1)
    written.progress(0, 4, step=5, samples=50, exchanges=1, elapsed=1.0)
    one = (state := written.run_state()).workers[0]
    assert (one.state, one.lives, one.now.step, one.total.step, one.total.samples) == ("training", 2, 5, 15, 150)
    assert state.totals().version == 4
    assert [state for _, state in one.states] == ["training", "dead", "starting", "training"]


@pytest.mark.parametrize(
    ("exit_code", "died", "state"),
    [(0, False, "done"), (1, False, "failed"), (-9, True, "dead"), (143, False, "stopped"), (3, True, "dead")],
)
def test_what_has_become_of_a_worker(written, exit_code, died, state):
    written.row("server", "joined", 0, worker=0, live=1)
    written.row(0, "join", 0)
    written.row("server", "left", 1, worker=0, live=0)
    written.row("host", "exit", 2, worker=0, exit_code=exit_code, died=died)
    assert written.run_state().workers[0].state == state


def test_a_worker_that_was_ordered_to_stop_has_stopped_however_its_process_ended(written):
    for rank in range(2):
        written.row("server", "joined", 0, worker=rank, live=rank + 1)
        written.row(rank, "join", 0)
    written.row("server", "left", 1, worker=0, live=1)
    written.row("host", "exit", 2, worker=0, exit_code=-9, died=False, stopped=True)
    written.row("host", "exit", 2, worker=1, exit_code=-9, died=True, killed_after=10.1)
    first, second = written.run_state().workers.values()
    assert (first.state, first.state_text, first.is_gone) == ("stopped", "stopped", True)
    assert (second.state, second.state_text, second.is_gone) == ("killed", "killed after 10 s", True)


def test_the_end_of_a_worker_counts_though_its_own_rows_are_read_later(written):
    """Files are read one after the other, and clocks of machines differ: what the host says last is so."""
    written.row("host", "exit", 5, worker=0, exit_code=-9, died=True)
    written.row(0, "join", 9)
    written.progress(0, 9.5, step=1)
    assert written.run_state().workers[0].state == "dead"


@pytest.mark.parametrize("after", [-0.001, 0.001])
def test_a_dead_worker_is_not_lost_though_its_connection_ends_later(written, after):
    written.row("server", "joined", 0, worker=0, live=1)
    written.row("host", "exit", 5, worker=0, exit_code=-9, died=True)
    written.row("server", "lost", 5 + after, worker=0, reason="closed", live=0)
    assert written.run_state().workers[0].state == "dead"
    written.row("server", "restarted", 6, worker=0, live=1)
    written.row("server", "lost", 7, worker=0, reason="silent", live=0)
    assert written.run_state().workers[0].state == "lost"


def test_without_a_host_workers_tell_of_themselves(written):
    for rank, failed in ((0, False), (1, True)):
        written.row(rank, "join", 0)
        written.row(rank, "leave", 1, failed=failed)
    assert [one.state for one in written.run_state().workers.values()] == ["done", "failed"]


def test_a_worker_has_the_rule_that_it_reported_last(written):
    written.row(0, "join", 0)
    written.row(0, "share", 1, rule="EASGD(alpha='auto')", pace="Every(10)")
    written.row(0, "changed", 2, rule="EASGD(alpha=0.3)", pace="Every(20)", settings={"alpha": 0.3, "every": 20})
    one = (state := written.run_state()).workers[0]
    assert (one.rule, one.pace) == ("EASGD(alpha=0.3)", "Every(20)")
    assert [row["event"] for row in state.happened] == ["changed"]


def test_a_wait_is_over_with_the_next_step_and_one_event(written):
    written.row(0, "join", 0)
    written.progress(0, 1, step=10)
    for seconds in (2.0, 4.0):
        written.row(0, "waiting", 1 + seconds, **{"for": [1], "seconds": seconds})
    assert written.run_state().workers[0].waiting == "waiting for worker 1 (4 s)"
    written.progress(0, 6, step=11)
    written.row(0, "waited", 6, **{"for": [1], "seconds": 5.0})
    assert not (state := written.run_state()).workers[0].waiting
    assert [row["event"] for row in state.happened] == ["waited"]


def test_with_a_dead_host_its_workers_are_dead_and_external_workers_are_lost_until_it_begins_again(written):
    written.row("host", "start", 0.0, workers=1)
    written.row("host", "started", 0.1, worker=0, pid=1)
    for rank in range(2):
        written.row("server", "joined", 0.5, worker=rank, live=rank + 1)
        for at in (1.0, 2.0):
            written.progress(rank, at, step=int(10 * at), samples=int(100 * at))
    state = written.run_state()
    state.mark_host_dead(seen=T0 + 1.5)  # before the newest row: somebody has resumed it since
    assert [state.workers[rank].state for rank in range(2)] == ["training", "training"]
    state.mark_host_dead(seen=T0 + 5.0)
    assert [state.workers[rank].state for rank in range(2)] == ["dead", "lost"]
    assert [state.workers[rank].values["samples_per_s"] for rank in range(2)] == [0.0, 0.0]
    assert state.workers[0].now.step == 20 and state.totals().live == 0
    written.row("host", "start", 9.0, workers=1)
    written.row("server", "joined", 9.5, worker=0, live=1)
    written.row("server", "returned", 9.5, worker=1, live=2)
    state.refresh()
    state.mark_host_dead(seen=T0 + 5.0)
    assert [state.workers[rank].state for rank in range(2)] == ["training", "training"]


def test_a_host_that_begins_again_has_new_workers(written):
    written.row("host", "start", 0, workers=1)
    written.row("server", "joined", 1, worker=0, live=1)
    written.row("host", "exit", 2, worker=0, exit_code=0)
    written.row("host", "end", 3, exit_code=0)
    state = written.run_state()
    assert (state.workers[0].state, state.host_exit_code) == ("done", 0)
    written.row("host", "start", 10, workers=1)
    state.refresh()
    assert (state.workers[0].state, state.host_exit_code) == ("starting", None)


def test_nobody_trains_when_the_run_has_ended(written):
    written.row("server", "joined", 1, worker=0, live=1)
    written.row("host", "end", 2, exit_code=None)
    assert written.run_state().workers[0].state == "training", "the host comes back"
    written.row("host", "end", 3, exit_code=0)
    assert written.run_state().workers[0].state == "ended"


def test_rows_that_make_no_sense_are_passed_over(written):
    written.row(0, "join", 0)
    written.row(0, "progress", 1, step="many")
    written.row(0, "log", 1, loss="good")
    written.row("server", "joined", 1, worker="nobody")
    with written.folder.events(0).open("a") as file:
        file.write('{"event":"progress","timesta\n[]\n7\n\n{}\n')
    written.progress(0, 2, step=4)
    assert written.run_state().workers[0].now.step == 4


# Totals


def test_totals_of_two_workers(written):
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.progress(rank, 1, step=10, samples=100, exchange=0.2, exchanges=5, bytes=10)
    totals = written.run_state().totals()
    assert (totals.workers, totals.live, totals.steps, totals.samples, totals.version) == (2, 2, 20, 200, 10)
    assert totals.samples_per_s == 200
    assert totals.busy_workers == pytest.approx(2 * 0.8)
    assert totals.goodput == pytest.approx(0.8)
    assert totals.sync_share == pytest.approx(0.2)


def test_workers_whose_speed_changes_are_never_more_than_they_are(written):
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.progress(rank, 1, step=10, samples=100, exchange=0.5)
        written.progress(rank, 2, step=110, samples=1100, exchange=0.6)
    assert written.run_state().totals().busy_workers == pytest.approx(1.8)  # now


def test_time_of_the_dead_is_no_goodput(written):
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.progress(rank, 1, step=10, samples=100)
    written.row("host", "exit", 1, worker=1, exit_code=-9, died=True)
    written.progress(0, 4, step=40, samples=400)
    totals = written.run_state().totals()
    assert totals.goodput == pytest.approx(5 / 8)
    assert totals.samples_per_s == 100


def test_a_run_that_has_ended_shows_what_it_achieved(written):
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.progress(rank, 2, step=10, samples=100 * (1 + rank), exchange=1.0)
        written.row("host", "exit", 2, worker=rank, exit_code=0)
    totals = written.run_state().totals()
    assert (totals.live, totals.samples_per_s, totals.busy_workers) == (0, 150.0, pytest.approx(1.0))


def test_rounds_are_counted_once_and_exchanges_of_all_are_added(written):
    for rank, rounds in ((0, 7), (1, 6)):
        written.row(rank, "join", 0)
        written.progress(rank, 1, step=7, rounds=rounds, together={"2": rounds})
    state = written.run_state()
    assert state.totals().version == 7
    assert state.together == {2: 13}


def test_a_run_of_which_nothing_is_known_yet(written):
    totals = written.run_state().totals()
    assert (totals.workers, totals.busy_workers, totals.goodput, totals.elapsed_s) == (0, 0.0, 0.0, 0.0)


# Curves


def test_values_logged_with_center_false_are_the_worker_s_own(written):
    written.row(0, "join", 0)
    written.row(0, "log", 1, step=1, loss=4.0, center=False)
    written.row(0, "log", 2, step=1, loss=0.5, center=True)
    state = written.run_state()
    assert {rank: series.ys.tolist() for rank, series in state.logged.named["loss"].items()} == {
        0: [4.0],
        CENTER: [0.5],
    }
    assert state.workers[0].values["loss"] == 4.0


def test_curves_of_workers_and_of_the_center(written):
    for rank in (0, 1):
        written.row(rank, "log", 1, step=1, loss=1.0 + rank, note="a word", flag=True)
    written.row(0, "log", 2, step=2, val_loss=0.5, center=True)
    written.row(0, "validated", 3, step=2, epoch=0, val_loss=0.4)
    written.row(1, "log", 3, step=2, loss="nan")
    logged = written.run_state().logged
    assert {name: sorted(ranks) for name, ranks in logged.named.items() if name != "flag"} == {
        "loss": [0, 1], "val_loss": [CENTER], "epoch": [CENTER],
    }  # fmt: skip
    assert logged.named["val_loss"][CENTER].points() == ([T0 + 2, T0 + 3], [0.5, 0.4])
    assert logged.non_finite == {"loss": 1}


def test_rows_that_tell_different_things_are_one_curve_in_the_order_of_time(written):
    for i in range(6):
        written.row(0, "log", i, step=i, loss=float(i), **({"lr": 0.1} if i % 2 else {}))
    written.row(0, "log", 6, step=6, loss=10**400)
    logged = written.run_state().logged
    assert logged.named["loss"][0].points() == ([T0 + i for i in range(6)], [float(i) for i in range(6)])
    assert len(logged.named["lr"][0]) == 3 and logged.non_finite == {}


def test_a_run_state_read_bit_by_bit_is_that_read_at_once(written):
    state = RunState(written.folder)
    for i in range(1, 50):
        written.row(0, "log", i, step=i, loss=1 / i)
        written.progress(0, i, step=i, samples=4 * i, exchange=0.1 * i)
        if i % 7 == 0:
            state.refresh()
    state.refresh()
    whole = written.run_state()
    assert state.workers == whole.workers
    assert state.logged.named["loss"][0].points() == whole.logged.named["loss"][0].points()
    np.testing.assert_allclose(state.time_splits[0].intervals, whole.time_splits[0].intervals)


def test_a_reader_in_a_hurry_goes_on_where_it_was(written):
    for rank in range(3):
        for i in range(2000):
            written.row(rank, "log", i, step=i, loss=float(i), padding="x" * 1000)
    state = RunState(written.folder)
    calls = 1
    while not state.refresh(within_s=0.0):
        calls += 1
    assert calls > 3
    assert {rank: s.points()[1][-1] for rank, s in state.logged.named["loss"].items()} == dict.fromkeys(
        range(3), 1999.0
    )


def test_the_value_that_is_reckoned_with_keeps_all_its_points(written):
    for i in range(5000):
        written.row(0, "log", i, step=i, loss=float(i), lr=0.1)
    state = RunState(written.folder, fine="loss")
    state.refresh()
    assert len(state.logged.named["loss"][0]) == 5000
    assert len(state.logged.named["lr"][0]) <= 2000


# The run as a whole


def test_a_run_is_looked_back_on_when_all_have_ended(written):
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.row(rank, "share", 1, rule="EASGD()", pace="Every(10)")
        written.progress(rank, 3, step=10, samples=100, elapsed=2.0, exchange=0.5)
        written.progress(rank, 5, step=20, samples=200, elapsed=4.0, exchange=1.0)
        written.row("host", "exit", 6, worker=rank, exit_code=0)
    state = written.run_state()
    found = state.overall()
    assert (found.seconds, found.rate, found.unit) == (pytest.approx(4.0), pytest.approx(100), "samples")
    assert found.split == pytest.approx({"compute": 6.0, "exchange": 2.0, "data": 0.0, "others": 0.0})
    assert found.busy_workers == pytest.approx(1.5)  # 6 s of compute in 4 s
    assert state.shared["rule"] == "EASGD()"


def test_nothing_is_looked_back_on_before_the_first_step(written):
    written.row(0, "join", 0)
    assert (written.run_state().overall().rate, written.run_state().overall().busy_workers) == (0.0, 0.0)


def test_staleness_is_the_mean_over_all_exchanges(written):
    written.row(0, "join", 0)
    assert written.run_state().totals().staleness is None
    written.progress(0, 1, staleness=1.0, ages=[0, 3])
    written.progress(0, 2, staleness=5.0, ages=[0, 0, 0, 1])
    assert written.run_state().totals().staleness == pytest.approx(2.0)


# The clock


def test_samples_are_counted_from_the_first_step_on_and_not_while_a_worker_is_away(written):
    written.row(0, "join", 0)
    written.progress(0, 3, samples=100, elapsed=2.0)
    written.row(0, "join", 10)
    written.progress(0, 13, samples=50, elapsed=2.0)
    seen = written.run_state().samples_seen.values()
    moments = T0 + np.array([0.0, 1.0, 2.0, 3.0, 7.0, 11.0, 12.0, 13.0])
    np.testing.assert_allclose(sum_samples(moments, seen), [0, 0, 50, 100, 100, 100, 125, 150], atol=1e-3)


def test_samples_of_all_at_a_moment_are_those_of_each_added_up():
    seen = [Series(), Series()]
    for x, first, second in ((0.0, 0.0, 0.0), (10.0, 100.0, 50.0)):
        seen[0].add([x], [first])
        seen[1].add([x], [second])
    assert sum_samples(np.array([0.0, 5.0, 10.0, 20.0]), seen).tolist() == [0.0, 75.0, 150.0, 150.0]


# A run that was resumed


def write_two_lives(written, *, how="restored", end=None):
    """1,000 samples in 10 s and 20 exchanges; 990 s later, resumed, as many once more."""
    written.row("host", "start", 0, workers=1)
    written.row(0, "join", 0)
    written.progress(0, 10, step=20, samples=1000, exchanges=20, elapsed=10.0)
    if end is not None:
        written.row("host", "end", 10, exit_code=end)
    written.row("host", "start", 998, workers=1)
    written.row("host", how, 998, updates=20, saved=T0 + 10.0)
    written.row(0, "join", 1000)
    written.progress(0, 1010, step=20, samples=1000, exchanges=20, elapsed=10.0)
    return written


@pytest.mark.parametrize("how", ["restored", "adopted"])
def test_the_version_of_a_restored_center_counts_each_exchange_once(written, how):
    assert write_two_lives(written, how=how).run_state().totals().version == 40


def test_what_was_exchanged_after_the_snapshot_is_not_in_the_version_of_the_center_restored_from_it(written):
    written.row("host", "start", 0, workers=1)
    written.row(0, "join", 0)
    written.progress(0, 10, step=50, samples=1000, exchanges=50, elapsed=10.0)
    state = written.run_state()
    assert state.totals().version == 50
    written.row("host", "start", 100, workers=1)
    written.row("host", "restored", 100, updates=20, saved=T0 + 5.0)
    written.row(0, "join", 101)
    written.progress(0, 102, step=3, samples=30, exchanges=3, elapsed=1.0)
    state.refresh()
    assert state.totals().version == written.run_state().totals().version == 23, "read at once or bit by bit"


def test_rounds_of_a_run_that_was_resumed_are_added_and_not_those_of_a_worker_that_came_back(written):
    written.row("host", "start", 0, workers=2)
    for rank in (0, 1):
        written.row(rank, "join", 0)
        written.progress(rank, 10, step=50, samples=100, rounds=50, elapsed=10.0)
    written.row(1, "join", 11, restarts=1)
    written.progress(1, 12, step=10, samples=20, rounds=60, elapsed=1.0)
    assert written.run_state().totals().version == 60
    written.row("host", "start", 100, workers=2)
    written.row("host", "adopted", 100)
    for rank in (0, 1):
        written.row(rank, "join", 101)
        written.progress(rank, 102, step=5, samples=10, rounds=5, elapsed=1.0)
    assert written.run_state().totals().version == 65


@pytest.mark.parametrize("end", [None, 130])
def test_the_pause_before_a_run_was_resumed_is_no_time_of_the_run(written, end):
    state = write_two_lives(written, end=end).run_state()
    assert state.totals().elapsed_s == pytest.approx(20)
    overall = state.overall()
    assert (overall.seconds, overall.rate) == pytest.approx((20, 100)), "2,000 samples in 20 s of training"
    assert state.elapsed_at(np.array([T0 + 5, T0 + 10, T0 + 500, T0 + 1000, T0 + 1010])).tolist() == [5, 10, 10, 10, 20]


def test_workers_that_train_on_without_their_host_make_no_pause(written):
    written.row("host", "start", 0)
    written.row(0, "join", 0)
    for at in range(1, 21):
        written.progress(0, at, step=10 * at, samples=at, elapsed=float(at))
    written.row("host", "start", 12)
    written.row("host", "adopted", 12)
    state = written.run_state()
    assert state.totals().elapsed_s == pytest.approx(20, abs=1.01)
    assert state.overall().seconds == pytest.approx(20, abs=1.01)


def test_the_exit_code_of_a_worker_that_failed_before_the_run_was_resumed_is_not_that_of_the_run(written):
    written.row("host", "start", 0, workers=1)
    written.row(0, "join", 0)
    written.row(0, "failed", 1, exit_code=4, error="of the first life")
    assert written.run_state().exit_code == 4
    written.row("host", "start", 10, workers=1)
    written.row(0, "join", 11)
    assert written.run_state().exit_code is None
    written.row(0, "failed", 12, exit_code=3, error="of the second")
    assert written.run_state().exit_code == 3


def test_workers_share_by_the_rule_of_this_life_of_the_run(written):
    written.row("host", "start", 0, workers=1)
    written.row(0, "share", 1, rule="BSP()", pace="Every(1)")
    state = written.run_state()
    assert state.shared["rule"] == "BSP()"
    written.row("host", "start", 10, workers=1)
    state.refresh()
    assert not state.shared, "no worker has shared yet"
    written.row(0, "share", 11, rule="EASGD()", pace="Every(10)")
    state.refresh()
    assert state.shared["rule"] == written.run_state().shared["rule"] == "EASGD()"


def test_the_summary_of_a_resumed_run_divides_by_the_time_of_all_lives(written):
    board = RunMonitor(write_two_lives(written).folder, 1)
    board.refresh()
    assert board.summary() == ["40 steps, 2,000 samples in 20.0 s, 100 samples/s over 1 worker"]


def test_what_workers_printed_before_the_run_was_resumed_is_not_shown_again(written):
    log = written.folder.log(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("of the first life\ncut sh")
    board = RunMonitor(written.folder, 1, from_now_on=True)
    board.refresh()
    assert board.printed() == []
    with log.open("a") as file:
        file.write("of the second\n")
    assert board.printed() == [(0, "of the second")]
    assert "of the first life" not in board.last_words(0) and "of the second" in board.last_words(0)
