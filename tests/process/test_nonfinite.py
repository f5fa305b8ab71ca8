"""Contributions to collectives that are not finite: one worker's NaN reaches nobody else, and is named."""

import json
import textwrap
from typing import Any

import numpy as np
import pytest

from .conftest import BARE, MANIPLE, Run

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]

# Worker r changes each value by CHANGES[r] in each step; in `bad` steps, the second value of `b` by NaN.
LESSONS = """
    import json, sys, warnings
    import numpy as np
    import maniple
    from maniple.errors import Diverged

    warnings.simplefilter("ignore")
    worker = maniple.join()
    found = {}

    def train(name, rule, bad, steps=3):
        w = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
        replica = worker.share(w, rule=rule, pace=maniple.Every(1))
        errors, centers = [], []
        for step in range(1, steps + 1):
            change = {k: np.full(2, (1, 2, 6)[worker.rank], np.float32) for k in w}
            if worker.rank in bad.get(step, ()):
                change["b"][1] = np.nan
            try:
                if rule.averages_gradients:
                    replica.reduce(change)
                for k in w:
                    w[k] += change[k]
                replica.step()
            except Diverged as error:
                errors.append(str(error))
                break
            with replica.center():
                centers.append(w["a"].tolist() + w["b"].tolist())
        found[name] = {"errors": errors, "values": w["a"].tolist() + w["b"].tolist(), "centers": centers}
        w["b"][:] = w["a"]  # the last exchange is one of finite values

    def synchronous(kind):
        return lambda **settings: kind(sync=True, **settings)

    meeting = {"bsp": maniple.BSP, "easgd": synchronous(maniple.EASGD), "downpour": synchronous(maniple.Downpour)}
    meeting["local"] = lambda **settings: maniple.LocalSGD(1, **settings)
    meeting["msync"] = lambda **settings: maniple.MSync(3, **settings)
    for name, rule in meeting.items():
        train(f"stop {name}", rule(), {3: [1]}, steps=4)
        train(f"skip {name}", rule(nonfinite="skip"), {2: [1]})
    train("nobody bsp", maniple.BSP(nonfinite="skip"), {2: [0, 1, 2]})
    train("nobody local", maniple.LocalSGD(1, nonfinite="skip"), {2: [0, 1, 2]})
    train("in a row", maniple.BSP(nonfinite="skip"), {1: [1], 2: [1], 3: [1]}, steps=4)
    train("not in a row", maniple.BSP(nonfinite="skip"), {1: [1], 2: [1], 3: [2], 4: [1]}, steps=4)
    train("center", maniple.LocalSGD(1), {}, steps=40)
    with open(f"{sys.argv[1]}-{worker.rank}.json", "w") as file:
        json.dump(found, file)
"""
RULES = ("bsp", "local", "msync", "easgd", "downpour")


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]]]:
    """The run, and what its three workers have found."""
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "script.py").write_text(textwrap.dedent(LESSONS))
    run = Run(folder, "run", [str(MANIPLE), "run", "--name", "run", "-n", "3", "script.py", "out"], BARE)
    assert run.wait() == 0, run.output
    return run, [json.loads((folder / f"out-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("rule", RULES)
def test_all_workers_end_in_the_round_and_name_worker_step_and_parameter(lessons: Any, rule: str):
    run, found = lessons
    for one in found:
        (error,) = one[f"stop {rule}"]["errors"]
        assert "'b' of worker 1 holds NaN or infinity in step 3" in error and "nonfinite='skip'" in error
        assert len(one[f"stop {rule}"]["centers"]) == 2
    for one in (found[0], found[2]):
        assert np.isfinite(one[f"stop {rule}"]["values"]).all()  # it has not reached the others
    rows = run.events(1, "nonfinite")
    assert {"step": 3, "parameter": "b"}.items() <= rows[0].items() and not run.events(0, "nonfinite")[2:]


@pytest.mark.parametrize(("rule", "expected"), [("bsp", 9.5), ("local", 9.5), ("msync", 9.5), ("downpour", 25)])
def test_what_is_not_finite_is_left_out_of_the_mean(lessons: Any, rule: str, expected: float):
    for one in lessons[1]:
        assert one[f"skip {rule}"] == {
            "errors": [],
            "values": [expected] * 4,
            "centers": one[f"skip {rule}"]["centers"],
        }


def test_replica_of_synchronous_easgd_returns_to_the_center_when_it_is_not_finite(lessons: Any):
    _, found = lessons
    for one in found:
        assert not one["skip easgd"]["errors"] and np.isfinite(one["skip easgd"]["values"]).all()
    assert len({tuple(one["skip easgd"]["centers"][-1]) for one in found}) == 1


@pytest.mark.parametrize("rule", ["bsp", "local"])
def test_a_round_in_which_nobody_is_finite_changes_nothing(lessons: Any, rule: str):
    for one in lessons[1]:
        assert one[f"nobody {rule}"]["values"] == [6, 6, 6, 6] and not one[f"nobody {rule}"]["errors"]


def test_three_in_a_row_of_one_worker_end_the_run(lessons: Any):
    for one in lessons[1]:
        (error,) = one["in a row"]["errors"]
        assert "worker 1" in error and "3 times in a row (limit 3)" in error and "step 3" in error
        assert one["in a row"]["values"] == [7, 7, 7, 7]
        assert not one["not in a row"]["errors"]


def test_center_is_that_of_the_last_round_on_all_workers(lessons: Any):
    for one in lessons[1]:
        assert one["center"]["centers"] == [[3.0 * step] * 4 for step in range(1, 41)]


@pytest.mark.parametrize(("rule", "kept"), [("BSP()", 4.0), ("LocalSGD(10)", 0.0)])
def test_run_does_not_end_well_and_keeps_the_last_finite_center(run: Any, rule: str, kept: float):
    """With LocalSGD the contribution is that of the end of the script."""
    script = f"""
        import numpy as np, maniple
        worker = maniple.join()
        w = {{"w": np.zeros(10, np.float32)}}
        rule = maniple.{rule}
        replica = worker.share(w, rule=rule)
        for step in range(1, 6):
            change = {{"w": np.full(10, np.nan if step == 5 and worker.rank == 1 else 1, np.float32)}}
            if rule.averages_gradients:
                replica.reduce(change)
            w["w"] += change["w"]
            replica.step()
    """
    done = run(script, "-n", "2", env=BARE)
    assert done.process.returncode == done.description["exit_code"] == 1
    for rank in range(2):
        assert "'w' of worker 1 holds NaN or infinity in step 5" in done.log(rank), done.log(rank)
    assert (done.center["w"] == kept).all()
