"""DiLoCo, fragments and overlap with real workers on every engine: they equal the rules and forms they must equal."""

import os
import signal
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.contract.collectives_ranks import find_mpiexec
from tests.waiting import PATIENCE_S, await_

from ..conftest import require
from .conftest import BARE, MANIPLE, Run

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]

# A linear model on NumPy arrays, in layers so that there is something to cut into fragments; plain SGD, 13 steps.
LESSONS = """
    import sys
    import numpy as np
    import maniple
    from maniple import BSP, DiLoCo, LocalSGD

    worker = maniple.join(own_data=True)
    rng = np.random.default_rng(worker.rank)
    X, Y = rng.normal(size=(13, 8, 3)), rng.normal(size=(13, 8))
    found = {}

    def train(name, rule, pace=None, kind="float64"):
        params = {f"layers.{i}.w": np.full(3, 0.1 * (i + 1), kind) for i in range(4)}
        replica = worker.share(params, rule=rule, pace=pace)
        for x, y in zip(X, Y):
            error = sum(x @ w for w in params.values()) - y
            gradients = {n: (error @ x / len(y)).astype(kind) for n in params}
            replica.reduce(gradients)
            for n, w in params.items():
                w -= (0.05 * gradients[n]).astype(kind)
            replica.step()
        replica.exchange() if replica.steps_since_exchange else None
        with replica.center():
            found[name] = np.array([*params.values()])
        found["rounds " + name] = np.array([replica.rounds])

    train("bsp", BSP())
    train("every step", DiLoCo(1, lr=1, momentum=0))
    train("localsgd", LocalSGD(4))
    train("plain", DiLoCo(4, lr=1, momentum=0))
    train("diloco", DiLoCo(4))
    train("no delay", DiLoCo(4, overlap=True, delay=0))
    train("localsgd, no delay", LocalSGD(4, overlap=True, delay=0))
    train("late", DiLoCo(4, delay=2))
    train("late again", DiLoCo(4, delay=2))
    train("late, mixed", DiLoCo(4, delay=2, alpha=0.5))
    train("fragments", DiLoCo(4, fragments=2))
    train("fragments of no delay", DiLoCo(4, fragments=2, overlap=True, delay=0))
    train("fragments, late", DiLoCo(4, fragments=4, delay=0, overlap=True, alpha=0.5))
    train("as answers come", LocalSGD(2, overlap=True))
    train("narrow", DiLoCo(4), kind="float32")
    np.savez(f"{sys.argv[1]}-{worker.rank}.npz", **found)
"""


@pytest.fixture(scope="module", params=["shared", "torch", "mpi"])
def lessons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What each of two workers ended with."""
    folder = tmp_path_factory.mktemp("diloco")
    (folder / "script.py").write_text(textwrap.dedent(LESSONS))
    command, env = [str(MANIPLE), "run", "--name", "run", "-n", "2", "--collectives", request.param], dict(BARE)
    if request.param == "torch":
        pytest.importorskip("torch")
    if request.param == "mpi":
        launcher = find_mpiexec()
        require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
        command = [str(launcher), "-n", "2", str(MANIPLE.with_name("python"))]
        env |= {"MANIPLE_COLLECTIVES": "mpi"}
    run = Run(folder, "run", [*command, "script.py", "out"], env)
    assert run.wait() == 0, run.output
    return [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localsgd", "plain"),  # lr 1 and momentum 0
        ("diloco", "no delay"),
        ("localsgd", "localsgd, no delay"),
        ("fragments", "fragments of no delay"),
        ("late", "late again"),
    ],
)
def test_these_are_the_same_to_the_bit(lessons: Any, one: str, other: str):
    for found in lessons:
        assert found[one].tobytes() == found[other].tobytes()


def test_an_exchange_at_each_step_of_plain_sgd_is_bsp(lessons: Any):
    np.testing.assert_allclose(lessons[0]["every step"], lessons[0]["bsp"], rtol=1e-12)


def test_all_workers_have_the_same_center(lessons: Any):
    for name, value in lessons[0].items():
        if name != "as answers come":  # which has other replicas, but the same center after the last exchange
            assert value.tobytes() == lessons[1][name].tobytes(), name


def test_what_comes_late_or_in_fragments_is_another_history(lessons: Any):
    """Else the lessons above would show nothing."""
    found = lessons[0]
    for one, other in [("diloco", "late"), ("late", "late, mixed"), ("diloco", "fragments"), ("diloco", "localsgd")]:
        assert not np.allclose(found[one], found[other], rtol=1e-6), (one, other)
    assert (
        found["rounds diloco"] == 4 and found["rounds fragments"] == 8 and found["rounds fragments, late"] == 16 - 3 + 4
    )


def test_the_outer_step_is_that_of_the_equations(lessons: Any):
    """The same training in one process, with the outer step written down once more."""
    data = [(rng.normal(size=(13, 8, 3)), rng.normal(size=(13, 8))) for rng in map(np.random.default_rng, range(2))]
    c = np.array([[0.1 * (i + 1)] * 3 for i in range(4)])
    m, replicas = np.zeros_like(c), [c.copy(), c.copy()]
    for step in range(13):
        for x, (inputs, targets) in zip(replicas, data, strict=True):
            error = sum(inputs[step] @ w for w in x) - targets[step]
            x -= 0.05 * (error @ inputs[step] / 8)
        if step % 4 == 3 or step == 12:
            d = c - np.mean(replicas, axis=0)
            m = 0.9 * m + d
            c = c - 0.7 * (d + 0.9 * m)
            replicas = [c.copy(), c.copy()]
    np.testing.assert_allclose(lessons[0]["diloco"], c, rtol=1e-10)
    np.testing.assert_allclose(lessons[0]["narrow"], c, rtol=1e-5)


def test_a_single_worker_makes_the_outer_step_alone(tmp_path: Path, without_numba: None):
    """Also without a launcher: each round's result is Nesterov's step from the change of the last steps."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import numpy as np, maniple
            worker = maniple.join()
            params = {"w": np.zeros(2)}
            replica = worker.share(params, rule=maniple.DiLoCo(3, lr=0.5, momentum=0.5))
            for step in range(6):
                params["w"] += 1
                replica.step()
            print("after", *params["w"])
            """
        )
    )
    for command in ([str(MANIPLE.with_name("python"))], [str(MANIPLE), "run", "--name", "run"]):
        run = Run(tmp_path, "run", [*command, "script.py"], BARE)
        assert run.wait() == 0, run.output
        # c += 0.5 (3 + 0.5 * 3) = 2.25; then m = 0.5 * 3 + 3 and c += 0.5 (3 + 0.5 * 4.5) = 4.875
        assert "after 4.875 4.875" in run.output


WARM = """
    import pathlib, sys, time
    import numpy as np, maniple

    worker = maniple.join(own_data=True)
    params = {"w": np.zeros(3)}
    rule = maniple.DiLoCo(2, lr=1, momentum=0, sync=False, buffer=2, warm=3)
    replica = worker.share(params, rule=rule)
    for step in range(6):
        params["w"] += worker.rank + 1
        replica.step()
    print("warm", worker.rank, *params["w"], replica.rounds, flush=True)
    stop = pathlib.Path(sys.argv[1])
    while not stop.exists():
        replica.step()
        time.sleep(0.02)
"""


def test_warm_rounds_come_first_and_who_comes_later_goes_on_with_the_center(start: Any, tmp_path: Path):
    stop = tmp_path / "stop"
    run = start(WARM, "-n", "2", "--restarts", "1", args=(str(stop),), env=BARE)
    run.await_event(1, "exchange", count=2)  # after the rounds
    os.kill(run.pid(1), signal.SIGKILL)
    run.await_event(1, "join", count=2)
    again = run.await_event(1, "pull", count=2)
    await_(lambda: len([row for row in run.events(1, "exchange") if row["start"] > again[-1]["start"]]) > 2)
    stop.touch()
    assert run.wait() == 0, run.output
    said = [line.split("warm ")[1] for line in run.output.splitlines() if "warm" in line and "W" in line]
    # Three rounds of the mean of changes by 2 and by 4; then the worker that came back added 2 in 6 steps of its own.
    assert said[:2] and {line.partition(" ")[2] for line in said[:2]} == {"9.0 9.0 9.0 3"}
    assert len(said) == 3


def test_a_resumed_run_makes_the_warm_rounds_that_are_left(tmp_path: Path, without_numba: None):
    script = """
        import sys
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        params = {"w": np.zeros(3)}
        replica = worker.share(params, rule=maniple.DiLoCo(2, sync=False, warm=5))
        for step in range(int(sys.argv[1])):
            params["w"] += 1
            replica.step()
        print("made", replica.rounds, flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    for options, steps, made in ((("--name", "run"), 4, 2), (("--resume", "runs/run"), 12, 3)):
        run = Run(tmp_path, "run", [str(MANIPLE), "run", *options, "-n", "2", "script.py", str(steps)], BARE)
        assert run.wait() == 0, run.output
        assert run.output.count(f"made {made}") == 2


def test_a_worker_that_ends_before_the_warm_rounds_do_stops_no_other(start: Any):
    pytest.importorskip("torch")
    script = """
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        params = {"w": np.zeros(3)}
        rule = maniple.DiLoCo(2, lr=1, momentum=0, sync=False, buffer=2, warm=4)
        replica = worker.share(params, rule=rule)
        for step in range(5 if worker.rank else 14):
            params["w"] += 1
            replica.step()
    """
    run = start(script, "-n", "2", "--collectives", "torch", "--collectives-deadline", "60", env=BARE)
    assert run.wait() == 0, run.output
    # Four rounds: of 2 steps each, of the last step and 2, and of 2 alone; then 6 steps, each of which counts half.
    center = load_file(run.folder / "center" / "center-0.safetensors")["w"]
    np.testing.assert_array_equal(center, 2 + 2 + 1.5 + 2 + 3)


def test_a_worker_in_a_call_of_the_script_is_not_left_out_of_its_round_in_flight(start: Any):
    script = """
        import time
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        params = {"w": np.zeros(3)}
        replica = worker.share(params, rule=maniple.LocalSGD(2, overlap=True))
        make_call = replica.sharing._call_round

        def call_round(weight):
            act = make_call(weight)

            def later():
                time.sleep(0.3 * (worker.rank == 0))  # its machine is busy
                return act()

            return later

        replica.sharing._call_round = call_round
        for step in range(6):
            params["w"] += 1 + 2 * worker.rank
            replica.step()
            time.sleep(0.4 * worker.rank)
            worker.all_reduce(np.ones(1))
        with replica.center():  # the third round is in flight
            print("center", *params["w"], flush=True)
    """
    run = start(script, "-n", "2", env=BARE)
    assert run.wait() == 0, run.output
    assert not [row for rank in range(2) for row in run.events(rank, "passed over")]
    assert run.output.count("center 12.0 12.0 12.0") == 2


def test_slow_workers_make_fewer_steps_between_exchanges(start: Any, tmp_path: Path):
    script = """
        import pathlib, sys, time
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        params = {"w": np.zeros(3)}
        replica = worker.share(params, rule=maniple.DiLoCo(40, sync=False, dynamic=True))
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.02 if worker.rank else 0.005)
            replica.step()
    """
    stop = tmp_path / "stop"
    run = start(script, "-n", "2", args=(str(stop),), env=BARE)

    def distance() -> int:
        steps = [row["step"] for row in run.events(1, "exchange")]
        return steps[-1] - steps[-2] if len(steps) > 1 else 40

    await_(lambda: distance() < 25)
    fast = [row["step"] for row in run.events(0, "exchange")]
    assert fast[-1] - fast[-2] == 40
    stop.touch()
    assert run.wait() == 0, run.output


# Adds 1 to all elements at each step. With lr 1, momentum 0 and a buffer of 2, the center is exactly half of the sum.
COUNTING = """
    import pathlib, sys, time
    import numpy as np, maniple

    worker = maniple.join(own_data=True)
    params = {"a": np.zeros(300_000), "b": np.zeros(7)}
    rule = maniple.DiLoCo(1, lr=1, momentum=0, sync=False, buffer=2, overlap=len(sys.argv) > 2)
    replica = worker.share(params, rule=rule)
    while not pathlib.Path(sys.argv[1]).exists():
        for value in params.values():
            value += 1
        replica.step()
        time.sleep(0.002)
    worker.leave()
    print("steps", replica.steps, flush=True)
"""


def test_kills_of_the_server_lose_and_double_nothing_and_a_resumed_run_has_the_same_outer_state(serve, tmp_path):
    host, stop = serve("--snapshot-every", "0"), tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), *more) for more in ((), ("overlap",))]
    host.await_event(1, "exchange")
    for kill in range(1, 11):
        host.await_event("server", "serving", count=kill)
        made = len(host.events(0, "exchange")) + len(host.events(1, "exchange"))
        await_(lambda made=made: len(host.events(0, "exchange")) + len(host.events(1, "exchange")) > made)
        os.kill(host.server_pid, signal.SIGKILL)
        host.await_event("host", "server", count=kill + 1)
    stop.touch()
    steps = 0
    for worker in workers:
        output = worker.communicate(timeout=PATIENCE_S)[0]
        assert worker.returncode == 0, output
        steps += int(output.rpartition("steps ")[2])
    assert host.end() == 0, host.output
    state_file = host.folder / "center" / "center-0.state.safetensors"
    first, state = host.center, load_file(state_file)
    for value in first.values():
        np.testing.assert_array_equal(2 * value, steps)
    chunks = zip(state["arrivals"], (slice(0, 262_144), slice(262_144, None)), strict=True)
    for arrivals, part in chunks:
        gathered = state["gathered/float64"][part]  # of one arrival; 0 if its worker had nothing new
        assert arrivals in {0, 1} and (gathered == gathered[0]).all() and gathered[0] >= 0
        assert arrivals or not gathered[0]
    again = serve(name=host.folder.name)
    late = again.join(COUNTING, str(stop))  # makes no step, and exchanges nothing
    assert late.wait(PATIENCE_S) == 0, late.communicate()[0]
    assert again.end() == 0, again.output
    for name, value in load_file(state_file).items():
        assert value.tobytes() == state[name].tobytes(), name
    assert all(value.tobytes() == first[name].tobytes() for name, value in again.center.items())


def test_workers_that_die_in_rounds_in_the_background_come_back_with_the_others_state(start: Any, tmp_path: Path):
    """After each round the center and the outer momentum of all workers are compared (check_every)."""
    script = """
        import pathlib, sys, time
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        rng = np.random.default_rng([worker.rank, int(time.time())])
        params = {f"layers.{i}": np.zeros(40_000) for i in range(5)}
        rule = maniple.DiLoCo(6, fragments=3, overlap=True, check_every=1)
        replica = worker.share(params, rule=rule)
        while not pathlib.Path(sys.argv[1]).exists():
            for value in params.values():
                value += rng.normal(size=value.size)
            replica.step()
            worker.log(rounds=replica.rounds)
            time.sleep(0.002)
    """
    stop = tmp_path / "stop"
    run = start(script, "-n", "3", "--restarts", "9", args=(str(stop),), env=BARE)

    def rounds(rank: int) -> int:
        return max((row.get("rounds", 0) for row in run.events(rank, "progress")), default=0)

    for kill in range(4):
        victim = 1 + kill % 2
        run.await_event(victim, "join", count=1 + kill // 2)
        made = len(run.events(victim, "log"))
        await_(lambda victim=victim, made=made: len(run.events(victim, "log")) > made + 5)
        os.kill(run.pid(victim), signal.SIGKILL)
        before = rounds(0)
        await_(lambda before=before: rounds(0) > before + 2)
    for victim in (1, 2):
        entered = run.await_event(victim, "entered", count=2)
        await_(
            lambda victim=victim, entered=entered: (
                run.events(victim, "progress")[-1]["timestamp"] > entered[-1]["timestamp"]
            )
        )
    stop.touch()
    assert run.wait() == 0, run.output
    assert "no longer equal" not in run.output
    momentum = load_file(run.folder / "center" / "center-0.state.safetensors")["momentum/float64"]
    assert np.abs(momentum).min() > 0


def test_a_signal_ends_the_wait_for_a_round_in_flight(start: Any, tmp_path: Path):
    """Worker 1 is stuck; worker 0 leaves in order all the same, before SIGKILL follows."""
    script = """
        import pathlib, sys, time
        import numpy as np, maniple

        worker = maniple.join(own_data=True)
        replica = worker.share({"w": np.zeros(3)}, rule=maniple.LocalSGD(2, overlap=True))
        for step in range(4):
            replica.step()
        while worker.rank and not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.05)
        while not worker.rank:
            replica.step()
            time.sleep(0.02)
    """
    stop = tmp_path / "stop"
    run = start(script, "-n", "2", "--collectives-deadline", "600", args=(str(stop),), env=BARE)
    run.await_event(0, "waiting")  # 2 s
    os.kill(run.pid(0), signal.SIGTERM)
    run.await_event(0, "leave")
    stop.touch()
    run.wait()
