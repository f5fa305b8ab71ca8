"""Gradients of a torch module that all workers average: which they are, and what is refused."""

import copy

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.collectives.reductions import combine
from maniple.errors import InvalidArgument
from maniple.rules.bsp import NORMS
from tests.unit.torch_models import PARAMETERS_OF_TWO, linear, model_of_two, nn, torch, train


def test_closure_is_refused_before_it_can_part_the_replicas():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen, before = [], module.bias.detach().clone()
    undo = adapt(module, optimizer).before_step(lambda: seen.append(1))
    for act in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(InvalidArgument, match=r"closure.*--rule easgd or LocalSGD\(k\)"):
            act()
    assert not seen and (module.bias == before).all()
    optimizer.step(None)
    optimizer.step(closure=None)
    assert len(seen) == 2
    undo()
    optimizer.step(lambda: 0.0)


def placed(gradients):
    gradients.flat = {dtype: np.zeros(size, dtype) for dtype, size in gradients.layout.sizes.items()}
    gradients.place(gradients.flat)
    return gradients


@pytest.mark.parametrize("kind", ["gradients", "buckets"])
def test_parameter_that_is_trained_later_is_refused_by_name(kind):
    module = nn.Sequential(linear(), linear())
    module[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradients = placed(getattr(adapt(module, optimizer), kind)(norm="averaged"))
    train(module[0], optimizer)
    gradients.collect()
    module[1].weight.requires_grad_(True)
    gradients.collect()  # as long as it has no gradient, it is not trained
    module[1](torch.ones(1, 3)).sum().backward()
    with pytest.raises(InvalidArgument, match=r"'1\.weight' has a gradient that is not averaged"):
        gradients.collect()
    optimizer.zero_grad()
    other = linear()
    optimizer.add_param_group({"params": list(other.parameters())})
    other(torch.ones(1, 3)).sum().backward()
    with pytest.raises(InvalidArgument, match="'a parameter of the optimizer' has a gradient"):
        gradients.collect()


def test_all_floating_buffers_are_averaged_but_those_that_synchronised_norm_computes():
    module = nn.Sequential(linear(), nn.BatchNorm1d(2))
    module.register_buffer("scale", torch.ones(5))
    module.register_buffer("mask", torch.full((4,), -np.inf))
    adapter = adapt(module)
    names = {norm: [adapter.entries[i].name for i in adapter.averaged_buffers(norm)] for norm in NORMS}
    everything = ["scale", "1.running_mean", "1.running_var"]
    assert names == {"averaged": everything, "local": [], "synchronised": ["scale"]}
    assert adapter.local_buffers == ["mask"]


def test_buffer_that_no_worker_has_changed_is_not_rounded_by_a_mean():
    constant = next(x for x in np.linspace(1.9, 2, 99, dtype=np.float32) if (x + x + x) / np.float32(3) != x)
    modules, all_gradients = [linear() for _ in range(3)], []
    for module in modules:
        module.register_buffer("constant", torch.full((4,), float(constant)))
        module.register_buffer("seen", torch.zeros(1))
        all_gradients.append(placed(adapt(module).gradients(norm="averaged")))
        all_gradients[-1].begin()
    for _ in range(2):
        modules[2].seen = modules[2].seen + 3  # replaced, and by one worker only
        for gradients in all_gradients:
            gradients.collect()
        vectors = [gradients.flat["float32"] for gradients in all_gradients]
        mean = np.empty_like(vectors[0])
        combine("mean", vectors, [1.0] * 3, mean)
        for vector, gradients in zip(vectors, all_gradients, strict=True):
            vector[:] = mean
            gradients.deliver()
    for module in modules:
        assert (module.constant.numpy() == constant).all()
        assert module.seen.item() == 2.0


def test_parameter_that_the_optimizer_gets_after_share_is_refused_by_name():
    module = nn.Sequential(linear())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = []
    adapt(module, optimizer).on_step(lambda: steps.append(1))
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"][:] = list(module.parameters())
    train(module, optimizer)  # one that has taken the place of a shared parameter is shared by its name
    module.append(nn.Linear(2, 1))
    optimizer.add_param_group({"params": list(module[1].parameters())})
    optimizer.step()
    assert len(steps) == 2  # as long as they have no gradient, they are not trained
    with pytest.raises(InvalidArgument, match=r"'1\.weight' is trained but not shared.*after share\(\)"):
        train(module, optimizer)


def test_parameter_with_the_id_of_one_that_was_replaced_is_not_mistaken_for_it():
    module = nn.Sequential(linear())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    adapt(module, optimizer).on_step(lambda: None)
    before = {id(p) for p in module.parameters()}
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"][:] = list(module.parameters())
    others = [nn.Parameter(torch.zeros(1)) for _ in range(1000)]  # many would get the address of a freed one
    assert not before & {id(p) for p in others}, "the replaced ones are kept until the next step"
    for new in others[:3]:
        optimizer.add_param_group({"params": [new]})
        new.grad = torch.ones(1)
        with pytest.raises(InvalidArgument, match="is trained but not shared"):
            optimizer.step()


def test_model_that_is_wrapped_after_share_is_refused_until_that_is_undone():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    module, other = linear(), linear()
    undo = adapt(module).refuse_wrapping()
    nn.Sequential(module)
    DistributedDataParallel(other)
    for wrapped in (module, nn.Sequential(module)):
        with pytest.raises(InvalidArgument, match=r"wrapped in DistributedDataParallel after share\(\)"):
            DistributedDataParallel(wrapped)
    undo()
    DistributedDataParallel(module)


# Batch normalisation over all workers


class Unlike:
    """Sums over workers, and cannot be copied, as collectives cannot."""

    def __init__(self):
        self.calls = 0

    def total(self, x):
        self.calls += 1
        x *= 2  # of two workers with equal batches

    def __deepcopy__(self, memo):
        raise TypeError("collectives cannot be copied")


def test_copy_of_a_model_with_synchronised_norm_is_a_model_of_its_own():
    module, collectives = nn.Sequential(linear(), nn.BatchNorm1d(2)), Unlike()
    undo = adapt(module).synchronise_norm(collectives.total)
    other = copy.deepcopy(module)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    other(x)
    assert collectives.calls == 1  # the batches of all workers here too
    assert (module[1].running_mean == 0).all() and (other[1].running_mean != 0).all()
    y = copy.deepcopy(other).eval()(x)
    assert collectives.calls == 1 and not torch.equal(y, module.eval()(x))
    undo()
    copy.deepcopy(module).train()(x)
    assert collectives.calls == 1


def test_gradients_of_parameters_without_their_module_are_averaged():
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = placed(adapt(dict(model.named_parameters()), optimizer).gradients(norm="averaged"))
    train(model, optimizer)
    gradients.collect()
    gradients.deliver()
    assert [entry.name for entry in gradients.layout.entries[:4]] == PARAMETERS_OF_TWO


def test_gradients_of_parameters_that_are_not_chosen_stay_local():
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adapter = adapt(model, optimizer, params="1.*")
    gradients = placed(adapter.gradients(norm="averaged"))
    model(torch.ones(1, 3)).sum().backward()
    local = model[0].weight.grad.clone()
    gradients.collect()
    for vector in gradients.flat.values():
        vector *= 2
    gradients.deliver()
    assert torch.equal(model[0].weight.grad, local)
    assert [entry.name for entry in gradients.layout.entries[:2]] == ["1.weight", "1.bias"]
    optimizer.step()
    averaged = []
    adapter.reduce_moments("average", lambda x, counts: averaged.append(x.size), lambda mine: [mine])
    assert averaged == [2, 1], "only the moments of what is shared"
    adapter.reduce_moments("reset", None, None)
    assert optimizer.state[model[0].weight]["momentum_buffer"].any()
    assert not optimizer.state[model[1].weight]["momentum_buffer"].any()


def test_sparse_gradient_is_refused_with_the_rules_that_take_it():
    module = nn.Embedding(4, 3, sparse=True)
    gradients = placed(adapt(module, torch.optim.SGD(module.parameters(), lr=0.1)).gradients(norm="averaged"))
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidArgument, match=r"'weight' has a sparse gradient.*sparse=False.*--rule easgd"):
        gradients.collect()
