"""A serial program whose functions run on worker processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maniple import Pool
from maniple.errors import InvalidArgument, WorkerFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3) as made:
        yield made


def parts(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Outputs of every kind, of which one on all rows can be told."""
    return {
        "sum": x.sum(0),
        "max": y.max(0) if len(y) else np.full(y.shape[1:], -100),
        "min": y.min(0) if len(y) else np.full(y.shape[1:], 100),
        "mean": (y.mean(0) if len(y) else np.zeros(y.shape[1:]), 1.0),
        "rows": y * 2,
    }


OPS = {"sum": "sum", "max": "max", "min": "min", "mean": ("mean", "mean"), "rows": "gather"}


@st.composite
def selections(draw: st.DrawFn) -> tuple[int, Any]:
    length = draw(st.integers(0, 12))
    kinds = [st.none(), st.integers(0, length), st.slices(length)]
    if length:
        kinds.append(st.lists(st.integers(-length, length - 1), max_size=15))
    return length, draw(st.one_of(kinds))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chosen=selections(),
    columns=st.integers(0, 3),
    slices=st.integers(1, 4),
    is_data=st.booleans(),
    seed=st.integers(0, 99),
)
def test_result_is_that_of_one_process(
    pool: Pool, chosen: tuple[int, Any], columns: int, slices: int, is_data: bool, seed: int
):
    length, batch = chosen
    batch = batch if batch != [] else np.array([], int)
    random = np.random.default_rng(seed)
    x, y = random.integers(-(10**9), 10**9, (length, columns)), random.normal(size=(length, 2))
    function = pool.function(parts, scatter=("x", "y"), reduce=OPS)
    given_ = [pool.data(v) for v in (x, y)] if is_data else [x, y]
    found = function(*given_, batch=batch, num_slices=slices)
    rows = np.arange(length)[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
    expected = parts(x[rows], y[rows])
    for name in ("sum", "max", "min", "rows"):
        np.testing.assert_array_equal(found[name], expected[name])
    np.testing.assert_allclose(found["mean"][0], expected["mean"][0], rtol=1e-6, atol=1e-9)
    assert found["mean"][1] == pytest.approx(1.0)
    serial = function.serial(*given_, batch=batch, num_slices=slices)
    np.testing.assert_array_equal(serial["sum"], expected["sum"])
    for data in given_ if is_data else ():
        data.free()


def test_functions_may_be_defined_at_any_time_and_refer_to_what_is_around_them(pool: Pool):
    factor = 3

    def scaled(x: np.ndarray, by: float = 1.0) -> np.ndarray:
        return x * factor * by

    first = pool.function(scaled, scatter="x", reduce="gather")
    np.testing.assert_array_equal(first(np.arange(7)), np.arange(7) * 3)
    second = pool.function(lambda x, w: (x @ w).sum(), scatter=[0], broadcast=["w"], reduce="sum")
    assert second(np.ones((5, 2)), w=np.array([1.0, 2.0])) == 15.0
    np.testing.assert_array_equal(first(x=np.arange(4), by=2), np.arange(4) * 6)
    ranks = pool.function(os.getpid)
    assert sorted(ranks()) == sorted(pool.pids)


def test_data_grows_and_is_seen_by_all(pool: Pool):
    data = pool.data(np.arange(6.0).reshape(3, 2))
    total = pool.function(lambda x: x.sum(), scatter="x", reduce="sum")
    assert total(data) == 15.0
    assert (data.shape, data.dtype, len(data), data.ndim, data.nbytes) == ((3, 2), np.float64, 3, 2, 48)
    data[0] = 10
    np.testing.assert_array_equal(np.asarray(data)[0], [10, 10])
    data.set_value(np.ones((50_000, 2)))
    assert total(data) == 100_000.0
    assert data.capacity > 50_000  # more than was asked for
    data.set_length(data.capacity + 1)
    data[50_000:] = 2
    data.set_length(50_001)
    assert total(data) == 100_004.0
    negate = pool.function(lambda x: np.negative(x, out=x) is None, scatter="x")
    negate(data, batch=2)
    assert data[:3, 0].tolist() == [-1, -1, 1]  # workers write to the same memory
    for wrong in (np.ones((2, 2), complex), np.ones((2, 3)), np.ones(2)):
        with pytest.raises(InvalidArgument):
            data.set_value(wrong)
    data.free()
    with pytest.raises(InvalidArgument, match="was freed"):
        total(data)
    whole = pool.data(np.arange(4, dtype=np.int32))
    with pytest.raises(InvalidArgument, match="without loss"):
        whole[0] = np.float64(0.5)


def test_data_in_a_file_stays_there(pool: Pool, tmp_path: Path):
    np.save(tmp_path / "x.npy", np.arange(20).reshape(10, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = pool.data(mapped[2:])
    function = pool.function(lambda x: (x.sum(), type(x).__name__), scatter="x", reduce=("sum", "none"))
    total, kinds = function(data, batch=[0, 7])
    assert total == 4 + 5 + 18 + 19
    assert data.capacity == 8
    with pytest.raises(InvalidArgument, match="cannot change its length"):
        data.set_length(9)
    del kinds


def test_resident_parts_are_selected_within_each_worker(pool: Pool):
    x = np.arange(10)
    own = pool.scatter(x, name="own")
    assert pool.lengths("own") == [3, 3, 4]
    function = pool.function(lambda x, y: x + y, scatter=("x", "y"), reduce="gather")
    np.testing.assert_array_equal(function(own, own), x * 2)
    np.testing.assert_array_equal(function(own, own, batch_s=2), [0, 2, 6, 8, 12, 14])
    np.testing.assert_array_equal(function(own, own, batch_s=[[0], [1, 1], slice(0)]), [0, 8, 8])
    for batch_s in (2, slice(1, None), [2, 0, 2], np.array([1]), [[0], [1, 1], slice(0)], [[], [], []]):
        np.testing.assert_array_equal(function.serial(own, own, batch_s=batch_s), function(own, own, batch_s=batch_s))
    np.testing.assert_array_equal(function(own, pool.data(x), num_slices=2), x * 2)
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        function(own, x, batch_s=1)
    np.testing.assert_array_equal(pool.gather(own), x)
    everywhere = pool.all_gather(own)
    assert pool.lengths(everywhere) == [10, 10, 10]
    pool.drop("own")
    with pytest.raises(InvalidArgument, match="no object 'own'"):
        pool.gather("own")


def test_objects_of_the_workers_are_reduced_on_request(pool: Pool):
    w = pool.replicate(np.zeros(3), name="w")
    pids = pool.replicate(lambda: np.array([float(os.getpid())]), name="pid")
    assert len({float(pool.get(pids, rank)[0]) for rank in range(3)}) == 3
    for rank in range(3):
        pool.set(w, rank, np.full(3, rank + 1.0))
    assert pool.reduce("w", "sum").tolist() == [6.0] * 3
    assert pool.reduce(w).tolist() == [2.0] * 3
    pool.all_reduce(["w", "pid"], "max")
    assert [pool.get(w, rank)[0] for rank in range(3)] == [3.0] * 3
    pool.set(w, 1, np.full(3, 7.0))
    pool.broadcast(w, root=1)
    assert pool.gather(w).tolist() == [7.0] * 9
    assert pool.shapes(w) == [(3,)] * 3
    with pytest.raises(InvalidArgument, match="no worker 3"):
        pool.get(w, 3)


def test_values_that_do_not_fit_into_data_are_refused_and_change_nothing(pool: Pool):
    cases: list[tuple[str, Any, str]] = [
        ("int8", 300, "300 does not fit into data of dtype int8, which holds -128 to 127"),
        ("uint8", -1, "-1 does not fit into data of dtype uint8, which holds 0 to 255"),
        ("int64", 2**63 + 5, "9223372036854775813 does not fit into data of dtype int64"),
        ("float16", 1e5, "100000.0 does not fit into data of dtype float16, which holds up to 65504"),
        ("float16", 70_000, "70000 does not fit into data of dtype float16"),
        ("complex64", 1e300j, "does not fit into data of dtype complex64"),
        ("int32", float("nan"), "float64 values do not fit into data of dtype int32"),
        ("int8", np.int64(5), "int64 values do not fit into data of dtype int8"),
        ("U3", "longer", "longer does not fit into data of dtype <U3"),
    ]
    for dtype, value, message in cases:
        data = pool.data(np.ones(2, dtype))
        many = np.array([value, value]) if hasattr(value, "dtype") else [value, value]
        for act in (
            lambda data=data, value=value: data.__setitem__(0, value),
            lambda data=data, many=many: data.__setitem__(slice(None), many),
            lambda data=data, many=many: data.set_value(many),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(message)):
                act()
        np.testing.assert_array_equal(data, np.ones(2, dtype))
        data.free()


def test_values_that_fit_into_data_are_taken_as_numpy_takes_them(pool: Pool):
    cases: list[tuple[str, Any]] = [
        ("int8", -128),
        ("uint8", 255),
        ("int64", True),
        ("float16", 65504),
        ("float32", 0.1),
        ("float16", float("inf")),
        ("float32", float("nan")),
        ("float64", np.float32(0.1)),
        ("complex64", 2j),
    ]
    for dtype, value in cases:
        expected, data = np.zeros(3, dtype), pool.data(np.zeros(3, dtype))
        expected[1], data[1] = value, value
        np.testing.assert_array_equal(data, expected)
        data.set_value([value] if not hasattr(value, "dtype") else np.array([value]))
        np.testing.assert_array_equal(data, expected[1:2])
        data.free()


def test_calls_on_objects_of_the_workers_take_one_or_many(pool: Pool):
    x, y = np.arange(10.0).reshape(5, 2), np.arange(7)
    own = pool.scatter([x, pool.data(y)], name=["many x", "many y"])
    assert [handle.name for handle in own] == ["many x", "many y"]
    for what in (own, tuple(own), ["many x", own[1]]):
        for found, expected in zip(pool.gather(what), (x, y), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert pool.shapes(what) == [[(1, 2), (2, 2), (2, 2)], [(2,), (2,), (3,)]]
        assert pool.lengths(what) == [[1, 2, 2], [2, 2, 3]]
        assert [value.tolist() for value in pool.get(what, 2)] == [x[3:].tolist(), [4, 5, 6]]
    everywhere = pool.all_gather(own, name=("all x", "all y"))
    for rank in range(3):
        for found, expected in zip(pool.get(everywhere, rank), (x, y), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert pool.gather([own[0]])[0].tolist() == x.tolist()  # a list of one gives a list
    pool.set(everywhere, 1, [np.ones_like(x), np.full_like(y, 4)])
    pool.broadcast(everywhere, root=1)
    pool.all_reduce(["all x", "all y"], "sum")
    for found, expected in zip(pool.reduce(everywhere, "sum"), (9, 36), strict=True):
        assert (found == expected).all()
    pool.drop([*own, "all x", "all y"])
    with pytest.raises(InvalidArgument, match="there is no object 'all y'"):
        pool.get("all y")
    assert pool.gather([]) == []


def test_calls_on_what_is_no_object_of_the_pool_are_refused(pool: Pool):
    w = pool.replicate(np.zeros(2), name="refused")
    pair = pool.replicate({"a": np.zeros(2), "b": np.zeros(3)})
    calls: dict[str, Callable[[], Any]] = {
        "type NoneType names no object of a pool. Pass a handle": lambda: pool.get(None),  # pyright: ignore
        "type int names no object": lambda: pool.all_gather([w, 3]),  # pyright: ignore
        "type ndarray names no object": lambda: pool.broadcast(np.zeros(2)),  # pyright: ignore
        "'refused' is given twice": lambda: pool.all_reduce([w, "refused"]),
        "there is no object 'nobody'": lambda: pool.drop([w, "nobody"]),  # and nothing is dropped
        "1 was given as values for a list of 2": lambda: pool.set([w, pair], 0, [np.zeros(2)]),
        "type ndarray was given as values for a list of 1": lambda: pool.set([w], 0, np.zeros(1)),
        "type str was given as name for a list of 1": lambda: pool.all_gather([w], name="one"),
        "cannot name one object": lambda: pool.all_gather(w, name=["one"]),  # pyright: ignore
        "type int has no axis 0 to split": lambda: pool.scatter([1, 2, 3]),
        "holds 2 arrays, but all_gather takes one": lambda: pool.all_gather(pair),
        "without axes": lambda: pool.lengths(pool.replicate(np.array(1.0))),
        "rank 0.5 is not an integer": lambda: pool.set(w, 0.5, np.zeros(2)),  # pyright: ignore
    }
    for message, call in calls.items():
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert pool.lengths(w) == [2, 2, 2]
    assert pool.lengths(pair) == [[2, 3]] * 3


def test_updates_of_slices_see_the_old_values_and_are_applied_once(pool: Pool):
    w = pool.replicate(np.array([1.0]))

    def step(x: np.ndarray, w: np.ndarray) -> Any:
        return float(w[0]), {"w": w + x.mean()}

    function = pool.function(step, scatter="x", reduce="mean", update={"w": "mean"})
    assert function(np.arange(12.0), w, num_slices=4) == 1.0  # all slices saw 1
    assert [pool.get(w, rank)[0] for rank in range(3)] == [1 + 1.5, 1 + 5.5, 1 + 9.5]  # each its own rows
    function.serial(np.arange(12.0), w, num_slices=4)
    assert w.local[0] == 1 + 5.5


class Unusual(Exception):
    """An error that cannot be made anew from its text."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_error_in_a_worker_reaches_the_caller_as_that_error(pool: Pool):
    def fail(x: np.ndarray, how: str) -> None:
        if x[0] == 2:
            raise (KeyError("lost") if how == "known" else Unusual(1, 2))
        time.sleep(60)

    function = pool.function(fail, scatter="x")
    begin = time.monotonic()
    with pytest.raises(KeyError) as caught:
        function(np.arange(3), "known")
    note = "".join(caught.value.__notes__)
    assert "worker 2" in note and 'KeyError("lost")' in note and "in fail" in note
    with pytest.raises((WorkerFailed, Unusual), match="1 and 2"):
        function(np.arange(3), "unusual")
    assert time.monotonic() - begin < 30  # nobody waits for those who sleep
    assert pool.function(lambda x: x.sum(), scatter="x", reduce="sum")(np.arange(4)) == 6


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda p: p.function(parts, scatter="z"), "no argument 'z'"),
        (lambda p: p.function(parts, scatter="x", reduce="average"), "reduce='average' contains the unknown op"),
        (lambda p: p.function(parts, scatter=("x", "y"))(np.ones(2), np.ones(3)), "different lengths"),
        (lambda p: p.function(parts, scatter=("x", "y"))(3, np.ones(3)), "x is a int, which has no rows"),
        (lambda p: p.function(os.getpid)(batch=3), "batch selects rows of scattered sets"),
        (lambda p: p.function(parts, scatter="x", broadcast="x"), "both scattered and broadcast"),
        (lambda p: p.function(parts, scatter="x")(np.ones(2), np.ones(2), num_slices=0), "num_slices=0"),
        (lambda p: p.data(np.array(["a", None])), "cannot be kept as data"),
        (lambda p: Pool(0), "has no workers"),
        (lambda p: p.replicate(3, name="w") and p.all_reduce("nothing"), "no object 'nothing'"),
    ],
)
def test_mistakes_are_named_and_harm_nothing(pool: Pool, act: Any, text: str):
    with contextlib.suppress(InvalidArgument):
        pool.drop("w")
    with pytest.raises(InvalidArgument, match=text):
        act(pool)
    assert len(pool.function(os.getpid)()) == 3


def test_interrupted_call_keeps_the_pool(pool: Pool):
    def sleep(x: np.ndarray) -> None:
        del x
        time.sleep(60)

    function = pool.function(sleep, scatter="x")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        function(np.arange(3))
    assert time.monotonic() - begin < 30
    assert len(pool.function(os.getpid)()) == 3


def test_killed_worker_is_named_and_the_pool_says_that_it_is_closed():
    with Pool(2) as pool:
        function = pool.function(lambda x: time.sleep(60), scatter="x")
        threading.Timer(0.5, os.kill, (pool.pids[1], signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(WorkerFailed, match="worker 1 of the pool was ended by SIGKILL"):
            function(np.arange(2))
        assert time.monotonic() - begin < 10
        with pytest.raises(InvalidArgument, match="the pool is closed: worker 1 was ended by SIGKILL"):
            function(np.arange(2))
        folder = pool._segment.path
    assert not folder.exists()


def test_nothing_is_left_when_the_caller_is_killed(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time, numpy as np, maniple\n"
        "pool = maniple.Pool(2)\n"
        "data = pool.data(np.ones(1000))\n"
        "print(*pool.pids, pool._segment.path, flush=True)\n"
        "pool.function(lambda x: time.sleep(60), scatter='x')(data)\n"
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        assert Path(folder).exists()
        process.kill()
    deadline = time.monotonic() + 30
    while Path(folder).exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_thousands_of_calls_leave_memory_flat(pool: Pool):
    def resident(x: np.ndarray) -> int:
        del x
        return int(Path("/proc/self/statm").read_text().split()[1])

    function, x = pool.function(resident, scatter="x", reduce="none"), np.ones((300, 100))
    for _ in range(200):
        before = function(x)
    mine = resident(x)
    for _ in range(10_000):
        after = function(x)
    assert max(b - a for a, b in zip(before, after, strict=True)) < 500  # pages
    assert resident(x) - mine < 500


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("slices", [1, 3])
def test_training_of_arrays_is_that_of_one_process(pool: Pool, optimizer: str, slices: int):
    random = np.random.default_rng(0)
    x, w = random.normal(size=(11, 3)), np.array([1.0, -2.0, 0.5])
    y = x @ w

    def loss(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> Any:
        error = x @ model["w"] - y
        return (error**2).mean(), {"w": 2 * x.T @ error / len(x)}

    train = pool.train_function({"w": np.zeros(3)}, loss, optimizer, lr=0.1)
    data = pool.data(x), pool.data(y)
    for batch in (None, 2, [3, 1, 4, 1, 5], slice(None, None, 2)):  # 2 rows: one worker has none
        assert train(*data, batch=batch, num_slices=slices) == pytest.approx(
            train.serial(x, y, batch=batch, num_slices=1), rel=1e-6
        )
    assert train.model is not None
    values = [pool.get(train.model, rank)["w"] for rank in range(3)]
    assert all((value == values[0]).all() for value in values)
    np.testing.assert_allclose(values[0], train.model.local["w"], rtol=1e-6)


def test_profile_tells_where_the_time_went(pool: Pool):
    def sleep(x: np.ndarray) -> None:
        time.sleep(0.2 * x[0])

    w = pool.replicate(np.zeros(1))
    pool.profile(reset=True)
    pool.function(sleep, scatter="x")(np.array([0.0, 1.0, 2.0]))
    pool.all_reduce(w)
    rows = pool.profile()
    assert [row["rank"] for row in rows] == [0, 1, 2] and all(row["calls"] == 1 for row in rows)
    assert rows[0]["compute"] < 0.2 <= rows[1]["compute"] < 0.4 <= rows[2]["compute"]
    assert rows[0]["idle"] > 0.3 and all(row["copy"] >= 0 and row["wait"] >= 0 for row in rows)
