"""Parameters in flat vectors: the model behaves as before, and what is not safe to move stays where it is."""

import copy
import io
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the check that torch is installed

from maniple.adapters import adapt  # noqa: E402
from maniple.center.chunked_model import ChunkedModel  # noqa: E402
from maniple.layout import Layout  # noqa: E402


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def values_of(module: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in module.parameters()])


def exchange(adapter) -> None:
    """Add 1 to all values, as an exchange with a center would: chunk by chunk."""
    layout = Layout(adapter.entries)
    chunks = ChunkedModel(adapter, layout)
    chunks.begin()
    for k in range(len(layout.chunks)):
        value = chunks.array(k)
        value += 1
        chunks.commit(k)
    chunks.end()


def is_flat(adapter) -> bool:
    return adapter.flat_vectors() is not None


def test_parameters_become_views_of_one_vector_with_the_same_values():
    module = model_of(3, 4, 2)
    before = values_of(module)
    adapter = adapt(module)
    vectors, count = adapter.flat_vectors()
    assert count == 4
    np.testing.assert_array_equal(vectors["float32"], before)
    vectors["float32"] += 1
    np.testing.assert_array_equal(values_of(module), before + 1)
    assert all(p.is_leaf and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("is_before", [True, False])
def test_optimizer_made_before_or_after_trains_the_shared_values(is_before):
    module = model_of(3, 4, 2)
    optimizer = torch.optim.Adam(module.parameters()) if is_before else None
    adapter = adapt(module)
    assert is_flat(adapter)
    optimizer = optimizer or torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    before = values_of(module)
    exchange(adapter)
    np.testing.assert_array_equal(values_of(module), before + 1)


def test_compiled_module_uses_the_shared_values():
    module = model_of(3, 4, 2)
    compiled = torch.compile(module, backend="eager")
    x = torch.ones(2, 3)
    before = compiled(x)
    adapter = adapt(module)
    assert is_flat(adapter)
    torch.testing.assert_close(compiled(x), before)
    exchange(adapter)
    torch.testing.assert_close(compiled(x), module(x))
    assert not torch.allclose(compiled(x), before)


def replace(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.full((4, 3), 7.0))


def assign(module: nn.Sequential) -> None:
    state = {name: torch.full_like(value, 7.0) for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def set_data(module: nn.Sequential) -> None:
    module[0].weight.data = torch.full((4, 3), 7.0)


def replace_layer(module: nn.Sequential) -> None:
    module[0] = nn.Linear(3, 4)
    nn.init.constant_(module[0].weight, 7.0)


@pytest.mark.parametrize("change", [replace, assign, set_data, replace_layer])
def test_parameter_that_is_replaced_after_share_is_exchanged(change):
    module = model_of(3, 4, 2)
    adapter = adapt(module)
    exchange(adapter)
    change(module)
    before = values_of(module)
    assert before[0] == 7
    exchange(adapter)
    np.testing.assert_array_equal(values_of(module), before + 1)
    assert is_flat(adapter), "the new one was moved too"


def test_tied_weights_stay_tied():
    module = model_of(3, 3, 3)
    module[1].weight = module[0].weight
    adapter = adapt(module)
    assert len(adapter.entries) == 3
    assert is_flat(adapter)
    assert module[1].weight is module[0].weight
    before = values_of(module)
    exchange(adapter)
    np.testing.assert_array_equal(values_of(module), before + 1)


def test_frozen_parameters_and_buffers_are_exchanged():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module[0].weight.requires_grad_(False)
    adapter = adapt(module)
    assert is_flat(adapter)
    exchange(adapter)
    assert set(module[1].running_mean.tolist()) == {1.0}
    assert set(module[1].running_var.tolist()) == {2.0}
    assert not module[0].weight.requires_grad


def stride(module: nn.Sequential) -> None:
    module[0].weight.data = torch.ones(3, 4).t()


def share_memory_of_two(module: nn.Sequential) -> None:
    module[1].weight.data = module[0].weight.data.view(-1)[:8].view(2, 4)


def share_with_processes(module: nn.Sequential) -> None:
    module.share_memory()


def halve(module: nn.Sequential) -> None:
    module[1].half()


@pytest.mark.parametrize("make_unsafe", [stride, share_memory_of_two, share_with_processes, halve])
def test_what_cannot_move_is_exchanged_where_it_is(make_unsafe):
    module = model_of(3, 4, 2)
    make_unsafe(module)
    places = [p.data_ptr() for p in module.parameters()]
    before = [p.detach().clone() for p in module.parameters()]
    adapter = adapt(module)
    assert not is_flat(adapter)
    exchange(adapter)
    assert [p.data_ptr() for p in module.parameters()] == places
    if make_unsafe is not share_memory_of_two:  # else one is exchanged twice, as always
        for parameter, old in zip(module.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), old + 1)


def test_both_precisions_have_vectors():
    module = model_of(3, 4, 2)
    module[1].double()
    adapter = adapt(module)
    vectors, _ = adapter.flat_vectors()
    assert {dtype: vector.size for dtype, vector in vectors.items()} == {"float32": 16, "float64": 10}
    before = values_of(module)
    exchange(adapter)
    np.testing.assert_allclose(values_of(module), before + 1, rtol=1e-6)


def test_memory_that_is_shared_with_processes_later_is_followed():
    module = model_of(3, 4, 2)
    adapter = adapt(module)
    exchange(adapter)
    before = values_of(module)
    module.share_memory()
    exchange(adapter)
    np.testing.assert_array_equal(values_of(module), before + 1)


def test_copies_and_saved_files_are_of_their_own_size():
    module = model_of(100, 100, 100)
    before = copy.deepcopy(module.state_dict())
    adapter = adapt(module)
    exchange(adapter)
    twin = copy.deepcopy(module)
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in twin.parameters())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    assert file.tell() < 1.2 * 4 * sum(p.numel() for p in module.parameters())
    file.seek(0)
    for name, value in torch.load(file).items():
        torch.testing.assert_close(value, before[name] + 1)


def test_whole_model_can_be_saved_as_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    module = model_of(3, 4, 2)
    assert is_flat(adapt(module))
    safetensors.save_file(module.state_dict(), tmp_path / "model.safetensors")
    for name, value in safetensors.load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, module.state_dict()[name])
