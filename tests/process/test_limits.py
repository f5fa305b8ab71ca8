"""Limits and validation, in real runs: when everybody stops, who validates, and the same for a worker alone."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.process.controller_scripts import BEGIN, logged, resume, steps
from tests.waiting import PATIENCE_S

from .conftest import MANIPLE

pytestmark = pytest.mark.usefixtures("without_numba")


def test_plain_loop_stops_at_max_batches(run):
    done = run(
        BEGIN + """
    worker.ask("next")  # waits for the controller, which starts at the same time as the workers
    while not worker.should_stop:
        train()
        time.sleep(0.002)
        """,
        "-n", "2", "--max-batches", "1500",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    total = steps(done, 2)
    assert 1500 <= total < 2500, "a heartbeat or two more"
    assert done.center["w"].tolist() == [total] * 1000
    (stop,) = done.events("server", "stop")
    assert "--max-batches 1500" in stop["reason"]
    assert "everybody stops" in done.output


def test_loop_that_asks_stops_at_max_batches_exactly(run):
    done = run(
        BEGIN + """
    while worker.ask("next") != "stop":
        train()
        """,
        "-n", "2", "--max-batches", "300",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert 300 <= steps(done, 2) <= 301, "one may be under way when the other makes the last"


def test_loop_without_a_model_counts_by_done(run):
    done = run(
        """
        import maniple
        worker, made = maniple.join(), 0
        while worker.ask("next", done=5 if made else 0) != "stop":
            made += 5
        worker.log(made=made)
        """,
        "-n", "2", "--max-batches", "100",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert 100 <= sum(logged(done, rank, "made")[0] for rank in range(2)) <= 110


def test_run_stops_after_total_duration_however_long_it_takes_to_start(run):
    done = run(
        BEGIN + """
    time.sleep(1.5)
    worker.log(starts=True)
    while not worker.should_stop:
        train()
        time.sleep(0.01)
        """,
        "-n", "2", "--total-duration", "1",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    (stop,) = done.events("server", "stop")
    assert "1 s have passed" in stop["reason"]
    begin = min(row["timestamp"] for rank in range(2) for row in done.events(rank, "log"))
    assert stop["timestamp"] - begin > 0.9, "no earlier than it should"


VALIDATING = (
    BEGIN
    + """
    def validate():
        number = len(list(pathlib.Path(".").glob("validated-*")))
        begin = time.time()
        with replica.center():
            seen = float(params["w"].max())
        if len(sys.argv) > 1 and number == 1 and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        loss = [3.0, 2.0, 1.0, float("nan"), 1.5][min(number, 4)]
        worker.log(begin=begin, end=time.time(), loss=loss, seen=seen)
        pathlib.Path(f"validated-{number}").touch()
        return worker.ask("validated", loss=loss)
    while (verdict := worker.ask("next")) != "stop":
        if verdict == "validate":
            worker.log(news=validate())
        else:
            train()
            time.sleep(0.001)
"""
)


def validations(run) -> list[dict]:
    rows = [row for rank in range(2) for row in run.events(rank, "log") if "loss" in row]
    return sorted(rows, key=lambda row: row["begin"])


def test_early_stopping_with_one_validator_at_a_time(start):
    done = start(VALIDATING, "-n", "2", "--validate-every", "40", "--patience", "3")
    assert done.wait() == 0, done.output
    rows = validations(done)
    assert [row["loss"] for row in rows] == [3, 2, 1, "nan", 1.5, 1.5]
    for one, other in itertools.pairwise(rows):
        assert one["end"] < other["begin"], "never two at once"
    (stop,) = done.events("server", "stop")
    assert "3 validations brought nothing better" in stop["reason"]
    news = sorted((new for rank in range(2) for new in logged(done, rank, "news")), key=str)
    assert (
        news
        == [{"best": False, "stop": False}] * 2 + [{"best": False, "stop": True}] + [{"best": True, "stop": False}] * 3
    )

    folder = done.folder / "center"
    assert not (folder / "candidate").exists()
    assert [path.name for path in folder.glob("best-*")] == ["best-000003"], "only the best is kept"
    best = load_file(folder / "best" / "center-0.safetensors")["w"]
    assert 80 <= best[0] <= rows[2]["seen"], "as it was when the third validation began"
    (before,) = set(done.center["w"])
    resume(done, "--max-batches", f"{before + 30:.0f}")
    (after,) = set(done.center["w"])
    assert before < after, "it goes on with the newest center"
    assert load_file(folder / "best" / "center-0.safetensors")["w"][0] == best[0], "and the best is still there"


def test_under_bsp_the_best_is_what_was_validated_and_compare_takes_its_values_as_the_center_s(run):
    done = run(
        """
        import numpy as np, maniple
        worker = maniple.join()
        params, validations = {"w": np.zeros(3)}, 0
        replica = worker.share(params)
        while (verdict := worker.ask("next")) != "stop":
            if verdict == "train":
                gradient = {"w": np.random.default_rng([worker.rank, replica.steps]).normal(size=3)}
                replica.samples = 10
                replica.reduce(gradient)
                params["w"] -= gradient["w"]
                replica.step()
                continue
            validations += 1
            with replica.center():
                loss = 100 - replica.steps
                worker.log(accuracy=replica.steps / 1000, sum=float(params["w"].sum()).hex(), loss=loss)
            worker.ask("validated", loss=loss)
        """,
        "-n", "2", "--rule", "bsp", "--validate-every", "30", "--max-batches", "160",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    rows = [row for rank in range(2) for row in done.events(rank, "log")]
    last = max(rows, key=lambda row: row["step"])
    assert len(rows) >= 3 and all(row["center"] is True for row in rows)
    best = load_file(done.folder / "center/best/center-0.safetensors")["w"]
    assert float(best.sum()).hex() == last["sum"], "bit by bit what the last validation, the best, has seen"
    command = [MANIPLE, "compare", done.folder, "--value", "accuracy", "--target", "0.04", "--json"]
    (found,) = json.loads(subprocess.check_output(command, text=True, timeout=PATIENCE_S))["runs"]
    assert (found["final_of"], found["final"]) == ("center", last["accuracy"]), "and no running mean"


def test_another_worker_takes_over_when_the_validator_is_killed(run):
    done = run(
        VALIDATING, "-n", "2", "--restarts", "1", "--validate-every", "40", "--patience", "2", args=("kill",)
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert len([row for row in done.events("host", "exit") if row["died"]]) == 1
    assert "no effect" not in done.output
    rows = validations(done)
    assert [row["loss"] for row in rows] == [3, 2, 1, "nan", 1.5], "the second was made by another"
    for one, other in itertools.pairwise(rows):
        assert one["end"] < other["begin"]


@pytest.mark.parametrize("epochs", [1, 1000])
def test_patience_without_validations_is_reported(start, tmp_path, epochs):
    """In a run of one epoch at its end, else when two epochs are over."""
    script = """
        import pathlib, sys, time, numpy as np, maniple
        worker = maniple.join()
        replica = worker.share({"w": np.zeros(3)})
        sampler = worker.sampler(40)
        for epoch in worker.epochs(int(sys.argv[1])):
            for batch in sampler.batches(10):
                replica.step()
                time.sleep(0.02)
            if pathlib.Path("end").exists():
                break
    """
    going = start(script, "-n", "1", "--patience", "3", args=(str(epochs),))
    going.await_event("host", "unvalidated")
    (tmp_path / "end").touch()
    assert going.wait() == 0, going.output
    (said,) = [line for line in going.output.splitlines() if "nothing was validated" in line]
    for words in ("--patience 3 has no effect", "--validate-every", 'worker.ask("validated", loss=...)'):
        assert words in said
    assert len(going.events("host", "unvalidated")) == 1


def alone(script: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_worker_alone_is_its_own_controller(tmp_path):
    said = alone(
        BEGIN + """
    verdicts, made = [], 0
    while not worker.should_stop:
        verdicts.append(worker.ask("next"))
        if verdicts[-1] == "validate":
            verdicts.append(worker.ask("validated", loss=1.0)["best"])
        train()
        made += 1
    verdicts.append(worker.ask("next"))
    print(made, *verdicts)
    try:
        worker.ask("something else")
    except maniple.ManipleError as error:
        print(error)
        """,
        tmp_path, MANIPLE_MAX_BATCHES="5", MANIPLE_VALIDATE_EVERY="2",
    )  # fmt: skip
    first, second = said.splitlines()
    assert first == "5 train train validate True train validate False stop"
    assert "the controller does not answer 'something else'" in second
    assert not (tmp_path / "runs").exists()


def test_worker_alone_without_limits_trains_on(tmp_path):
    said = alone(BEGIN + """
    for _ in range(100):
        train()
        assert worker.ask("next") == "train" and not worker.should_stop
    print(worker.ask("stop"), worker.should_stop)
    """, tmp_path)  # fmt: skip
    assert said == "{'stop': True} True\n"
