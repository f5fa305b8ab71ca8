"""A dict of NumPy arrays as a model, and adapters that other packages register."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import maniple
from maniple.adapters import adapt
from maniple.contracts import Entry
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.layout import Layout


def add(model, amount: float) -> None:
    """One pass that adds `amount` to every entry, as an exchange would."""
    model.begin()
    for i in range(len(model.entries)):
        array = model.array(i)
        assert array.ndim == 1
        assert array.flags.c_contiguous
        array += amount
        model.commit(i)


def test_contiguous_arrays_are_seen_in_their_own_memory():
    params = {"w": np.zeros((2, 3), "float32"), "b": np.zeros(3), "s": np.zeros(())}
    model = adapt(params)
    model.begin()
    for i, value in enumerate(params.values()):
        assert np.shares_memory(model.array(i), value)
        assert model.array(i).shape == (value.size,)


def test_entries_are_the_names_shapes_and_dtypes_of_the_dict():
    model = adapt({"w": np.zeros((2, 3), "float32"), "s": np.zeros((), "float64"), "e": np.zeros((0, 4), "float16")})
    assert list(model.entries) == [
        Entry("w", (2, 3), "float32"),
        Entry("s", (), "float64"),
        Entry("e", (0, 4), "float16"),
    ]


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["float16", "float32", "float64"]),
    st.sampled_from(["C", "F", "strided", "reversed"]),
)
def test_pass_changes_the_array_itself_whatever_its_strides_and_dtype(shape, dtype, order):
    value = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    if order == "F":
        value = np.asfortranarray(value)
    elif order == "strided" and shape:
        value = np.repeat(value, 2, axis=0)[::2]
    elif order == "reversed" and shape:
        value = value[::-1]
    expected = value + np.dtype(dtype).type(0.5)
    add(adapt({"w": value}), 0.5)
    np.testing.assert_array_equal(value, expected)
    assert value.dtype == dtype


def test_flat_order_does_not_depend_on_strides():
    value = np.arange(6.0).reshape(2, 3)
    for same in (value.copy(), np.asfortranarray(value), np.repeat(value, 2, axis=1)[:, ::2]):
        model = adapt({"w": same})
        model.begin()
        np.testing.assert_array_equal(model.array(0), np.arange(6.0))


def test_half_precision_is_seen_as_float32_and_rounded_back():
    params = {"w": np.array([1.0, 2.0], "float16")}
    model = adapt(params)
    model.begin()
    assert model.array(0).dtype == "float32"
    add(model, 2**-11)  # not enough to reach the next float16 above 1
    np.testing.assert_array_equal(params["w"], np.array([1, 2], "float16"))


def test_array_under_two_names_is_counted_once():
    tied = np.zeros(3)
    model = adapt({"embedding": tied, "other": np.zeros(2), "output": tied})
    assert [entry.name for entry in model.entries] == ["embedding", "other"]
    add(model, 1)
    np.testing.assert_array_equal(tied, 1)


def test_equal_arrays_that_are_not_the_same_are_both_counted():
    assert len(adapt({"a": np.zeros(3), "b": np.zeros(3)}).entries) == 2


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_array_put_anew_into_the_dict_is_the_one_that_is_shared(dtype):
    params = {"w": np.zeros(2, dtype)}
    model = adapt(params)
    add(model, 1)
    before, params["w"] = params["w"], np.full(2, 10, dtype)
    add(model, 1)
    np.testing.assert_array_equal(params["w"], 11)
    np.testing.assert_array_equal(before, 1)


def test_pass_that_was_cut_short_leaves_no_stale_copy():
    params = {"w": np.zeros(2, "float16")}
    model = adapt(params)
    model.begin()
    model.array(0)[:] = 99  # an error on the way: commit is never called
    params["w"][:] = 5
    add(model, 1)
    np.testing.assert_array_equal(params["w"], 6)


def read_only(value: np.ndarray) -> np.ndarray:
    value.flags.writeable = False
    return value


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (np.zeros(4), r"'w' has become float64\[4\], but was shared as 'w' float64\[3\]"),
        (np.zeros((3, 1)), r"float64\[3, 1\]"),
        (np.zeros(3, "float32"), r"float32\[3\]"),
        (read_only(np.zeros(3)), "read-only"),
    ],
)
def test_array_that_has_become_another_is_refused(new, words):
    params = {"w": np.zeros(3)}
    model = adapt(params)
    params["w"] = new
    model.begin()
    with pytest.raises(InvalidArgument, match=words):
        model.array(0)


@pytest.mark.parametrize(
    "damage",
    [lambda params: params.pop("w"), lambda params: params.update(w=[0.0, 0.0, 0.0])],
    ids=["removed", "replaced"],
)
def test_array_that_is_gone_is_named(damage):
    params = {"w": np.zeros(3)}
    model = adapt(params)
    damage(params)
    model.begin()
    with pytest.raises(InvalidArgument, match="'w'"):
        model.array(0)


@pytest.mark.parametrize("value", [[1.0], 1.0, np.float64(1.0), None])
def test_value_that_cannot_be_changed_in_place_is_refused(value):
    with pytest.raises(InvalidArgument, match="'lr' is a"):
        adapt({"w": np.zeros(2), "lr": value})


def test_keys_that_are_no_words_are_used_or_refused():
    params = {0: np.zeros(2), 1: np.zeros(3)}
    try:
        model = adapt(params)
    except InvalidArgument:
        return
    add(model, 1)
    np.testing.assert_array_equal(params[0], 1)
    np.testing.assert_array_equal(params[1], 1)


@pytest.mark.parametrize("dtype", ["int64", "complex128", "bool", "object"])
def test_array_that_cannot_be_averaged_is_refused(dtype):
    with pytest.raises(InvalidArgument, match=r"'counts'.*cannot be shared"):
        Layout(adapt({"w": np.zeros(2), "counts": np.zeros(2, dtype)}).entries)


def test_dict_takes_no_optimizer_and_no_state():
    with pytest.raises(InvalidArgument, match="no optimizer"):
        adapt({"w": np.zeros(2)}, object())
    with pytest.raises(InvalidArgument, match="optimizer"):
        adapt({"w": np.zeros(2)}, state=("momentum_buffer",))


@pytest.mark.parametrize("model", [[np.zeros(2)], np.zeros(2), None, "model"])
def test_what_is_no_model_is_refused_by_its_type(model):
    with pytest.raises(InvalidArgument, match=f"type .*{type(model).__name__} cannot be shared"):
        adapt(model)


def test_step_of_a_dict_is_announced_by_the_loop_itself():
    adapt({"w": np.zeros(2)}).on_step(lambda: pytest.fail("nothing can call this"))()


# Adapters of other packages

FAKE = """
from maniple.adapters import Adapter
from maniple.contracts import Entry


class Tree:
    def __init__(self, **leaves):
        self.leaves = leaves


class TreeAdapter(Adapter):
    @classmethod
    def accepts(cls, model):
        return isinstance(model, Tree)

    def __init__(self, model, optimizer=None, *, state=(), buffers=True, params=None):
        self._leaves = list(model.leaves.values())
        self.entries = [Entry(name, value.shape, str(value.dtype)) for name, value in model.leaves.items()]

    def array(self, i):
        return self._leaves[i].reshape(-1)

    def commit(self, i):
        pass
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An installed package `fake_trees` with an adapter, found by its entry point."""
    (tmp_path / "fake_trees.py").write_text(FAKE)
    info = tmp_path / "fake_trees-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-trees\nVersion: 1\n")
    points = info / "entry_points.txt"
    points.write_text("[maniple.adapters]\nfake_trees = fake_trees:TreeAdapter\nabsent = absent_package:Adapter\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_trees", raising=False)
    yield points
    sys.modules.pop("fake_trees", None)


def test_adapter_of_another_package_is_found_by_its_entry_point(fake):
    import fake_trees  # pyright: ignore[reportMissingImports]

    tree = fake_trees.Tree(w=np.zeros((2, 3)), b=np.zeros(3))
    worker = maniple.Worker(Environment())
    replica = worker.share(tree, rule=maniple.BSP())
    gradients = {"w": np.ones((2, 3)), "b": np.ones(3)}
    replica.reduce(gradients)
    tree.leaves["w"] -= gradients["w"]
    replica.step()
    assert replica.steps == 1 and isinstance(adapt(tree), fake_trees.TreeAdapter)
    model = adapt(tree)
    assert [entry.name for entry in model.entries] == ["w", "b"]
    assert model.device == "cpu" and not model.has_optimizer and model.optimizer_state() == ({}, {})


def test_adapter_whose_framework_was_not_imported_is_not_loaded(fake):
    with pytest.raises(InvalidArgument, match=r"type builtins\.int cannot be shared.*'maniple\.adapters'"):
        adapt(7)
    assert "fake_trees" not in sys.modules


@pytest.mark.parametrize(
    ("target", "reason"), [("fake_trees:Tree", "no subclass of"), ("gone:X", "cannot be imported")]
)
def test_entry_point_that_leads_to_no_adapter_is_named(fake, target, reason):
    fake.write_text(f"[maniple.adapters]\nfake_trees = {target}\n")
    import fake_trees  # pyright: ignore[reportMissingImports]

    with pytest.raises(InvalidArgument, match=rf"{target}.*{reason}"):
        adapt(fake_trees.Tree(w=np.zeros(3)))


def test_a_misspelt_setting_is_refused():
    with pytest.raises(TypeError, match="parms"):
        adapt({"w": np.zeros(2)}, parms=["w"])
