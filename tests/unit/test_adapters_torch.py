"""A torch module as a model."""

import copy
import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.adapters import adapt
from maniple.circle.sums import combine
from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.rules.bsp import NORMS
from tests.unit.engines import engine
from tests.unit.test_adapters import add

torch = engine("torch")
nn = torch.nn


def names(model) -> list[str]:
    return [entry.name for entry in model.entries]


def train(module, optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * p).sum() + p.sum() for p in module.parameters()).backward()
        optimizer.step()


def assert_close(value: "torch.Tensor", expected: "torch.Tensor") -> None:
    """As torch.testing's, which takes most of a second to import."""
    assert value.dtype == expected.dtype
    a, b = (tensor.detach().double().numpy() for tensor in (value, expected))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def linear() -> "nn.Module":
    torch.manual_seed(0)
    return nn.Linear(3, 2)


# Parameters


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_contiguous_parameters_are_seen_in_their_own_memory(dtype):
    module = linear().to(getattr(torch, dtype))
    model = adapt(module)
    assert names(model) == ["weight", "bias"]
    model.begin()
    for i, parameter in enumerate(module.parameters()):
        assert model.array(i).dtype == dtype
        assert model.array(i).ctypes.data == parameter.data_ptr()
        assert model.array(i).size == parameter.numel()


def transposed() -> "nn.Module":
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    return module


MODULES = {
    "float32": linear,
    "bfloat16": lambda: linear().bfloat16(),
    "float16": lambda: linear().half(),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "transposed": transposed,
    "mixed": lambda: nn.Sequential(linear(), linear().double(), linear().half()),
    "frozen": lambda: linear().requires_grad_(False),
    "scalar": lambda: nn.ParameterDict({"s": nn.Parameter(torch.tensor(2.0))}),
    "empty array": lambda: nn.ParameterDict({"e": nn.Parameter(torch.zeros(0, 3)), "w": nn.Parameter(torch.ones(2))}),
}


@pytest.mark.parametrize("kind", MODULES)
def test_pass_changes_the_parameters_themselves(kind):
    torch.manual_seed(0)
    module = MODULES[kind]()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strides = [p.stride() for p in module.parameters()]
    add(adapt(module), 0.25)
    for name, value in module.state_dict().items():
        expected = (before[name].to(torch.float64) + 0.25).to(value.dtype)
        assert_close(value, expected)
        assert value.dtype == before[name].dtype
    assert [p.stride() for p in module.parameters()] == strides


@pytest.mark.parametrize("kind", ["channels last", "transposed"])
def test_flat_order_is_that_of_the_indices_whatever_the_strides(kind):
    module = MODULES[kind]()
    model = adapt(module)
    model.begin()
    expected = next(module.parameters()).detach().contiguous().view(-1).numpy()
    np.testing.assert_array_equal(model.array(0), expected)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision_is_seen_as_float32(kind):
    model = adapt(MODULES[kind]())
    model.begin()
    assert model.array(0).dtype == "float32"
    assert model.entries[0].dtype == kind
    assert set(Layout(model.entries).sizes) == {"float32"}


def test_tied_weights_are_counted_once():
    module = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "output": nn.Linear(3, 5, bias=False)})
    module["output"].weight = module["embedding"].weight
    model = adapt(module)
    assert names(model) == ["embedding.weight"]
    before = module["output"].weight.detach().clone()
    add(model, 1)
    assert_close(module["output"].weight.detach(), before + 1)


def test_pass_leaves_gradients_and_the_graph_alone():
    module = linear()
    loss = module(torch.ones(1, 3)).sum()
    add(adapt(module), 1)
    loss.backward()
    assert module.weight.grad is not None
    assert module.weight.requires_grad
    assert module.weight.is_leaf


@pytest.mark.parametrize(
    "change",
    [
        lambda module, new: module.load_state_dict(new),
        lambda module, new: setattr(module.weight, "data", new["weight"]),
        lambda module, new: module.weight.data.copy_(new["weight"]),
        lambda module, new: module.load_state_dict(new, assign=True),
    ],
    ids=["load_state_dict", "data reassigned", "data copied", "parameters replaced"],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_values_loaded_in_between_are_those_that_are_shared(change, kind):
    module = MODULES[kind]()
    model = adapt(module)
    add(model, 1)
    change(module, {name: torch.full_like(value, 7) for name, value in module.state_dict().items()})
    add(model, 1)
    assert_close(module.weight.detach(), torch.full_like(module.weight, 8))


def test_parameter_of_a_new_shape_is_refused_before_it_is_exchanged():
    # The compiled kernels do not check bounds: a longer parameter would be written over its neighbours.
    module = linear()
    model = adapt(module)
    module.weight.data = torch.zeros(20, 30)
    with pytest.raises(InvalidArgument, match="weight"):
        add(model, 1)


def test_parameter_that_was_taken_away_is_named():
    module = linear()
    model = adapt(module)
    module.bias = None
    with pytest.raises(InvalidArgument, match="bias"):
        add(model, 1)


def test_layer_that_was_replaced_is_the_one_that_is_shared():
    module = nn.Sequential(linear(), linear())
    model = adapt(module)
    module[1] = linear()
    before = module[1].bias.detach().clone()
    add(model, 1)
    assert_close(module[1].bias.detach(), before + 1)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@given(hnp.arrays("float32", 8, elements=st.floats(width=32)))
@example(np.array([3.4e38, -3.4e38, 65519.9, 65520, 1 + 2**-8, 1 + 3 * 2**-8, 1e-45, -0.0], "float32"))
def test_center_is_rounded_as_torch_rounds_it(kind, values):
    # What a rule remembers must be what the parameter holds, or the difference counts as a change of this worker's.
    rounded = values.copy()
    Layout([Entry("w", values.shape, kind)]).round(0, rounded)
    # Beyond what the dtype can hold: the largest it can, since infinity would end the worker as diverged.
    largest = torch.finfo(getattr(torch, kind)).max
    expected = torch.from_numpy(values.clip(-largest, largest)).to(getattr(torch, kind)).float().numpy()
    np.testing.assert_array_equal(rounded, expected)


def test_pass_that_was_cut_short_leaves_no_stale_copy():
    module = linear().half()
    model = adapt(module)
    model.begin()
    model.array(0)[:] = 99  # an error on the way: commit is never called
    module.weight.data.fill_(5)
    add(model, 1)
    assert (module.weight == 6).all()


def test_layer_that_waits_for_its_first_batch_is_refused_until_it_has_seen_one():
    module = nn.LazyLinear(3)
    with pytest.raises(InvalidArgument, match=r"'weight' has no shape yet"):
        adapt(module)
    module(torch.ones(2, 5))
    assert adapt(module).entries[0].shape == (3, 5)


def test_module_without_parameters_is_refused():
    with pytest.raises(InvalidArgument, match="no floating-point array"):
        Layout(adapt(nn.ReLU()).entries)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parameter_that_cannot_be_averaged_is_refused_by_name(dtype):
    module = nn.Module()
    module.odd = nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)), requires_grad=False)
    with pytest.raises(InvalidArgument, match=rf"'odd' {dtype}\[2\] cannot be shared"):
        Layout(adapt(module).entries)


# Buffers


def test_floating_buffers_are_shared_and_counters_left_out():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert names(adapt(module))[-2:] == ["1.running_mean", "1.running_var"]
    assert "1.num_batches_tracked" not in names(adapt(module))
    add(adapt(module), 1)
    assert (module[1].running_mean == 1).all()
    assert module[1].num_batches_tracked == 0


def test_buffers_stay_at_home_on_request():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert names(adapt(module, buffers=False)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_buffer_that_the_module_rebinds_is_the_one_that_is_shared():
    module = nn.BatchNorm1d(2)
    model = adapt(module)
    module.running_mean = torch.full((2,), 10.0)
    add(model, 1)
    assert (module.running_mean == 11).all()


# The optimizer's steps


def test_hook_is_called_once_after_each_step_until_it_is_undone():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    undo = adapt(module, optimizer).on_step(lambda: seen.append(module.bias.detach().clone()))
    for i in range(3):
        train(module, optimizer)
        assert len(seen) == i + 1
        assert (seen[-1] == module.bias).all()  # after the update, not before
    undo()
    train(module, optimizer)
    assert len(seen) == 3


def test_undo_leaves_other_hooks_alone():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    theirs, ours = [], []
    optimizer.register_step_post_hook(lambda *_: theirs.append(1))
    adapt(module, optimizer).on_step(lambda: ours.append(1))()
    train(module, optimizer)
    assert (len(theirs), len(ours)) == (1, 0)


def test_without_an_optimizer_the_loop_tells_the_steps():
    adapt(linear()).on_step(lambda: pytest.fail("nothing can call this"))()


@pytest.mark.parametrize("optimizer", ["sgd", 0.1, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(InvalidArgument, match=r"torch\.optim\.Optimizer"):
        adapt(linear(), optimizer)


# Gradients that all workers average


def test_closure_is_refused_before_it_can_part_the_replicas():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen, before = [], module.bias.detach().clone()
    undo = adapt(module, optimizer).before_step(lambda: seen.append(1))
    for act in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(InvalidArgument, match=r"closure.*LocalSGD\(k\)"):
            act()
    assert not seen and (module.bias == before).all()
    optimizer.step(None)
    optimizer.step(closure=None)
    assert len(seen) == 2
    undo()
    optimizer.step(lambda: 0.0)


def placed(gradients):
    gradients.flat = {dtype: np.zeros(size, dtype) for dtype, size in gradients.sizes.items()}
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
    for _ in range(100):  # until the interpreter gives a new parameter the address of a freed one
        module = nn.Sequential(linear())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        adapt(module, optimizer).on_step(lambda: None)
        before = {id(p) for p in module.parameters()}
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
        optimizer.param_groups[0]["params"][:] = list(module.parameters())
        others = [nn.Parameter(torch.zeros(1)) for _ in range(100)]
        new = next((p for p in others if id(p) in before), None)
        if new is not None:
            break
    assert new is not None
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
    """Sums over workers, and cannot be copied, as a circle cannot."""

    def __init__(self):
        self.calls = 0

    def total(self, x):
        self.calls += 1
        x *= 2  # of two workers with equal batches

    def __deepcopy__(self, memo):
        raise TypeError("no circle can be copied")


def test_copy_of_a_model_with_synchronised_norm_is_a_model_of_its_own():
    module, circle = nn.Sequential(linear(), nn.BatchNorm1d(2)), Unlike()
    undo = adapt(module).synchronise_norm(circle.total)
    other = copy.deepcopy(module)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    other(x)
    assert circle.calls == 1  # the batches of all workers here too
    assert (module[1].running_mean == 0).all() and (other[1].running_mean != 0).all()
    y = copy.deepcopy(other).eval()(x)
    assert circle.calls == 1 and not torch.equal(y, module.eval()(x))
    undo()
    copy.deepcopy(module).train()(x)
    assert circle.calls == 1


# Optimizer state

OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("momentum_buffer",)),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1), ("exp_avg", "exp_avg_sq")),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_is_shared_by_name(kind):
    make, state = OPTIMIZERS[kind]
    module = linear()
    optimizer = make(module.parameters())
    model = adapt(module, optimizer, state=state)
    assert names(model) == ["weight", "bias", *(f"{key}.{name}" for key in state for name in ("weight", "bias"))]
    train(module, optimizer)
    before = optimizer.state[module.weight][state[0]].clone()
    add(model, 1)
    assert_close(optimizer.state[module.weight][state[0]], before + 1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_from_the_center_waits_for_the_first_step(kind):
    make, state = OPTIMIZERS[kind]
    module = linear()
    optimizer = make(module.parameters())
    model = adapt(module, optimizer, state=state)
    model.begin()
    for i, entry in enumerate(model.entries):
        if entry.name == f"{state[0]}.weight":
            assert (model.array(i) == 0).all()  # nothing there yet
            model.array(i)[:] = 42  # what a pull writes
        model.commit(i)
    seen = []
    model.on_step(lambda: seen.append(optimizer.state[module.weight][state[0]].clone()))
    train(module, optimizer)
    assert (seen[0] == 42).all()
    train(module, optimizer)
    assert not (seen[1] == 42).any()  # handed over once, and trained on from there


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_a_new_center_does_not_wipe_the_first_step(kind):
    # A center made by this worker has no momentum to give: its first gradient must count, as in plain training.
    make, state = OPTIMIZERS[kind]
    shared, plain = linear(), linear()
    ours, theirs = make(shared.parameters()), make(plain.parameters())
    model = adapt(shared, ours, state=state)
    add(model, 0)
    model.on_step(lambda: None)
    train(shared, ours, steps=3)
    train(plain, theirs, steps=3)
    assert torch.equal(shared.weight, plain.weight)


def test_state_of_a_loaded_optimizer_is_the_one_that_is_shared():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = adapt(module, optimizer, state=("momentum_buffer",))
    train(module, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved))
    add(model, 1)
    before = saved["state"][0]["momentum_buffer"]
    assert_close(optimizer.state[module.weight]["momentum_buffer"], before + 1)


def test_state_of_parameters_that_the_optimizer_does_not_train_is_left_out():
    module = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)
    model = adapt(module, optimizer, state=("momentum_buffer",))
    assert names(model)[4:] == ["momentum_buffer.1.weight", "momentum_buffer.1.bias"]


def test_wrong_name_of_a_state_lists_the_right_ones():
    module = linear()
    optimizer = torch.optim.Adam(module.parameters())
    model = adapt(module, optimizer, state=("momentum_buffer",))
    train(module, optimizer)
    with pytest.raises(InvalidArgument, match=r"Adam keeps no state 'momentum_buffer'.*exp_avg, exp_avg_sq"):
        add(model, 0)


def test_state_that_is_no_array_of_the_parameter_s_shape_is_refused():
    module = linear()
    optimizer = torch.optim.Adam(module.parameters())
    model = adapt(module, optimizer, state=("step",))
    train(module, optimizer)
    with pytest.raises(InvalidArgument, match="'step'"):
        add(model, 0)


def test_state_without_an_optimizer_is_refused():
    with pytest.raises(InvalidArgument, match=r"'momentum_buffer'.*without an optimizer"):
        adapt(linear(), state=("momentum_buffer",))


def test_one_state_given_as_a_word_is_taken_as_one_name_or_refused_by_it():
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    try:
        model = adapt(module, optimizer, state="momentum_buffer")
    except InvalidArgument as error:
        assert "momentum_buffer" in str(error)
    else:
        assert names(model)[2:] == ["momentum_buffer.weight", "momentum_buffer.bias"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_passes_in_training_mode_are_told_of_and_copies_tell_nothing():
    module, told = linear(), []
    x = torch.zeros(1, next(module.parameters()).shape[1])
    undo = adapt(module).on_forward(lambda: told.append(module.training))
    module(x)
    module.eval()(x)
    module.train()
    with torch.no_grad():
        module(x)  # validation, by a script that does not know of eval()
    saved = io.BytesIO()
    torch.save(module, saved)  # the whole module, as some do
    saved.seek(0)
    torch.load(saved, weights_only=False)(x)
    copy.deepcopy(module)(x)
    assert told == [True]
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot compile. Call worker.leave\(\)"):
        torch.jit.script(module)
    undo()
    module(x)
    assert told == [True] and not module._forward_pre_hooks


# What is shared


def names_of(model, **settings) -> list[str]:
    return [entry.name for entry in adapt(model, **settings).entries]


def model_of_two() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Linear(2, 1))


ALL = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda model: dict(model.named_parameters()), ALL),
        (lambda model: model.named_parameters(), ALL),
        (lambda model: model.parameters(), ["0", "1", "2", "3"]),
        (lambda model: list(model.parameters())[2:], ["0", "1"]),
        (lambda model: model.state_dict(), ALL),
    ],
    ids=["dict", "named", "iterator", "list", "state_dict"],
)
def test_parameters_are_shared_without_their_module(given, names):
    model = model_of_two()
    adapter = adapt(given(model))
    assert [entry.name for entry in adapter.entries] == names
    adapter.begin()
    adapter.array(len(names) - 1)[:] = 7
    adapter.commit(len(names) - 1)
    assert model[1].bias.tolist() == [7], "the model's own memory"


def test_gradients_of_parameters_without_their_module_are_averaged():
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = placed(adapt(dict(model.named_parameters()), optimizer).gradients(norm="averaged"))
    train(model, optimizer)
    gradients.collect()
    gradients.deliver()
    assert [entry.name for entry in gradients.layout.entries[:4]] == ALL


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda model: [{"params": list(model.parameters())}], "item 0 is a dict.*Pass the model"),
        (lambda model: {"w": np.zeros(3), "t": torch.zeros(2)}, "'w' is a ndarray.*tensors or NumPy arrays"),
        (lambda model: [np.zeros(3)], "item 0 is a ndarray.*dict from names"),
        (lambda model: [], "has no parameter"),
        (lambda model: iter(()), "has no parameter"),
    ],
)
def test_what_is_no_collection_of_parameters_is_refused_with_what_to_pass(given, reason):
    with pytest.raises(InvalidArgument, match=reason):
        adapt(given(model_of_two()))


def test_integer_parameters_stay_each_workers_own():
    """Keras on torch keeps its random state and counters in parameters that are not trained."""
    model = model_of_two()
    model.seed = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    model.flag = nn.Parameter(torch.tensor(True), requires_grad=False)
    model.rate = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    assert sorted(names_of(model)) == sorted([*ALL, "rate"])
    assert sorted(names_of(dict(model.named_parameters()))) == sorted([*ALL, "rate"])
    gradients = adapt(model).gradients(norm="averaged")
    assert [entry.name for entry in gradients.layout.entries[:-1]] == ALL


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (["1.weight"], ["1.weight"]),
        ("1.*", ["1.weight", "1.bias"]),
        (["*.bias", "0.weight"], ["0.weight", "0.bias", "1.bias"]),
        (lambda name, p: p.ndim == 1, ["0.bias", "1.bias"]),
    ],
)
def test_params_chooses_what_is_shared(params, names):
    assert names_of(model_of_two(), params=params) == names
    assert names_of(dict(model_of_two().named_parameters()), params=params) == names


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (["1.wieght"], r"'1\.wieght'.*4 parameters.*Did you mean '1\.weight'\?"),
        (["head.*"], r"'head\.\*'.*0\.weight"),
        ([], "chooses none of the 4 parameters"),
        (lambda name, p: False, "chooses none of the 4 parameters"),
        (lambda name: True, r"params=.*cannot be called with a name and a parameter"),
        (7, "params=7.*names, patterns or a function"),
    ],
)
def test_params_that_choose_nothing_or_what_is_not_there_are_refused(params, reason):
    with pytest.raises(InvalidArgument, match=reason):
        adapt(model_of_two(), params=params)


def test_params_chooses_arrays_too():
    arrays = {"w": np.zeros(3), "step": np.zeros(1, np.int64), "b": np.zeros(2)}
    assert names_of(arrays, params=["w", "b"]) == ["w", "b"]
    with pytest.raises(InvalidArgument, match=r"'v'.*3 parameters"):
        adapt(arrays, params=["v"])


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
    adapter.settle_moments("average", lambda x, counts: averaged.append(x.size), lambda mine: [mine])
    assert averaged == [2, 1], "only the moments of what is shared"
    adapter.settle_moments("reset", None, None)
    assert optimizer.state[model[0].weight]["momentum_buffer"].any()
    assert not optimizer.state[model[1].weight]["momentum_buffer"].any()


def test_state_of_parameters_that_are_not_chosen_is_not_shared():
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert names_of(model, optimizer=optimizer, state=("momentum_buffer",), params=["1.bias"]) == [
        "1.bias",
        "momentum_buffer.1.bias",
    ]
