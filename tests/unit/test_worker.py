"""What a worker tells a person of: data that nothing divides, a model that is not shared, questions
that are none."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import maniple
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.job import Job
from maniple.launch.run import worker_environment
from maniple.worker import worker as module
from maniple.worker.worker import Worker

TWO = Environment(world=2, launcher="maniple")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    """Joins as a place says, without a host; the process of the tests stays as it is."""
    monkeypatch.setattr(module, "watch_exit", lambda **_: None)
    monkeypatch.setattr(module, "mark_joined", lambda rank: None)
    monkeypatch.setattr(module, "_joined", None)
    monkeypatch.setattr(module, "_SHARES_TOO", ())  # other tests have imported them

    def joined(environment: Environment, **settings: Any) -> Worker:
        monkeypatch.setattr(module, "read_environment", lambda address: environment)
        monkeypatch.setattr(module, "check_not_inherited", lambda: None)
        return maniple.join(**settings)

    return joined


def step(worker: Worker) -> None:
    replica = worker.share({"w": np.zeros(3)}, rule=maniple.EASGD())
    replica.step()
    replica.step()


def test_first_step_of_worker_0_warns_once(joined, capsys):
    step(joined(TWO))
    assert capsys.readouterr().err.count("2 workers train, and nothing divides the data among them") == 1


@pytest.mark.parametrize(
    ("environment", "settings", "act"),
    [
        (TWO.replace(rank=1), {}, lambda worker: None),
        (Environment(world=1), {}, lambda worker: None),
        (TWO, {"own_data": True}, lambda worker: None),
        (TWO.replace(own_data=True), {}, lambda worker: None),
        (TWO, {}, lambda worker: worker.seed),
        (TWO, {}, lambda worker: worker.sampler(10)),
        (TWO, {}, lambda worker: worker.sampler(10).batches(2)),
    ],
    ids=["worker 1", "alone", "own data", "by the launcher", "seed", "sampler", "batches"],
)
def test_no_warning_where_data_are_divided_or_each_worker_has_its_own(joined, capsys, environment, settings, act):
    worker = joined(environment, **settings)
    act(worker)
    step(worker)
    assert "divides" not in capsys.readouterr().err


def test_sampler_for_validation_divides_no_training_data(joined, capsys):
    worker = joined(TWO)
    worker.sampler(10, validation=True)
    step(worker)
    assert "nothing divides the data" in capsys.readouterr().err


def test_worker_that_joins_others_by_itself_is_warned_in_its_own_terminal(joined, capsys):
    step(joined(Environment(rank=1, world=1, collectives="shared")))
    assert "several workers train, and nothing divides the data" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "own"), [(("--shard", "part-{rank}.npz"), True), (("--lr", "0.1"), False)])
def test_arguments_with_the_rank_say_that_each_worker_has_its_own_data(tmp_path, args, own):
    class Owner:
        folder = segment = type("", (), {"path": tmp_path})()

    assert worker_environment(Job(args=args), Owner(), is_queued=False).own_data is own


@pytest.mark.parametrize(
    ("environment", "is_warned"),
    [
        (Environment(world=2, launcher="torchrun", center="none"), True),
        (Environment(rank=1, world=2, launcher="torchrun", center="none"), False),
        (TWO, False),  # its launcher says it
        (Environment(), False),
    ],
)
def test_worker_of_another_launcher_that_shares_nothing_is_reported_by_the_first(
    joined, capsys, environment, is_warned
):
    joined(environment).leave()
    assert ("this worker has ended without sharing a model" in capsys.readouterr().err) is is_warned


@pytest.mark.parametrize(
    ("request_", "how"),
    [
        ({"done": 10}, r'worker\.ask\("next", done=10\)'),
        ({"test_err": 0.5, "valid_err": 0.25}, r'worker\.ask\("test_err", test_err=0\.5, valid_err=0\.25\)'),
        (None, r'worker\.ask\("next"\)'),
        ({1: 2}, r'worker\.ask\("next"\)'),
        ({}, r'worker\.ask\("next"\)'),
    ],
)
def test_request_that_is_no_word_is_refused_with_what_to_write(joined, request_, how):
    with pytest.raises(InvalidArgument, match=how):
        joined(Environment()).ask(request_)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (lambda self, req: "train", r"Mine\.handle_control\(self, req\) cannot be called with three arguments"),
        (lambda self, req, worker, info, more: 0, "missing a required argument: 'more'"),
        (staticmethod(lambda request, worker, info: 0), "is a staticmethod"),
        (7, "is a int"),
    ],
)
def test_handler_with_another_signature_is_refused_where_it_is_defined(handler, said):
    with pytest.raises(InvalidArgument, match=rf"{said}.*handle_control\(self, request, worker, info\)"):
        type("Mine", (maniple.Controller,), {"handle_control": handler})


def test_coroutine_is_no_handler():
    with pytest.raises(InvalidArgument, match="is a coroutine"):

        class Mine(maniple.Controller):
            async def handle_control(self, request, worker, info): ...


@pytest.mark.parametrize(
    "handler", [lambda self, *args: 0, lambda self, req, rank, info=None: 0, lambda self, a, b, c, d=1: 0]
)
def test_handler_may_name_its_arguments_as_it_likes(handler):
    kind = type("Mine", (maniple.Controller,), {"handle_control": handler})
    assert type("Later", (kind,), {})().handle_control("next", 0, {}) == 0


def test_script_that_balances_samples_gets_no_synchronous_rule_by_default(joined, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    worker = joined(TWO.replace(default_rule="bsp", device="cpu"))
    worker.sampler(10)
    assert worker._default_rule() == maniple.BSP()
    worker.sampler(10, balance=True)
    assert worker._default_rule() == maniple.EASGD()


def test_pace_of_the_environment_excludes_bsp_as_the_default_and_a_wire_does_not(joined, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    asked = TWO.replace(default_rule="bsp", device="cpu")
    for environment, rule in (
        (asked.replace(pace="every:20"), maniple.EASGD()),
        (asked.replace(wire="int8"), maniple.BSP()),
    ):
        monkeypatch.setattr(module, "_joined", None)
        assert joined(environment)._default_rule() == rule


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "sampler", "is_warned"),
    [
        ({}, {}, True),
        ({"rule": "easgd"}, {}, False),  # so the samples are leased
        ({"pace": "every:5"}, {}, False),
        ({}, {"static": True}, False),  # as asked for
        ({}, {"validation": True}, False),
    ],
)
def test_fixed_shares_for_an_asynchronous_rule_are_warned_of(joined, monkeypatch, options, sampler, is_warned):
    worker = joined(TWO.replace(default_rule="bsp", device="cpu", **options))
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
        worker.sampler(10, **sampler)
    warned = pytest.warns(UserWarning, match=r"fixed share.* Call share\(\) before worker\.sampler\(\)")
    with warned if is_warned else nullcontext():
        worker.share({"w": np.zeros(3)}, rule=maniple.EASGD())


def test_balance_that_has_no_effect_is_warned_of(joined):
    worker = joined(TWO.replace(rule="bsp"))
    with pytest.warns(UserWarning, match="balance=True has no effect.*--rule easgd"):
        worker.sampler(10, balance=True)
