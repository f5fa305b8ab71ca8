"""Optimizer state that is saved with the run: found again by whom it belongs to, refused where it does not fit."""

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from maniple import BSP, EASGD, LocalSGD
from maniple.adapters import adapt
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.replica import Sharing
from maniple.replica.saved_state import OptimizerStates, load_newcomer_state, write_newcomer_state
from maniple.sampler.position import RESUMED, SAVES

torch = pytest.importorskip("torch")


@pytest.fixture
def folders(tmp_path):
    """The run folder and the segment of a run that was resumed."""
    run, segment = tmp_path / "run", tmp_path / "segment"
    run.mkdir()
    segment.mkdir()
    (segment / RESUMED).touch()
    return run, segment


def trained(kind=torch.optim.Adam, *, steps=3, sizes=(3, 2), lr=0.1, **options):
    """A small model whose optimizer has made some steps."""
    model = torch.nn.Linear(*sizes)
    optimizer = kind(model.parameters(), lr=lr, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, sizes[0])).square().sum().backward()
        optimizer.step()
    return model, optimizer


def saving(folders, rank, model, optimizer, *, rule=None, steps=3):
    """The optimizers of worker `rank`; whether it continues with what was saved."""
    run, segment = folders
    kept = OptimizerStates(Environment(rank=rank, world=4, run=run, segment=segment), segment)
    replica = SimpleNamespace(steps=steps, rule=rule or EASGD(), sharing=Sharing())
    return kept, kept.add(0, adapt(model, optimizer), replica)


def moments(optimizer) -> list[np.ndarray]:
    return [
        np.asarray(value) for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})],
)
def test_an_optimizer_continues_with_its_moments_and_the_rate_of_the_script(folders, capsys, kind, options):
    before = trained(kind, **options)[1]
    saving(folders, 0, *trained(kind, **options))  # another one, which saves nothing
    kept, _ = saving(folders, 0, *(pair := trained(kind, **options)))
    kept.save()
    model, optimizer = trained(kind, steps=0, lr=0.025, **options)
    _, continues = saving(folders, 0, model, optimizer)
    assert continues and "worker 0 after step 3" in capsys.readouterr().err
    saved, found = moments(pair[1]), moments(optimizer)
    assert len(saved) == len(found) > 0 and all(np.array_equal(a, b) for a, b in zip(saved, found, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.025 and before.param_groups[0]["lr"] == 0.1
    assert not list(folders[0].glob("optimizer/.*")), "no file is left beside it"


def test_half_precision_moments_are_found_as_they_were(folders):
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].half()
        state["mask"] = torch.tensor([True, False])
    saving(folders, 0, model, optimizer)[0].save()
    again = trained(torch.optim.SGD, steps=0, momentum=0.9)
    assert saving(folders, 0, *again)[1]
    found = again[1].state_dict()["state"][0]
    assert torch.equal(found["momentum_buffer"].half(), optimizer.state_dict()["state"][0]["momentum_buffer"])
    assert found["mask"].bool().tolist() == [True, False]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"sizes": (3, 5)}, r"parameter 'weight' \[2, 3\], and here is 'weight' \[5, 3\]"),
        ({"kind": torch.optim.RMSprop}, "it is of Adam, and this optimizer is RMSprop"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_training_starts_with_an_empty_one(folders, other, said):
    saving(folders, 0, *trained())[0].save()
    model, optimizer = trained(steps=0, **other)
    with pytest.warns(UserWarning, match=f"starts with empty optimizer state: .* since .*{said}.* Remove"):
        assert not saving(folders, 0, model, optimizer)[1]
    assert not optimizer.state


def test_state_that_cannot_be_carried_is_refused_by_its_name_and_not_left_out(folders):
    model, optimizer = trained()
    optimizer.state[model.weight]["history"] = [torch.ones(2)]
    saving(folders, 0, model, optimizer)[0].save()  # the worker that has it continues
    with pytest.warns(UserWarning, match=r"since Adam keeps 'history', a list, in its state.*restarts\. Remove"):
        assert not saving(folders, 0, *trained(steps=0))[1]
    path = folders[0] / "state"
    write_newcomer_state(path, adapt(model, optimizer), None, {}, {})
    with pytest.raises(InvalidArgument, match=r"Adam keeps 'history', a list, in its state.*worker that joins"):
        load_newcomer_state(path, adapt(*trained(steps=0)), None)


def test_a_damaged_or_poisoned_state_is_refused(folders):
    model, optimizer = trained()
    optimizer.state[model.weight]["exp_avg"][0, 0] = float("nan")
    saving(folders, 0, model, optimizer)[0].save()
    with pytest.warns(UserWarning, match="not finite"):
        assert not saving(folders, 0, *trained(steps=0))[1]
    (path,) = folders[0].glob("optimizer/*")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="not a complete safetensors file"):
        assert not saving(folders, 0, *trained(steps=0))[1]


def test_a_new_worker_takes_that_of_worker_0_under_synchronous_rules_and_starts_empty_elsewhere(folders, capsys):
    saving(folders, 0, *(first := trained(steps=2)), steps=2)[0].save()
    saving(folders, 1, *(second := trained(steps=5)), steps=5)[0].save()
    for rank, rule, source in ((1, LocalSGD(5), second), (3, LocalSGD(5), first), (3, BSP(), second)):
        model, optimizer = trained(steps=0)
        assert saving(folders, rank, model, optimizer, rule=rule)[1]
        assert np.array_equal(moments(optimizer)[0], moments(source[1])[0]), (rank, rule)
    capsys.readouterr()
    assert not saving(folders, 3, *trained(steps=0))[1]
    assert "worker 3: no optimizer state was saved for it" in capsys.readouterr().err
    assert not saving(folders, 3, *trained(torch.optim.SGD, steps=0))[1]
    assert not capsys.readouterr().err, "plain SGD has no state to miss"


def test_nothing_is_loaded_in_a_run_that_was_not_resumed(folders):
    saving(folders, 0, *trained())[0].save()
    (folders[1] / RESUMED).unlink()
    assert not saving(folders, 0, *trained(steps=0))[1]


def test_a_full_disk_costs_the_state_and_not_the_training(folders, monkeypatch):
    kept, _ = saving(folders, 0, *trained())
    monkeypatch.setattr(
        "maniple.replica.saved_state.write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.warns(UserWarning, match=r"could not be saved: .*full.* Training continues"):
        kept.save()


def test_a_snapshot_is_noticed_once(folders, monkeypatch):
    monkeypatch.setattr("maniple.replica.saved_state._CHECK_EVERY_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, _ = saving(folders, 0, *trained())
    assert not kept.is_due(0.0)
    (folders[1] / SAVES).touch()
    assert kept.is_due(0.0) and not kept.is_due(0.0)
    os.utime(folders[1] / SAVES, ns=(1, 1))
    assert kept.is_due(0.0)
