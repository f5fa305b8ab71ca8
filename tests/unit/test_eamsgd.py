"""EAMSGD: the paper's equations, step by step, and the optimizer that it needs."""

import numpy as np
import pytest

from maniple import EAMSGD, EASGD, Every, Replica
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.replica import Sharing, sharing_for
from maniple.replica.context import TrainingContext
from maniple.rules import changed
from tests.unit.engines import engine

torch = engine("torch")

DELTA, ETA, ALPHA, TAU, STEPS = 0.9, 0.05, 0.3, 4, 50
TARGETS = np.array([[1.0, -2.0, 3.0], [5.0, 0.0, -1.0]])  # worker i descends on curvature (x - target_i)^2 / 2
CURVATURE = np.array([1.0, 4.0, 0.25])


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    yield segment
    segment.remove()


def share(segment, rank, module, optimizer, rule) -> Replica:
    model = adapt(module, optimizer)
    center, _ = SharedCenter.open_or_create(segment, "center-0", model, rank=rank)
    segment.mark(rank, 1)
    sharing = sharing_for(rule, center, pace=Every(TAU), wire="float32", is_alone=False, open_collectives=lambda: None)
    context = TrainingContext(Environment(rank=rank, world=2, own_data=True))
    replica = Replica(model, sharing, rule=rule, pace=Every(TAU), context=context)
    replica.sharing.begin()
    return replica


class Point(torch.nn.Module):
    """A point that descends."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))


def test_two_workers_make_the_steps_of_the_paper(segment):
    modules = [Point() for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=ETA) for module in modules]
    rule = EAMSGD(ALPHA, DELTA)
    replicas = [share(segment, i, modules[i], optimizers[i], rule) for i in range(2)]
    x, v, c = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(3)
    for t in range(1, STEPS + 1):
        for i in range(2):
            optimizers[i].zero_grad()
            loss = (torch.tensor(CURVATURE) * (modules[i].w - torch.tensor(TARGETS[i])) ** 2 / 2).sum()
            loss.backward()
            optimizers[i].step()  # and an exchange after each fourth one
            v[i] = DELTA * v[i] - ETA * CURVATURE * (x[i] + DELTA * v[i] - TARGETS[i])
            x[i] += v[i]
            if t % TAU == 0:
                d = ALPHA * (x[i] - c)
                x[i] -= d
                c += d
            np.testing.assert_allclose(modules[i].w.detach().numpy(), x[i] + DELTA * v[i], rtol=0, atol=1e-12)
    with replicas[0].center():
        np.testing.assert_allclose(modules[0].w.detach().numpy(), c, rtol=0, atol=1e-12)
    assert np.abs(c).max() > 0.5
    for replica in replicas:
        replica.finish(exchange=False)


def shared_alone(optimizer, module, rule=None) -> None:
    Replica(
        adapt(module, optimizer),
        Sharing(),
        rule=rule or EAMSGD(),
        pace=Every(1),
        context=TrainingContext(Environment()),
    )


def test_the_momentum_is_set_also_for_a_worker_alone():
    module = Point()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shared_alone(optimizer, module)
    assert optimizer.param_groups[0]["momentum"] == 0.99 and optimizer.param_groups[0]["nesterov"]
    shared_alone(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.99), module)  # the same one


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.Adam, r"a Adam.*torch\.optim\.SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), r"momentum=0\.9 .*0\.99.*EAMSGD\(delta=0\.9\)"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.99, dampening=0.5), r"dampening=0\.5"),
        (lambda p: None, "no optimizer"),
    ],
)
def test_another_optimizer_is_refused_with_the_remedy(make, reason):
    module = Point()
    with pytest.raises(InvalidArgument, match=reason):
        shared_alone(make(module.parameters()), module)


def test_arrays_without_an_optimizer_are_refused():
    with pytest.raises(InvalidArgument, match="choose EASGD"):
        shared_alone(None, {"w": np.zeros(3)})
    shared_alone(None, {"w": np.zeros(3)}, EASGD())


def test_alpha_may_be_changed_while_training_and_delta_not():
    assert changed(EAMSGD(0.5, 0.9), {"alpha": 0.25}) == EAMSGD(0.25, 0.9)
    with pytest.raises(InvalidArgument, match="another momentum"):
        changed(EAMSGD(0.5, 0.9), {"delta": 0.5})
