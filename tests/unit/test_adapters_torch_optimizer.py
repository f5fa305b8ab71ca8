"""A torch optimizer: the hook after its steps, and its state that is shared by name."""

import copy

import pytest

from maniple.adapters import adapt
from maniple.errors import InvalidArgument
from tests.unit.test_adapters import add
from tests.unit.torch_models import assert_close, linear, model_of_two, names, names_of, nn, torch, train

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


def test_state_of_parameters_that_are_not_chosen_is_not_shared():
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert names_of(model, optimizer=optimizer, state=("momentum_buffer",), params=["1.bias"]) == [
        "1.bias",
        "momentum_buffer.1.bias",
    ]
