"""Optimizer state that is saved with the run: found again by whom it belongs to, refused where it does not fit."""

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from maniple import BSP, EASGD, LocalSGD
from maniple.adapters import adapt
from maniple.place import Place
from maniple.sampler.position import RESUMED, SAVES
from maniple.worker.optimizers import Optimizers

torch = pytest.importorskip("torch")


@pytest.fixture
def places(tmp_path):
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


def keeping(places, rank, model, optimizer, *, rule=None, steps=3):
    """The optimizers of worker `rank`; whether it continues with what was saved."""
    run, segment = places
    kept = Optimizers(Place(rank=rank, world=4, run=run, segment=segment), segment)
    replica = SimpleNamespace(steps=steps, rule=rule or EASGD(), is_keeper=True)
    return kept, kept.add(0, adapt(model, optimizer), replica)


def moments(optimizer) -> list[np.ndarray]:
    return [
        np.asarray(value) for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})],
)
def test_an_optimizer_continues_with_its_moments_and_the_rate_of_the_script(places, capsys, kind, options):
    before = trained(kind, **options)[1]
    keeping(places, 0, *trained(kind, **options))  # another one, which saves nothing
    kept, _ = keeping(places, 0, *(pair := trained(kind, **options)))
    kept.save()
    model, optimizer = trained(kind, steps=0, lr=0.025, **options)
    _, continues = keeping(places, 0, model, optimizer)
    assert continues and "worker 0 after step 3" in capsys.readouterr().err
    saved, found = moments(pair[1]), moments(optimizer)
    assert len(saved) == len(found) > 0 and all(np.array_equal(a, b) for a, b in zip(saved, found, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.025 and before.param_groups[0]["lr"] == 0.1
    assert not list(places[0].glob("optimizer/.*")), "no file is left beside it"


def test_half_precision_moments_are_found_as_they_were(places):
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].half()
        state["mask"] = torch.tensor([True, False])
    keeping(places, 0, model, optimizer)[0].save()
    again = trained(torch.optim.SGD, steps=0, momentum=0.9)
    assert keeping(places, 0, *again)[1]
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
def test_a_state_that_does_not_fit_is_refused_and_training_starts_with_an_empty_one(places, other, said):
    keeping(places, 0, *trained())[0].save()
    model, optimizer = trained(steps=0, **other)
    with pytest.warns(UserWarning, match=f"starts with empty optimizer state: .* since .*{said}.* Remove"):
        assert not keeping(places, 0, model, optimizer)[1]
    assert not optimizer.state


def test_a_damaged_or_poisoned_state_is_refused(places):
    model, optimizer = trained()
    optimizer.state[model.weight]["exp_avg"][0, 0] = float("nan")
    keeping(places, 0, model, optimizer)[0].save()
    with pytest.warns(UserWarning, match="not finite"):
        assert not keeping(places, 0, *trained(steps=0))[1]
    (path,) = places[0].glob("optimizer/*")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="no whole safetensors file"):
        assert not keeping(places, 0, *trained(steps=0))[1]


def test_a_new_worker_takes_that_of_worker_0_where_all_meet_and_starts_empty_elsewhere(places, capsys):
    keeping(places, 0, *(first := trained(steps=2)), steps=2)[0].save()
    keeping(places, 1, *(second := trained(steps=5)), steps=5)[0].save()
    for rank, rule, source in ((1, LocalSGD(5), second), (3, LocalSGD(5), first), (3, BSP(), second)):
        model, optimizer = trained(steps=0)
        assert keeping(places, rank, model, optimizer, rule=rule)[1]
        assert np.array_equal(moments(optimizer)[0], moments(source[1])[0]), (rank, rule)
    capsys.readouterr()
    assert not keeping(places, 3, *trained(steps=0))[1]
    assert "worker 3: no optimizer state was saved for it" in capsys.readouterr().err
    assert not keeping(places, 3, *trained(torch.optim.SGD, steps=0))[1]
    assert not capsys.readouterr().err, "plain SGD has no state to miss"


def test_nothing_is_loaded_in_a_run_that_was_not_resumed(places):
    keeping(places, 0, *trained())[0].save()
    (places[1] / RESUMED).unlink()
    assert not keeping(places, 0, *trained(steps=0))[1]


def test_a_full_disk_costs_the_state_and_not_the_training(places, monkeypatch):
    kept, _ = keeping(places, 0, *trained())
    monkeypatch.setattr(
        "maniple.worker.optimizers.write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.warns(UserWarning, match=r"could not be saved: .*full.* Training goes on"):
        kept.save()


def test_a_snapshot_is_noticed_once(places, monkeypatch):
    monkeypatch.setattr("maniple.worker.optimizers._LOOK_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, _ = keeping(places, 0, *trained())
    assert not kept.is_due()
    (places[1] / SAVES).touch()
    assert kept.is_due() and not kept.is_due()
    os.utime(places[1] / SAVES, ns=(1, 1))
    assert kept.is_due()
