"""Speed-ups are measured: what may be a baseline, and where its speed is used."""

from dataclasses import asdict, replace

import pytest

from maniple.clock import clock
from maniple.errors import InvalidArgument
from maniple.job import Job
from maniple.launch.baseline_run import baseline_job, find_baseline, with_name
from maniple.launch.terminal import RunMonitor, total_line
from maniple.monitor.baseline import Baseline, measure_baseline, parse_baseline
from maniple.settings.options import Limits
from maniple.watch.prometheus import metrics_text
from tests.simulated_clock import SimulatedClock
from tests.written import Written


def write(path, workers=1, rate=100, seconds=10, **asked) -> Written:
    """A run whose workers made their first step after 4 s, and then `rate` samples per second each."""
    written = Written(path)
    written.folder.describe(asked={"workers": workers, **asked})
    for rank in range(workers):
        written.row(rank, "join", 0)
        written.progress(rank, 4, step=1, samples=50, elapsed=3.0, exchange=0.5)
        for i in range(1, seconds + 1):
            written.row(rank, "log", 4 + i, step=1 + i, loss=1 / i)
            samples = 50 + rate * i
            written.progress(rank, 4 + i, step=1 + i, samples=samples, elapsed=3.0 + i, exchange=0.5 + 0.1 * i)
    return written


def test_speed_is_measured_from_the_first_step_and_start_up_is_in_no_figure(tmp_path):
    state = write(tmp_path / "run", workers=2).run_state()
    overall, totals = state.overall(), state.totals()
    # Only the end of the first step is known, so its samples count in no speed.
    assert (overall.seconds, overall.rate) == (10.0, pytest.approx(200))
    assert [overall.busy_workers, totals.busy_workers] == pytest.approx([1.8, 1.8])
    assert (totals.elapsed_s, totals.goodput, totals.sync_share) == (10.0, pytest.approx(0.9), pytest.approx(0.1))
    assert totals.samples == 2 * 1050, "all samples are counted"
    assert totals.speedup is None, "nothing was measured to compare with"


def test_a_baseline_has_the_measured_speed_and_the_time_to_the_target(tmp_path):
    written = write(tmp_path / "one", target="loss=0.35")
    monitor = RunMonitor(written.folder, 1)
    monitor.refresh()
    found = measure_baseline(monitor, "one")
    assert (found.workers, found.rate, found.unit, found.seconds) == (1, pytest.approx(100), "samples", 10.0)
    assert (found.target, found.target_s) == ("loss<=0.35", 8.0)  # the mean of 1, 1/2, ... 1/8 is 0.34


@pytest.mark.parametrize(
    ("workers", "seconds", "reason"), [(2, 10, "had 2 workers, but a speed-up is over one"), (1, 0, "fewer than two")]
)
def test_a_run_that_cannot_be_a_baseline_is_refused(tmp_path, workers, seconds, reason):
    with pytest.raises(InvalidArgument, match=reason):
        measure_baseline(write(tmp_path / "run", workers, seconds=seconds).run_state(), "run")


def test_a_run_folder_without_rows_is_no_baseline(tmp_path):
    with pytest.raises(InvalidArgument, match=r"has no rows, so there is no speed to compare with. Run it first"):
        measure_baseline(Written(tmp_path / "run").run_state(), "run")


def test_a_baseline_is_seconds_or_a_run_by_its_path_or_name(tmp_path):
    write(tmp_path / "runs/one")
    assert parse_baseline("20", tmp_path / "runs") == 20.0
    assert parse_baseline("one", tmp_path / "runs") == tmp_path / "runs/one"
    assert parse_baseline(str(tmp_path / "runs/one"), tmp_path) == tmp_path / "runs/one"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", r"out of range \(above 0 s\)"),
        ("-3", "out of range"),
        ("inf", "out of range"),
        ("nan", "out of range"),
        ("nothing", "neither a number of seconds nor a run folder"),
        ("empty", "is not a run folder: it has no events"),
    ],
)
def test_what_is_no_baseline_is_refused_before_anything_starts(tmp_path, text, reason):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=reason):
        Job(script=None, workers=0, runs=tmp_path, baseline=text).check()


def test_seconds_cannot_be_measured_before_a_run_that_continues(tmp_path):
    with pytest.raises(InvalidArgument, match="--resume continues a run"):
        Job(script=None, workers=0, resume=tmp_path, baseline="20").check()
    with pytest.raises(InvalidArgument, match="has no target to stop at"):
        Job(script=None, workers=0, stop_at_target=True).check()


BASE = Baseline("one", 1, 80.0, "samples", 10.0, "loss<=0.5", 8.0)


def test_a_speed_up_is_shown_wherever_the_baseline_is_recorded(tmp_path):
    written = write(tmp_path / "two", workers=2, target="loss=0.5")
    written.folder.describe(baseline=asdict(BASE))
    monitor = RunMonitor(written.folder, 2)
    monitor.refresh()
    with clock.replaced(SimulatedClock()):
        totals = monitor.totals()
    assert (totals.speedup, totals.target_s) == (pytest.approx(2.5), 5.0)  # the mean of 1, 1/2, ... 1/5 is 0.46
    assert totals.target_speedup == pytest.approx(8 / 5)
    assert "speed-up 2.50 over one worker, busy" in total_line(totals)
    assert monitor.summary()[1:] == [
        "speed-up 2.50: 200 samples/s over 80 samples/s of one worker, one",
        "target loss 0.5: reached after 5.0 s, 1.60 times as fast as one worker (8.0 s)",
    ]
    assert (monitor.result()["speedup"], monitor.result()["target_speedup"]) == (totals.speedup, totals.target_speedup)
    metrics = metrics_text(monitor, "two")
    assert 'maniple_run_speedup{run="two"} 2.5' in metrics and 'maniple_run_target_seconds{run="two"} 5' in metrics


def test_without_a_baseline_or_in_another_unit_there_is_no_speed_up(tmp_path):
    written = write(tmp_path / "two", workers=2)
    assert "speed-up" not in total_line(written.run_state().totals())
    assert "speedup" not in metrics_text(written.run_state(), "two")
    written.folder.describe(baseline=asdict(replace(BASE, unit="steps")))
    monitor = RunMonitor(written.folder, 2)
    monitor.refresh()
    assert monitor.totals().speedup is None
    assert monitor.summary()[1:] == ["no speed-up: one counted steps, and this run samples"]


def test_times_to_different_targets_are_not_compared(tmp_path):
    written = write(tmp_path / "two", target="loss=0.4")
    written.folder.describe(baseline=asdict(BASE))
    monitor = RunMonitor(written.folder, 1)
    monitor.refresh()
    assert monitor.totals().target_s is not None and monitor.totals().target_speedup is None


def test_seconds_run_one_worker_first_and_an_ended_baseline_is_measured(tmp_path):
    job = Job(
        script=tmp_path / "a.py", workers=4, min_workers=2, devices=("cuda:0", "cuda:1"), name="big", runs=tmp_path,
        baseline="10", limits=Limits(max_epochs=3), target="loss=0.5", quiet=True,
    )  # fmt: skip
    alone = baseline_job(job, 10.0)
    assert (alone.name, alone.workers, alone.min_workers, alone.devices) == ("big-baseline", 1, 1, ("cuda:0",))
    assert alone.limits == Limits(max_epochs=3, total_duration=10.0) and alone.baseline is None
    ran = []

    def run_job(one: Job) -> int:
        ran.append(one)
        write(tmp_path / "big-baseline", target="loss=0.5")
        return 0

    found, exit_code = find_baseline(job, run_job)
    assert (ran, exit_code) == ([alone], 0)
    assert (found.name, found.rate, found.target_s) == ("big-baseline", pytest.approx(100), 5.0)
    again, _ = find_baseline(replace(job, baseline="big-baseline"), run_job)
    assert again == found and len(ran) == 1, "a run that exists is only read"


def test_a_baseline_that_fails_ends_the_run_with_its_exit_code(tmp_path, capsys):
    job = Job(script=tmp_path / "a.py", name="big", runs=tmp_path, baseline="10", quiet=True)
    assert find_baseline(job, lambda one: 130) == (None, 130)
    assert "ended with exit code 130, so the run was not started" in capsys.readouterr().err.replace("\n", " ")


def test_a_run_that_was_not_named_has_a_name_before_its_baseline_starts(tmp_path):
    job = with_name(Job(script=tmp_path / "train.py", runs=tmp_path))
    assert job.name.startswith("train-") and with_name(job) == job


def test_time_after_the_last_step_is_no_training_time(tmp_path):
    written = write(tmp_path / "run")
    written.progress(0, 60, step=11, samples=1050, elapsed=13.0, exchange=1.5)  # it leaves after a long validation
    assert (written.run_state().overall().seconds, written.run_state().overall().rate) == (10.0, pytest.approx(100))


def test_figures_are_the_same_whether_rows_are_read_one_by_one_or_at_once(tmp_path):
    """The clock of rows and that of a worker differ by microseconds; a live view must not differ from a later one."""
    written = Written(tmp_path / "run")
    state = RunMonitor(written.folder, 1)
    written.row(0, "join", 0)
    for i in range(1, 5):
        written.progress(0, 4 + 0.5 * i, step=20 * i - 19, samples=10 * i, elapsed=3.0 + 0.5001 * i)
        state.refresh()
    assert state.overall() == written.run_state().overall()
    assert state.first_step == written.run_state().first_step
