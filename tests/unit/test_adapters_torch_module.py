"""A torch module as a model: parameters, buffers and which of them are shared."""

import copy
import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maniple.adapters import adapt
from maniple.contracts import Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from tests.unit.test_adapters import add
from tests.unit.torch_models import PARAMETERS_OF_TWO, assert_close, linear, model_of_two, names, names_of, nn, torch

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


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_passes_in_training_mode_are_reported_and_those_of_copies_are_not():
    module, reported = linear(), []
    x = torch.zeros(1, next(module.parameters()).shape[1])
    undo = adapt(module).on_forward(lambda: reported.append(module.training))
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
    assert reported == [True]
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot compile. Call worker.leave\(\)"):
        torch.jit.script(module)
    undo()
    module(x)
    assert reported == [True] and not module._forward_pre_hooks


# What is shared


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda model: dict(model.named_parameters()), PARAMETERS_OF_TWO),
        (lambda model: model.named_parameters(), PARAMETERS_OF_TWO),
        (lambda model: model.parameters(), ["0", "1", "2", "3"]),
        (lambda model: list(model.parameters())[2:], ["0", "1"]),
        (lambda model: model.state_dict(), PARAMETERS_OF_TWO),
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
    assert sorted(names_of(model)) == sorted([*PARAMETERS_OF_TWO, "rate"])
    assert sorted(names_of(dict(model.named_parameters()))) == sorted([*PARAMETERS_OF_TWO, "rate"])
    gradients = adapt(model).gradients(norm="averaged")
    assert [entry.name for entry in gradients.layout.entries[:-1]] == PARAMETERS_OF_TWO


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


# The default rule


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "make_optimizer", "params", "expected"),
    [
        (model_of_two, sgd, None, True),
        (model_of_two, lambda module: None, None, False),
        (model_of_two, lambda module: torch.optim.LBFGS(module.parameters()), None, False),
        (lambda: nn.Sequential(linear(), nn.Linear(2, 1, device="meta")), sgd, None, False),
        (lambda: nn.Sequential(linear(), nn.Linear(2, 1, device="meta")), sgd, ["0.*"], True),
        (lambda: nn.Sequential(nn.Embedding(4, 3), linear()), sgd, None, True),
        (lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), linear()), sgd, None, False),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 3, sparse=True), linear()), sgd, None, False),
        (lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), linear()), sgd, ["1.*"], True),
    ],
    ids=["dense", "no optimizer", "closure", "split", "split, not shared", "embedding", "sparse", "bag", "not shared"],
)
def test_bsp_suits_dense_gradients_on_the_cpu_that_a_step_does_not_compute(make, make_optimizer, params, expected):
    module = make()
    assert adapt(module, make_optimizer(module), params=params).suits_bsp is expected
