"""Objects and data of a pool: handles by name, arrays in messages and in shared memory, and what is refused."""

import pickle

import numpy as np
import pytest

from maniple.errors import InvalidArgument
from maniple.pool.data import DataMemory, Handle, Handles, arrays_of, assign, drop_object, share_data, store_object
from maniple.pool.worker_process import pack, unpack
from tests.unit.engines import engine


def create(handles: Handles, name: str | None = None, local: object = None) -> Handle:
    with handles.create(name, local) as handle:
        return handle


# Handles


def test_handles_are_found_by_themselves_and_by_name():
    handles = Handles()
    a, b = create(handles, "a"), create(handles)
    assert handles.resolve(a) == handles.resolve("a") == ([a], False)
    assert handles.resolve(["a", b]) == ([a, b], True)
    assert b.name.startswith("object-")


def test_an_object_that_could_not_be_made_is_forgotten():
    handles = Handles()
    with pytest.raises(ZeroDivisionError), handles.create("a", None):
        raise ZeroDivisionError
    assert create(handles, "a").name == "a"


def test_handles_that_are_unknown_twice_given_or_none_are_refused():
    handles, others = Handles(), Handles()
    a, theirs = create(handles, "a"), create(others, "a")
    with pytest.raises(InvalidArgument, match="there is an object 'a' already"):
        create(handles, "a")
    with pytest.raises(InvalidArgument, match="'a' is given twice"):
        handles.resolve(["a", a])
    with pytest.raises(InvalidArgument, match=r"no object 'b' in this pool \(it has: a\)"):
        handles.resolve("b")
    with pytest.raises(InvalidArgument, match="no object 'a' in this pool"):
        handles.resolve(theirs)
    with pytest.raises(InvalidArgument, match="of type int names no object"):
        handles.resolve(7)
    handles.drop(a)
    with pytest.raises(InvalidArgument, match=r"\(it has: none\)"):
        handles.resolve("a")


def test_a_factory_is_called_once_and_only_if_the_caller_needs_the_object():
    made = []
    handle = Handle(1, "a", lambda: made.append(1) or [7], is_factory=True)
    assert not made
    assert handle.local is handle.local and made == [1]
    handle.local = 8
    assert handle.local == 8


def test_a_handle_becomes_the_workers_own_object_where_it_arrives():
    handle = Handle(-5, "a")
    sent = pickle.dumps(handle)
    with pytest.raises(InvalidArgument, match="'a' was dropped, or never made"):
        pickle.loads(sent)
    store_object(-5, value := [1, 2])
    try:
        assert pickle.loads(sent) is value
    finally:
        drop_object(-5)


def test_a_state_dict_is_loaded_into_an_object_that_has_one():
    class Model:
        def load_state_dict(self, state):
            self.state = state

    model = Model()
    assert assign(model, {"w": 1}) is model and model.state == {"w": 1}
    assert assign(model, 7) == 7 and assign(7, {"w": 1}) == {"w": 1}


def test_arrays_are_found_in_nested_containers_and_modules():
    torch = engine("torch")
    a, b = np.zeros(2), torch.zeros(3)
    assert [one.shape for one in arrays_of({"x": [a, (b,)]}, "x")] == [(2,), (3,)]
    assert [tuple(one.shape) for one in arrays_of(torch.nn.Linear(3, 2), "x")] == [(2, 3), (2,)]
    with pytest.raises(InvalidArgument, match="'x' is a str, which holds no arrays"):
        list(arrays_of([a, "text"], "x"))


# Messages


@pytest.fixture
def memory(tmp_path):
    memory = DataMemory(tmp_path / "memory", is_new=True)
    yield memory
    memory.remove()


def test_a_message_arrives_as_it_was_sent_with_large_arrays_in_memory(memory, tmp_path):
    value = {"large": np.arange(100_000.0), "small": np.arange(3), "order": np.asfortranarray(np.eye(200)), "text": "ä"}
    message = pack(value, memory)
    assert len(message) < 10_000 + value["order"].nbytes
    found = unpack(message, DataMemory(tmp_path / "memory"))
    assert found["text"] == "ä" and [found[k].dtype for k in ("large", "small")] == [np.float64, np.int64]
    for key in ("large", "small", "order"):
        np.testing.assert_array_equal(found[key], value[key])


def test_arrays_are_copied_unless_the_sender_says_that_they_need_not_be(memory):
    first, second = np.arange(10_000.0), np.arange(10_000.0)
    copied, seen = unpack(pack((first, second), memory, zero_copy=[second]), memory)
    pack((np.zeros(10_000), np.zeros(10_000)), memory)
    assert copied.sum() == first.sum() and seen.sum() == 0


def test_empty_and_structured_arrays_and_functions_travel_too(memory):
    structured = np.zeros(2000, [("a", "i8"), ("b", "f8")])
    factor = 3
    empty, back, function = unpack(pack((np.empty((0, 4)), structured, lambda x: factor * x), memory), memory)
    assert empty.shape == (0, 4) and back.dtype == structured.dtype and function(2) == 6


# Data in shared memory


def test_data_grows_shrinks_and_keeps_its_rows(tmp_path):
    freed = []
    data = share_data(np.arange(6.0).reshape(3, 2), tmp_path / "data", freed.append)
    assert (data.shape, data.dtype, data.nbytes, len(data)) == ((3, 2), np.float64, 48, 3)
    data.set_length(100_000)
    np.testing.assert_array_equal(data[:3], np.arange(6.0).reshape(3, 2))
    assert data.capacity >= 100_000
    data.set_value([[7.0, 8.0]])
    assert np.asarray(data).tolist() == [[7, 8]]
    data.free()
    data.free()
    assert freed == [tmp_path / "data"] and not (tmp_path / "data").exists()
    with pytest.raises(InvalidArgument, match="this data was freed"):
        data[0]


def test_a_worker_sees_the_memory_of_the_caller(tmp_path):
    data = share_data(np.zeros(4, "int32"), tmp_path / "data", lambda _: None)
    theirs = pickle.loads(pickle.dumps(data))
    theirs[1] = 5
    data[2] = 6
    assert theirs.tolist() == [0, 5, 6, 0] == data[:].tolist()
    data.free()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda data: data.set_value(np.zeros((2, 3), "uint8")), r"shape \[2, 3\] does not fit data of shape \[2\]"),
        (lambda data: data.set_length(-1), "cannot have -1 rows"),
        (lambda data: data.__setitem__(0, 300), "holds 0 to 255"),
        (lambda data: data.__setitem__(0, -1), "holds 0 to 255"),
        (lambda data: data.__setitem__(0, np.float64(1.0)), "uint8"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_change_nothing(tmp_path, act, reason):
    data = share_data(np.array([1, 2], "uint8"), tmp_path / "data", lambda _: None)
    with pytest.raises(InvalidArgument, match=reason):
        act(data)
    assert data[:].tolist() == [1, 2]
    data.free()


@pytest.mark.parametrize("value", [7.0, np.array([object()]), "text"])
def test_what_holds_no_rows_of_numbers_is_no_data(tmp_path, value):
    with pytest.raises(InvalidArgument, match="cannot be kept as data"):
        share_data(value, tmp_path / "data", lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_memory_mapped_file_is_used_where_it_is(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    data = share_data(mapped[2:5], tmp_path / "data", lambda _: None)
    assert data[:].tolist() == [2, 3, 4] == pickle.loads(pickle.dumps(data)).tolist()
    with pytest.raises(InvalidArgument, match="in an existing file cannot change its length"):
        data.set_length(1)
    data.free()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
