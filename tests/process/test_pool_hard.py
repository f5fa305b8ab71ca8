"""A pool in bad company: interrupts at any moment, odd outputs, aliases, forks, threads, modules that nobody finds."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maniple import Pool
from maniple.errors import InvalidArgument, WorkerFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as made:
        yield made


def is_well(pool: Pool) -> bool:
    """Answers belong to their questions."""
    return [pool.function(lambda k: k)(k) for k in range(3)] == [[k] * pool.n for k in range(3)]


def sleep_in(flag: Path, rank_of_rows: np.ndarray) -> None:
    if rank_of_rows[0] == 1:
        flag.touch()
        time.sleep(60)


def when(flag: Path, act: Any) -> threading.Thread:
    """Act as soon as a worker has made a file."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_interrupt_after_one_worker_has_answered_keeps_the_pool(pool: Pool, tmp_path: Path):
    function = pool.function(sleep_in, scatter="rank_of_rows")
    thread = when(tmp_path / "flag", lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        function(tmp_path / "flag", np.arange(2))
    thread.join()
    assert is_well(pool)


# Python ignores one that comes while it clears a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_keep_the_pool_and_the_answers_in_order(pool: Pool):
    echo = pool.function(lambda k, x: (k, len(x)), scatter=())
    large = b"x" * 3_000_000  # more than a connection takes at once
    stop = threading.Event()

    def disturb() -> None:
        random = np.random.default_rng(0)
        while not stop.wait(random.uniform(0.0, 0.02)):
            os.kill(os.getpid(), signal.SIGINT)

    seen = 0
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=disturb)
    deadline = time.monotonic() + 3
    gc.disable()  # JAX, if another test has loaded it, looks on at collections, and cannot be interrupted there
    try:
        thread.start()
        while time.monotonic() < deadline:
            try:
                while time.monotonic() < deadline:
                    seen += 1
                    assert echo(seen, large if seen % 2 else b"") == [(seen, len(large) if seen % 2 else 0)] * 2
            except KeyboardInterrupt:
                continue
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, old)
        gc.enable()
    assert is_well(pool)


def test_second_interrupt_returns_although_a_worker_is_stuck():
    with Pool(1) as pool:
        function = pool.function(len)
        os.kill(pool.pids[0], signal.SIGSTOP)  # it takes nothing, so the request cannot be sent as a whole
        done = threading.Event()

        def retry_until() -> None:
            while not done.wait(0.5):
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=retry_until)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                function(b"x" * 30_000_000)
        finally:
            done.set()
            thread.join()
        with pytest.raises(InvalidArgument, match="the pool is closed: a call was cut short by KeyboardInterrupt"):
            function(b"")


def test_worker_that_has_not_begun_is_interrupted_all_the_same(pool: Pool):
    def fail(x: np.ndarray) -> None:
        if x[0] == 0:
            raise ValueError("at once")
        time.sleep(60)

    function = pool.function(fail, scatter="x")
    os.kill(pool.pids[1], signal.SIGSTOP)  # it reads the request after the interrupt was sent
    threading.Timer(0.3, os.kill, (pool.pids[1], signal.SIGCONT)).start()
    with pytest.raises(ValueError, match="at once"):
        function(np.arange(2))
    assert is_well(pool)


def test_interrupted_training_makes_the_step_everywhere_or_nowhere(pool: Pool, tmp_path: Path):
    def loss(model: dict[str, np.ndarray], x: np.ndarray, flag: Path | None) -> Any:
        if flag is not None and x[0] == 1:
            flag.touch()
            time.sleep(60)
        return float(x.mean()), {"w": np.ones(1)}

    train = pool.train_function({"w": np.zeros(1)}, loss, "sgd", lr=1.0, sets=1)
    train(np.arange(2.0), None)
    thread = when(tmp_path / "flag", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(np.arange(2.0), tmp_path / "flag")
    thread.join()
    train(np.arange(2.0), None)
    assert train.model is not None
    assert [pool.get(train.model, rank)["w"].tolist() for rank in range(2)] == [[-2.0], [-2.0]]


def test_training_begins_with_the_same_model_if_each_worker_has_made_its_own(pool: Pool):
    model = pool.replicate(lambda: {"w": np.array([float(os.getpid())])})
    train = pool.train_function(model, lambda m, x: (0.0, {"w": np.zeros(1)}), "sgd")
    train(np.arange(2.0))
    assert pool.get(model, 0)["w"] == pool.get(model, 1)["w"]


class Closed:
    """Can be made in a worker, and opened by nobody."""

    def __reduce__(self) -> Any:
        return _open_in_worker, (os.getpid(),)


def _open_in_worker(pid: int) -> str:
    if pid != os.getpid():
        raise RuntimeError("not here")
    return "here"


def test_answer_that_cannot_be_opened_does_not_become_the_next_one(pool: Pool):
    with pytest.raises(RuntimeError, match="not here"):
        pool.function(Closed)()
    assert is_well(pool)


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def test_error_without_a_text_does_not_end_the_worker(pool: Pool):
    def fail() -> None:
        raise Mute

    with pytest.raises((Mute, WorkerFailed)):
        pool.function(fail)()
    assert is_well(pool)


def test_argument_that_is_also_scattered_is_its_own_copy(pool: Pool):
    def act(x: np.ndarray, w: np.ndarray, part: list[np.ndarray]) -> bool:
        is_right = bool((w == 1).all() and (part[0] == 1).all())
        time.sleep(0.05)
        w += 1  # not seen by the other worker
        part[0] += 1
        return is_right and bool((w == 2).all() and (part[0] == 2).all() and (x == 1).all())

    x = np.ones((1000, 100))
    assert pool.function(act, scatter="x")(x, x, [x[:900]]) == [True, True]
    torch = pytest.importorskip("torch")
    x = torch.ones(1000, 100)
    assert pool.function(act, scatter="x")(x, x, [x[:900]]) == [True, True]


def test_function_may_return_the_same_buffer_each_time(pool: Pool):
    buffer = np.zeros(1)

    def total(x: np.ndarray) -> np.ndarray:
        buffer[0] = x.sum()
        return buffer

    x = np.arange(8.0)
    assert pool.function(total, scatter="x", reduce="sum")(x, num_slices=4) == x.sum()
    assert pool.function(total, scatter="x", reduce="gather")(x, num_slices=4).tolist() == x.tolist()


@pytest.mark.parametrize(
    "output",
    [
        lambda x: None if x[0] == 0 else 1.0,
        lambda x: 1.0 if x[0] == 0 else None,
        lambda x: [float(value) for value in x],  # 1 and 2 rows: the third value would be lost
        lambda x: {"a": 1.0} if x[0] == 0 else {"a": 1.0, "b": 2.0},
    ],
)
@pytest.mark.parametrize("op", ["sum", "gather"])
def test_outputs_of_different_forms_are_refused_rather_than_lost(pool: Pool, output: Any, op: str):
    with pytest.raises(InvalidArgument, match="for some rows and"):
        pool.function(output, scatter="x", reduce=op)(np.arange(3))


@pytest.mark.parametrize(
    "x",
    [
        np.array([(1, 2.5), (3, 4.5), (5, 6.5)], [("a", "i4"), ("b", "f8")]),
        np.array(["2024-01-01", "2025-01-01", "2026-01-01"], "datetime64[D]"),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24).reshape(3, 8)[:, ::2],
        np.arange(3, dtype=">i4"),
        np.array([True, False, True]),
        np.broadcast_to(np.arange(3), (3, 3)),
    ],
    ids=["structured", "datetime", "fortran", "strided", "swapped", "bool", "read-only"],
)
def test_arrays_of_all_kinds_come_through(pool: Pool, x: np.ndarray):
    function = pool.function(lambda x: x, scatter="x", reduce="gather")
    data = pool.data(x)
    assert data.dtype == x.dtype
    for given in (x, data):
        np.testing.assert_array_equal(function(given), x)
        np.testing.assert_array_equal(function(given, batch=[2, 0], num_slices=2), x[[2, 0]])
    data.free()


def test_truths_are_counted_and_small_unsigned_data_takes_whole_numbers(pool: Pool):
    assert pool.function(lambda x: x.any(), scatter="x", reduce="sum")(np.ones(4, bool)) == 2
    pixels = pool.data(np.zeros(3, np.uint8))
    pixels[0] = 255
    pixels[1:] = [1, 2]
    assert np.asarray(pixels).tolist() == [255, 1, 2]
    with pytest.raises(InvalidArgument, match="which holds 0 to 255"):
        pixels[0] = 256
    assert pool.function(len, scatter=[0], reduce="sum")(pixels, batch=[]) == 0


def test_what_would_lose_its_meaning_on_the_way_is_refused(pool: Pool):
    function = pool.function(lambda x: x.sum(), scatter="x", reduce="sum")
    with pytest.raises(InvalidArgument, match="x is a MaskedArray, which has no rows to scatter"):
        function(np.ma.masked_less(np.arange(4), 2))
    with pytest.raises(InvalidArgument, match="counted from 0"):
        pool.function(lambda x: x.sum(), scatter=[-1])


def test_threads_take_turns(pool: Pool):
    function, wrong = pool.function(lambda k, x: (k, float(x.sum()))), []

    def call(k: int) -> None:
        for _ in range(30):
            found = function(k, np.full(20_000, k))
            if found != [(k, 20_000.0 * k)] * 2:
                wrong.append(found)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copy_of_the_process_by_fork_harms_nothing(pool: Pool):
    data = pool.data(np.arange(4))
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(InvalidArgument, match="of which this one is a copy"):
                pool.function(lambda: 1)
            pool.close()  # not its own
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.function(lambda x: x.sum(), scatter="x", reduce="sum")(data) == 6
    assert is_well(pool)


def test_objects_of_one_pool_are_not_found_in_another(pool: Pool):
    w = pool.replicate(np.ones(2), name="weights")
    with Pool(1) as other:
        mine = other.replicate(np.zeros(2), name="weights")
        with pytest.raises(InvalidArgument, match="never made"):
            other.function(lambda w: w)(w)
        with pytest.raises(InvalidArgument, match="no object 'weights'"):
            other.get(w)
        assert other.get(mine).tolist() == [0.0, 0.0]
    pool.drop(w)


def test_name_of_what_could_not_be_made_is_free_again(pool: Pool):
    with pytest.raises(TypeError):
        pool.replicate(threading.Lock(), name="lock")
    with pytest.raises(ZeroDivisionError):
        pool.replicate(lambda: 1 / 0, name="lock")
    pool.drop(pool.replicate(1, name="lock"))


def test_pool_and_its_functions_cannot_be_sent(pool: Pool):
    inner = pool.function(lambda: 1)
    with pytest.raises(InvalidArgument, match="cannot be sent to its workers"):
        pool.function(lambda: pool.n)
    with pytest.raises(InvalidArgument, match="cannot run in a worker"):
        pool.function(inner)
    assert is_well(pool)


def test_functions_and_pools_that_are_no_more_used_are_forgotten():
    pool = Pool(1)
    for _ in range(20):
        pool.function(np.ones(1_000_000).sum)()
    pages = pool.function(lambda: int(Path("/proc/self/statm").read_text().split()[1]))()[0]
    assert pages * 4096 < 150e6 + 20 * 8e6 / 2
    (pid,) = pool.pids
    pool = None
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_module_that_is_found_later_is_found_by_the_workers(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "came_later.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import came_later  # pyright: ignore[reportMissingImports]

    assert pool.function(came_later.twice)(4) == [8, 8]


def test_script_from_another_folder_with_classes_of_its_own_and_no_guard(tmp_path: Path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "select.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "script.py").write_text(
        "import maniple, sys\n"
        "class Lost(Exception):\n"
        "    pass\n"
        "class Pair:\n"
        "    def __init__(self, a): self.a = a\n"
        "def fail(x):\n"
        "    raise Lost('so it is')\n"
        "def show(): print('said by a worker')\n"
        "pool = maniple.Pool(1)\n"
        "found = pool.function(lambda p: Pair(p.a + 1))(Pair(1))[0]\n"
        "assert type(found) is Pair and found.a == 2\n"
        "try:\n"
        "    pool.function(fail)(1)\n"
        "except Lost as error:\n"
        "    print('caught', error)\n"
        "pool.function(show)()\n"  # and no close()
    )
    script = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(script, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:-1] in (
        ["caught so it is", "said by a worker"],
        ["said by a worker", "caught so it is"],
    )


def test_functions_of_a_test_module_that_has_no_place_on_the_path(tmp_path: Path):
    (tmp_path / "test_deep.py").write_text(
        "import maniple\n"
        "class Lost(Exception):\n"
        "    pass\n"
        "def helper(x): return x + 1\n"
        "def act(x):\n"
        "    if x < 0: raise Lost('below')\n"
        "    return helper(x)\n"
        "def test_it():\n"
        "    import pytest\n"
        "    with maniple.Pool(1) as pool:\n"
        "        assert pool.function(act)(1) == [2]\n"
        "        with pytest.raises(Lost, match='below'):\n"
        "            pool.function(act)(-1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path], cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
