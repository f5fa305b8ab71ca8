"""Pairwise rules with real workers: who has what after each round is what the drawn pairs say."""

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maniple.rules import draw_pairs
from tests.waiting import await_

from .conftest import BARE, MANIPLE, Run

pytestmark = pytest.mark.usefixtures("without_numba")

WORLD, ROUNDS, SEED = 3, 6, 11

# Nothing trains: each worker marks its replica with its rank, and notes what it has after each round.
LESSONS = """
    import sys
    import numpy as np
    import torch
    import maniple

    torch.set_num_threads(1)
    worker = maniple.join()
    mine, found = worker.rank + 1.0, {}

    def arrays():
        return {"g.w": np.zeros(5, "float32"), "d.w": np.zeros((2, 3)), "d.b": np.zeros(600_000, "float32")}

    def mark(params):
        for value in params.values():
            value[...] = mine

    def rounds(name, params, replica, count):
        for number in range(count):
            worker.log(loss=params["d.w"][0, 0])
            replica.step()
            found.setdefault(name, []).append([value.flat[0] for value in params.values()])
            assert all((value == value.flat[0]).all() for value in params.values())

    for name, rule in (
        ("all", maniple.Swap(1)),
        ("part", maniple.Swap(1, names="d.*")),
        ("min", maniple.Tournament(every=1)),
        ("max", maniple.Tournament(every=1, mode="max")),
    ):
        params = arrays()
        replica = worker.share(params, rule=rule)
        mark(params)
        rounds(name, params, replica, %(rounds)d)
        if name == "max":
            worker.barrier()
            with replica.center():
                found["center"] = [params["d.w"][0, 0]]
            assert params["d.w"][0, 0] == found["max"][-1][1], "the worker's own replica is back"

    # A replica that is not finite loses; if its partner is no better, it continues from the center.
    params = arrays()
    replica = worker.share(params, rule=maniple.Tournament(every=1))
    mark(params)
    if worker.rank == 1:
        params["d.b"][7] = np.nan
    for number in range(4):
        worker.log(loss=-1.0 if worker.rank == 1 else 1.0)
        replica.step()
    found["healed"] = [float(np.isfinite(params["d.b"]).all())]

    # A swap gives nobody values that are not finite: all end where it is found.
    params = arrays()
    replica = worker.share(params, rule=maniple.Swap(1))
    mark(params)
    params["d.b"][7] = np.nan if worker.rank == 1 else mine
    try:
        replica.step()
    except maniple.errors.Diverged as error:
        assert "'d.b' of worker 1 holds NaN" in str(error), error
        found["diverged"] = [float(params["g.w"][0])]

    # The loser has the winner's parameters, momentum and learning rate, times a factor of its own.
    for name, takes_optimizer in (("with", True), ("without", False)):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * mine, momentum=0.9)
        rule = maniple.Tournament(every=1, optimizer=takes_optimizer, perturb={"lr": (0.5, 2.0)})
        replica = worker.share(model, optimizer, rule=rule)
        with torch.no_grad():
            model.weight.fill_(mine)
        worker.log(loss=mine)
        model(torch.full((1, 2), mine)).sum().backward()
        before = model.weight[0, 0].item() - optimizer.param_groups[0]["lr"] * mine
        optimizer.step()
        buffer = optimizer.state[model.weight]["momentum_buffer"]
        found[name] = [before, model.weight[0, 0].item(), buffer[0, 0].item(), optimizer.param_groups[0]["lr"]]
    np.savez(f"{sys.argv[1]}-{worker.rank}.npz", **found)
""" % {"rounds": ROUNDS}  # noqa: UP031 - the script has braces


@pytest.fixture(scope="module", params=["shared", "torch"])
def lessons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What each worker has noted."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "script.py").write_text(textwrap.dedent(LESSONS))
    options = ["-n", str(WORLD), "--seed", str(SEED), "--collectives", request.param]
    run = Run(folder, "run", [str(MANIPLE), "run", "--name", "run", *options, "script.py", "out"], BARE)
    assert run.wait() == 0, run.output
    return [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(WORLD)]


def pairs(number: int) -> dict[int, int]:
    return draw_pairs(range(WORLD), seed=SEED, number=number)


def test_partners_swap_their_replicas_and_the_one_without_keeps_its_own(lessons: Any):
    has = [rank + 1.0 for rank in range(WORLD)]
    for number in range(ROUNDS):
        has = [has[pairs(number).get(rank, rank)] for rank in range(WORLD)]
        assert [one["all"][number].tolist() for one in lessons] == [[value] * 3 for value in has]
    assert has != [1, 2, 3]


def test_named_parts_are_swapped_and_the_rest_stays(lessons: Any):
    has = [rank + 1.0 for rank in range(WORLD)]
    for number in range(ROUNDS):
        has = [has[pairs(number).get(rank, rank)] for rank in range(WORLD)]
        assert [one["part"][number].tolist() for one in lessons] == [[r + 1, v, v] for r, v in enumerate(has)]


@pytest.mark.parametrize(("mode", "better"), [("min", min), ("max", max)])
def test_the_worse_of_two_takes_over_the_replica_of_the_other(lessons: Any, mode: str, better: Any):
    has = [rank + 1.0 for rank in range(WORLD)]
    for number in range(ROUNDS):
        has = [better(has[rank], has[pairs(number).get(rank, rank)]) for rank in range(WORLD)]
        assert [one[mode][number].tolist() for one in lessons] == [[value] * 3 for value in has]
    assert set(has) == {better(1.0, 2.0, 3.0)}, "the best has spread to all"


def test_the_center_shows_the_best_replica_of_a_tournament(lessons: Any):
    assert [one["center"].tolist() for one in lessons] == [[3.0]] * WORLD


def test_a_replica_that_is_not_finite_loses_a_tournament_and_ends_a_swap(lessons: Any):
    assert [one["healed"].tolist() for one in lessons] == [[1.0]] * WORLD
    assert [one["diverged"].tolist() for one in lessons] == [[3.0], [2.0], [1.0]], "the finite ones have swapped"


@pytest.mark.parametrize("takes_optimizer", [True, False])
def test_the_loser_has_the_optimizer_of_the_winner_with_settings_of_its_own(lessons: Any, takes_optimizer: bool):
    found = [one["with" if takes_optimizer else "without"].tolist() for one in lessons]
    drawn = pairs(0)
    for rank, (_, weight, momentum, lr) in enumerate(found):
        winner = min(rank, drawn.get(rank, rank))
        owner = winner if takes_optimizer else rank
        assert weight == pytest.approx(found[winner][0])
        assert momentum == pytest.approx(owner + 1.0)
        factors = (0.5, 2.0) if winner != rank else (1.0,)
        assert any(lr == pytest.approx(0.5 * (owner + 1) * factor) for factor in factors)


GOING = """
    import sys, time
    from pathlib import Path
    import numpy as np, maniple

    worker = maniple.join(own_data=True)
    params = {"w": np.zeros(400_000), "b": np.zeros(3, "float32")}
    replica = worker.share(params, rule=maniple.Swap(1))
    if replica.rounds == 0 and not params["b"].any():
        for value in params.values():
            value[...] = worker.rank + 1
    while not Path(sys.argv[1]).exists():
        time.sleep(0.005)
        replica.step()
        values = {float(one) for value in params.values() for one in (value.min(), value.max())}
        worker.log(rounds=replica.rounds, members=list(replica.members), values=sorted(values))
"""


def rows(run: Run, rank: int) -> list[Any]:
    return run.events(rank, "log")


def test_a_killed_worker_takes_one_replica_with_it_and_comes_back_as_a_copy(start: Any, tmp_path: Path):
    stop = tmp_path / "stop"
    run = start(GOING, "-n", "4", "--restarts", "1", args=(str(stop),))
    await_(lambda: min(len(rows(run, rank)) for rank in range(4)) > 10)
    os.kill(run.pid(2), signal.SIGKILL)
    run.await_event(2, "entered")
    await_(lambda: rows(run, 0)[-1]["members"] == [0, 1, 2, 3] and len(rows(run, 2)) > 40)
    stop.touch()
    assert run.wait() == 0, run.output
    by_round: dict[int, dict[int, float]] = {}
    for rank in range(4):
        for row in rows(run, rank):
            assert len(row["values"]) == 1, "a replica is exchanged as a whole"
            by_round.setdefault(row["rounds"], {})[rank] = row["values"][0]
    for has in by_round.values():
        assert set(has.values()) <= {1, 2, 3, 4}
    whole = [has for has in by_round.values() if len(has) == 4]
    assert sorted(whole[0].values()) == [1, 2, 3, 4]
    assert len(set(whole[-1].values())) >= 3


def test_a_resumed_run_continues_with_the_replica_of_each_worker(start: Any, tmp_path: Path):
    stop = tmp_path / "stop"
    first = start(GOING, "-n", "3", args=(str(stop),))
    await_(lambda: min(len(rows(first, rank)) for rank in range(3)) > 5)
    stop.touch()
    assert first.wait() == 0, first.output
    begun = [len(rows(first, rank)) for rank in range(3)]
    stop.unlink()
    second = Run(tmp_path, first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder)], {})
    await_(lambda: min(len(rows(second, rank)) - begun[rank] for rank in range(3)) > 5)
    stop.touch()
    assert second.wait() == 0, second.output
    after = [{row["rounds"]: row["values"] for row in rows(second, rank)[begun[rank] :]} for rank in range(3)]
    assert sorted(values[1][0] for values in after) == [1, 2, 3]
