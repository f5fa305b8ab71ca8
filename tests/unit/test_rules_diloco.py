"""DiLoCo against its equations, and against the rules that it equals for some settings."""

import numpy as np
import pytest

from maniple import DiLoCo, LocalSGD, Rule
from maniple.contracts import ExchangeInfo
from maniple.errors import Conflict, InvalidArgument
from maniple.pace import Every, RateLimit
from maniple.replica.sharing import check_rule_and_pace
from maniple.rules import parse_rule
from maniple.rules.kernels import compiled, numpy_kernels

RNG = np.random.default_rng(5)


class Worker:
    """A replica, and what the rule keeps of it; with a center, as the center shares its state."""

    def __init__(self, start: np.ndarray) -> None:
        self.x, self.state = start.copy(), {"center": start.copy(), "momentum": np.zeros_like(start)}


def meet(rule: Rule, workers: list[Worker]) -> None:
    """One synchronous round."""
    offers = [np.empty_like(worker.x) for worker in workers]
    for worker, offer in zip(workers, offers, strict=True):
        rule.offer(worker.x, worker.state, offer)
    mean = np.mean(offers, axis=0)
    for worker in workers:
        rule.accept(worker.x, mean.copy(), worker.state, ExchangeInfo(live=len(workers)))


def test_the_outer_step_is_nesterovs():
    c, m, lr, mu = RNG.normal(size=7), np.zeros(7), 0.7, 0.9
    workers, rule = [Worker(c) for _ in range(3)], DiLoCo(lr=lr, momentum=mu)
    for _ in range(5):
        for worker in workers:
            worker.x += RNG.normal(size=7)
        d = np.mean([c - worker.x for worker in workers], axis=0)
        m = mu * m + d
        c = c - lr * (d + mu * m)
        meet(rule, workers)
        for worker in workers:
            np.testing.assert_allclose(worker.x, c, rtol=1e-12)


def test_the_outer_step_is_that_of_torch():
    torch = pytest.importorskip("torch")
    start = RNG.normal(size=4)
    outer = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    worker = Worker(start)
    for _ in range(4):
        worker.x += RNG.normal(size=4)
        outer.grad = torch.tensor(worker.state["center"] - worker.x)
        optimizer.step()
        meet(DiLoCo(), [worker])
        np.testing.assert_allclose(worker.x, outer.detach().numpy(), rtol=1e-12)


def test_without_momentum_it_is_local_sgd_to_the_bit():
    start = RNG.normal(size=9).astype(np.float32)
    ours, theirs = [Worker(start) for _ in range(3)], [Worker(start) for _ in range(3)]
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.x += (change := RNG.normal(size=9).astype(np.float32))
            other.x += change
        meet(DiLoCo(lr=1, momentum=0), ours)
        meet(LocalSGD(), theirs)
        assert all(np.array_equal(one.x, other.x) for one, other in zip(ours, theirs, strict=True))


def test_one_step_of_plain_sgd_per_round_is_synchronous_sgd():
    start, rate = RNG.normal(size=5), 0.1
    workers, single = [Worker(start) for _ in range(4)], start.copy()
    for _ in range(6):
        gradients = [RNG.normal(size=5) for _ in workers]
        for worker, gradient in zip(workers, gradients, strict=True):
            worker.x -= rate * gradient
        meet(DiLoCo(every=1, lr=1, momentum=0), workers)
        single -= rate * np.mean(gradients, axis=0)
        np.testing.assert_allclose(workers[0].x, single, rtol=1e-12)


def test_running_statistics_are_averaged_without_momentum():
    """A variance that falls from 1 to 0.01 would become negative with the outer step of the parameters."""
    workers, rule = [Worker(np.ones(2)) for _ in range(2)], DiLoCo()
    for worker in workers:
        rule.accept_buffer(worker.x, np.full(2, -0.99), worker.state, ExchangeInfo())
        assert np.allclose(worker.x, 0.01) and np.allclose(worker.state["center"], 0.01)


# The asynchronous form


def arrive(rule: DiLoCo, worker: Worker, c: np.ndarray, at_center: dict[str, np.ndarray], live: int) -> None:
    state = {"center": worker.state["center"]} | at_center
    assert rule.exchange(worker.x, c, state, ExchangeInfo(live=live)) is None


@pytest.mark.parametrize("buffer", [2, 3, 8, "auto"])
def test_delayed_nesterov_follows_its_equations_for_a_given_order_of_arrivals(buffer):
    """Liu et al. 2024, algorithm 3 with c = 0, written down once more without any of the library's code."""
    lr, beta, live = 0.5, 0.8, 2
    count = 4 if buffer == "auto" else buffer
    c, at_center = RNG.normal(size=6), {name: np.zeros(6) for name in ("momentum", "gathered")}
    at_center["arrivals"] = np.zeros(1)
    workers = [Worker(c) for _ in range(3)]
    theta, seen, m, s = c.copy(), [c.copy() for _ in workers], np.zeros(6), np.zeros(6)
    rule = DiLoCo(lr=lr, momentum=beta, sync=False, buffer=buffer)
    for t, w in enumerate([0, 1, 2, 2, 1, 0, 0, 0, 2, 1, 1, 2, 0, 1, 2, 0, 1], 1):
        change = RNG.normal(size=6)
        workers[w].x += change
        arrive(rule, workers[w], c, at_center, live)
        g = -change
        s += g
        if t % count == 0:
            m = beta * m + s / count
            theta = theta - lr * (beta * m + g / count)
            s = np.zeros(6)
        else:
            theta = theta - lr * g / count
        seen[w] = theta.copy()
        np.testing.assert_allclose(c, theta, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(workers[w].x, seen[w], rtol=1e-10, atol=1e-12)
    assert at_center["arrivals"][0] == 17 % count


def test_what_is_not_finite_changes_neither_center_nor_its_state():
    c, x, old = np.zeros(4), np.array([1.0, np.nan, 2.0, np.inf]), np.zeros(4)
    at_center = {"momentum": np.ones(4), "gathered": np.ones(4), "arrivals": np.array([1.0])}
    refused = DiLoCo(sync=False, buffer=2).exchange(x, c, {"center": old} | at_center, ExchangeInfo())
    assert refused is not None and refused.tolist() == [1, 3]
    assert c[[1, 3]].tolist() == x[[1, 3]].tolist() == old[[1, 3]].tolist() == [0, 0]
    assert at_center["momentum"][[1, 3]].tolist() == at_center["gathered"][[1, 3]].tolist() == [1, 1]
    assert at_center["gathered"][[0, 2]].tolist() == [0, 0] and (c[[0, 2]] != 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_full", [False, True])
def test_compiled_and_numpy_kernels_agree_to_the_bit(dtype, is_full):
    fast = compiled("maniple.rules.kernels.numba_kernels")
    if fast is None:
        pytest.skip("numba is not installed")
    given = [RNG.normal(size=70_001).astype(dtype) * 10.0 ** RNG.integers(-20, 20, 70_001) for _ in range(4)]
    given = [array.astype(dtype) for array in given]
    given[0][[3, 70_000]] = np.nan, np.inf
    results = []
    for kernels in (fast, numpy_kernels):
        x, c, gathered, momentum = (array.copy() for array in given)
        refused = kernels.nesterov(x, c, gathered, momentum, lr=0.7, beta=0.9, count=6, is_full=is_full)
        results.append([refused, x, c, gathered, momentum])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


# Settings


def test_settings_of_the_command_line():
    assert parse_rule("diloco:every=50,lr=0.5") == DiLoCo(50, 0.5)
    assert parse_rule("diloco:sync=false,buffer=8,dynamic=true") == DiLoCo(sync=False, buffer=8, dynamic=True)
    assert parse_rule("localsgd:k=20,fragments=2,delay=3,alpha=0.5") == LocalSGD(20, fragments=2, delay=3, alpha=0.5)
    assert parse_rule("diloco").every == 100


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sync": False, "buffer": 1}, "every single arrival and diverges"),
        ({"buffer": 4}, "Add sync=False"),
        ({"dynamic": True}, "Add sync=False"),
        ({"sync": False, "fragments": 2}, "sync=False has none"),
        ({"momentum": 1.5}, "not from 0 to 1"),
        ({"lr": -1}, "not from 0 to 2"),
        ({"every": 0}, "no whole number of 1 or more"),
        ({"every": 4, "fragments": 8}, "each fragment needs its own step"),
        ({"every": 10, "fragments": 2, "delay": 5}, "one round is in flight at a time"),
        ({"alpha": 2}, "a share from 0 to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, complaint):
    with pytest.raises(InvalidArgument, match=complaint):
        DiLoCo(**settings)


def test_fragments_need_a_pace_with_a_step_for_each():
    check_rule_and_pace(DiLoCo(fragments=4), Every(4))
    with pytest.raises(Conflict, match="no step of its own"):
        check_rule_and_pace(DiLoCo(fragments=4), Every(3))
    with pytest.raises(Conflict, match="each worker's own"):
        check_rule_and_pace(DiLoCo(), RateLimit(0.1))
    check_rule_and_pace(DiLoCo(sync=False), RateLimit(0.1))
