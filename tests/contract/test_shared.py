"""What only the center in shared memory has: versions, torn writes, and locks that die with their holder."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from maniple import EASGD, Downpour, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.clock import clock
from maniple.contracts import ExchangeInfo
from maniple.errors import InvalidArgument, SharedMemoryFull, WaitedTooLong
from tests.simulated_clock import SimulatedClock

from ..limits import file_limit

pytestmark = pytest.mark.usefixtures("entry_chunks")


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def opened(segment):
    """Open the segment's center for a dict of arrays; closed at the end."""
    centers: list[SharedCenter] = []

    def opened(params, rank: int = 0, *, lock: bool = True) -> SharedCenter:
        center, _ = SharedCenter.open_or_create(segment, "center-0", adapt(params), rank=rank, lock=lock)
        centers.append(center)
        return center

    yield opened
    for center in centers:
        center.close()


def some(fill: float = 0.0) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), fill, "float64"), "b": np.full(3, fill, "float64")}


def exchange(center: SharedCenter, params, rule: Rule | None = None):
    return center.exchange(adapt(params), rule or EASGD(0.5), None, ExchangeInfo())


# Versions and torn writes


def test_versions_count_two_for_each_write_and_none_for_a_look(opened):
    params = some()
    center = opened(params)
    assert center.versions == [0, 0]
    exchange(center, params)
    center.push(adapt(params))
    assert center.versions == [4, 4]
    center.pull(adapt(params))
    center.read(0)
    assert center.versions == [4, 4]


def test_version_is_odd_while_a_parameter_is_written(opened):
    class Looking(Rule):
        def exchange(self, x, c, state, moment):
            seen.append(center.versions)
            return

    seen: list[list[int]] = []
    center = opened(some())
    exchange(center, some(), Looking())
    assert seen == [[1, 0], [2, 1]]


@pytest.mark.parametrize("act", ["exchange", "pull", "push"])
def test_write_that_was_cut_short_is_reported_once(opened, act):
    params = some()
    first, second = opened(params, 0), opened(some(), 1)
    first._versions[1] = 7  # a worker was killed in the middle of "b"
    for center, expected in ((first, ["b"]), (first, []), (second, [])):
        outcome = exchange(center, params) if act == "exchange" else getattr(center, act)(adapt(params))
        assert outcome.torn == expected
    assert all(version % 2 == 0 for version in first.versions)


def test_error_before_anything_was_written_is_no_torn_write(opened):
    params, broken = some(), some()
    first, second = opened(params, 0), opened(broken, 1)
    model = adapt(broken)
    broken["b"].flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        second.exchange(model, EASGD(0.5), None, ExchangeInfo())
    assert exchange(first, params).torn == []


def test_error_in_a_rule_gives_the_lock_back(opened, monkeypatch):
    class Broken(Rule):
        def mix(self, x, c, state):
            raise ZeroDivisionError

    params = some()
    first, second = opened(params, 0), opened(some(), 1)
    with pytest.raises(ZeroDivisionError):
        exchange(first, params, Broken())
    monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0)  # nothing is waited for
    exchange(second, some())


def test_contribution_that_was_refused_is_no_write_of_others(opened):
    mine, theirs = some(), some()
    first, second = opened(mine, 0), opened(theirs, 1)
    theirs["w"][:] = np.nan
    second.push(adapt(theirs))
    second.pull(adapt(theirs))
    assert np.isfinite(theirs["w"]).all()
    assert exchange(first, mine).torn == []


# Making a center


def test_creator_that_died_half_way_is_replaced_by_the_next(segment, opened):
    whole = opened(some(3))
    size = (segment.path / "center-0").stat().st_size
    whole.close()
    (segment.path / "center-0").unlink()
    for left in (b"", bytes(size), bytes(4096)):  # before and after it was given its size, and less than that
        (segment.path / "center-0").write_bytes(left)
        params = some(4)
        center, is_creator = SharedCenter.open_or_create(segment, "center-0", adapt(params), rank=1)
        assert is_creator
        assert (center.read(0) == 4).all()
        assert center.versions == [0, 0]
        center.close()
        (segment.path / "center-0").unlink()


def test_what_a_failed_creator_with_another_model_left_does_no_harm(segment, opened):
    failed = {f"p{i}": np.full(5000, -1.5, "float32") for i in range(4)}
    failed["p3"][-1] = np.nan
    with pytest.raises(InvalidArgument, match="'p3'"):
        opened(failed)
    params = {f"a parameter with quite a long name {i}": np.zeros(2) for i in range(200)}
    center = opened(params, 1)
    assert set(center.versions) == {0}
    assert exchange(center, params).torn == []
    assert exchange(center, params).staleness == 0


def test_center_that_nobody_has_finished_is_none(segment, opened):
    (segment.path / "center-0").write_bytes(bytes(8192))
    assert SharedCenter.open(segment, segment.path / "center-0") is None
    assert [path.name for path in segment.centers()] == ["center-0"]
    opened(some(1))
    center = SharedCenter.open(segment, segment.path / "center-0")
    assert center is not None
    np.testing.assert_array_equal(center.read(0), np.full(6, 1.0))
    center.close()


def test_center_that_does_not_fit_says_how_much_it_needs(segment, opened):
    with file_limit(1 << 20), pytest.raises(SharedMemoryFull, match=r"needs 8\.0 MB.*free.*MANIPLE_SHM"):
        opened({"w": np.zeros(1_000_000)})
    assert (opened({"w": np.ones(1_000_000)}, 1).read(0) == 1).all()  # once there is room, the next one makes it


def test_several_centers_live_beside_each_other(segment):
    centers = [SharedCenter.open_or_create(segment, f"center-{i}", adapt(some(i)), rank=0)[0] for i in range(2)]
    assert [center.read(0)[0] for center in centers] == [0, 1]
    exchange(centers[0], some(8))
    assert [center.read(0)[0] for center in centers] == [4, 1]
    for center in centers:
        center.close()


# Locks


def test_wait_for_a_lock_ends_and_names_the_parameter_and_its_holder(opened, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0.05)
    params = some()
    first, second = opened(params, 0), opened(some(), 3)
    seen = []

    class Holding(Rule):
        def exchange(self, x, c, state, moment):
            if x.size == 3:  # worker 3 holds "b", and does not go on
                with pytest.raises(WaitedTooLong, match=r"\d\.\d s for the lock of parameter 'b'.*worker 3") as caught:
                    first.push(adapt(params))
                seen.append(caught.value)
            return

    exchange(second, some(), Holding())
    assert len(seen) == 1
    assert first.versions == [4, 2]  # what was free was written in the meantime
    assert exchange(first, params).torn == []


def test_parameters_that_others_hold_come_later_and_none_twice(opened):
    params = some()
    first, second = opened(params, 0), opened(some(), 1)
    release = threading.Timer(0.05, lambda: second._locks.give(0))
    assert second._locks.take(0)
    order: list[int] = []

    class Watching(Rule):
        def exchange(self, x, c, state, moment):
            if not order:
                release.start()
            order.append(x.size)
            return

    exchange(first, params, Watching())
    release.join()
    assert order == [3, 6]


def test_exchange_continues_after_this_process_was_stopped_while_it_waited(opened):
    params = some()
    first, second = opened(params, 0), opened(some(), 1)
    assert second._locks.take(0)

    class StoppedFor70s(SimulatedClock):
        """Stopped for longer than the lock's timeout; the other worker releases the lock meanwhile."""

        checks = 0

        def on_look(self) -> None:
            self.checks += 1
            self.now += 70.0 if self.checks == 10 else 0.0

        def on_sleep(self) -> None:
            if self.now > 70:
                second._locks.give(0)

    with clock.replaced(StoppedFor70s()):
        exchange(first, params, EASGD(0.5))
    assert first.versions == [2, 2]


def test_reading_a_parameter_waits_for_its_writer_unless_that_is_stopped(opened, monkeypatch):
    first, second = opened(some(1), 0), opened(some(), 1)
    assert second._locks.take(1)
    calls: list[float] = []
    release = threading.Timer(0.05, lambda: (second.array(1).fill(2), second._locks.give(1)))
    release.start()
    assert (first.read(1, lambda: calls.append(first.array(1)[0])) == 2).all()
    release.join()
    assert calls == [2.0]
    monkeypatch.setattr("maniple.center.shared.STUCK_S", 0.05)
    assert second._locks.take(1)
    second.begin_write(1)
    second.array(1)[0] = 3  # and is stopped here
    assert first.read(1).tolist() == [3, 2, 2]
    with pytest.raises(WaitedTooLong, match="'b'"):
        monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0.05)
        first.push(adapt(some()))  # a write as a whole needs the lock


def test_copy_of_a_stuck_chunk_is_made_again_if_its_holder_goes_on_meanwhile(opened, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.STUCK_S", 0.02)
    first, second = opened(some(1), 0), opened(some(), 1)
    assert second._locks.take(1)
    second.begin_write(1)
    calls: list[bool] = []

    def copy() -> np.ndarray:
        calls.append(first._locks.is_taken(1))
        value = first.array(1).copy()
        if len(calls) == 1:  # it wakes up now
            second.array(1)[:] = 5
            second.end_write(1)
            second._locks.give(1)
        return value

    assert first.read_locked(1, copy).tolist() == [5, 5, 5]
    assert calls == [True, False]


# Runs of chunks, of models whose parameters are in one flat vector


@pytest.fixture
def flat(opened):
    """Two centers of a torch model with eight parameters, each a chunk, and a model at 1; the center is at 0."""
    torch = pytest.importorskip("torch")

    def model(fill: float):
        return torch.nn.ParameterList([torch.full((4,), fill) for _ in range(8)])

    return opened(model(0.0), 0), opened(model(0.0), 1), adapt(model(1.0))


def vector_of(model) -> np.ndarray:
    return model.flat_vectors()[0]["float32"]


def test_chunks_that_follow_each_other_are_written_by_one_call(flat):
    center, _, model = flat
    sizes: list[int] = []

    class Looking(EASGD):
        def exchange(self, x, c, state, moment):
            sizes.append(x.size)
            assert center.versions == [1] * 8
            return super().exchange(x, c, state, moment)

        def operation(self, moment):
            return super().operation(moment)

    outcome = center.exchange(model, Looking(0.5), None, ExchangeInfo())
    assert sizes == [32]
    assert center.versions == [2] * 8
    assert not outcome.refused and not outcome.torn and not outcome.locked
    assert all((center.read(k) == 0.5).all() for k in range(8))
    assert (vector_of(model) == 0.5).all()


def test_chunk_of_a_run_that_another_holds_is_left_out_alone(flat, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.STUCK_S", 0.02)
    center, other, model = flat
    assert other._locks.take(3)
    assert center.exchange(model, EASGD(0.5), None, ExchangeInfo()).locked == ["3"]
    assert center.versions == [2, 2, 2, 0, 2, 2, 2, 2]
    other._locks.give(3)
    assert center.exchange(model, EASGD(0.5), None, ExchangeInfo()).locked == []
    assert [center.read(k)[0] for k in range(8)] == [0.5] * 8
    assert not other._locks.is_taken(0) and not other._locks.is_taken(7)  # nothing stays locked


def test_refused_values_of_a_run_are_named(flat):
    center, _, model = flat
    vector_of(model)[4 * 2 + 1] = np.nan
    vector_of(model)[4 * 7 + 3] = np.inf
    outcome = center.exchange(model, EASGD(0.5), None, ExchangeInfo())
    assert outcome.refused == ["2", "7"]
    assert center.read(2).tolist() == [0.5, 0, 0.5, 0.5]
    assert vector_of(model)[28:].tolist() == [0.5, 0.5, 0.5, 0]


def test_staleness_is_that_of_each_chunk_also_where_they_differ(flat):
    center, other, model = flat
    other.exchange(model, EASGD(0.5), None, ExchangeInfo())
    seen: dict[int, int] = {}

    class Looking(EASGD):
        def exchange(self, x, c, state, moment):
            seen[x.size] = moment.staleness
            return super().exchange(x, c, state, moment)

        def operation(self, moment):
            return super().operation(moment)

    assert center.exchange(model, Looking(0.5), None, ExchangeInfo()).staleness == 1
    assert seen == {32: 1}
    other.begin_write(0)
    other.end_write(0)
    assert center.exchange(model, Looking(0.5), None, ExchangeInfo()).staleness == 1 / 8
    assert seen == {32: 1, 4: 0}  # the last of the chunks was visited alone


def test_run_whose_writer_was_killed_is_reported_as_torn_once(flat):
    center, other, model = flat
    other.begin_write(4)
    assert center.exchange(model, EASGD(0.5), None, ExchangeInfo()).torn == ["4"]
    assert center.exchange(model, EASGD(0.5), None, ExchangeInfo()).torn == []


def test_only_the_first_waits_for_a_lock_whose_holder_is_stopped(opened):
    params = some()
    first, second, third = opened(params, 0), opened(some(), 1), opened(some(), 2)
    assert third._locks.take(0)
    time = SimulatedClock()
    with clock.replaced(time):
        assert exchange(first, params, EASGD(0.5)).locked == ["w"]
        waited = time.now
        assert 0.5 < waited < 0.6
        for _ in range(3):
            assert exchange(first, params, EASGD(0.5)).locked == ["w"]
            assert exchange(second, params, EASGD(0.5)).locked == ["w"]
            assert second.pull(adapt(some())).torn == []  # it has not begun to write
        assert time.now == waited
        third._locks.give(0)
        assert exchange(first, params, EASGD(0.5)).locked == []
        assert third._locks.take(0)
        assert exchange(second, params, EASGD(0.5)).locked == ["w"]
        assert time.now > waited + 0.5  # it may have been another holder: it is waited for again


def test_without_locks_nobody_waits(opened, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0.05)
    params = some(4)
    free, other = opened(params, 0, lock=False), opened(some(), 1)
    assert other._locks.take(0)
    params["w"] += 4
    outcome = exchange(free, params)
    assert (outcome.refused, outcome.torn) == ([], [])
    np.testing.assert_array_equal(params["w"], 6)
    other._locks.give(0)
    assert (free.read(0) == 6).all()


def test_without_locks_a_non_finite_contribution_is_refused_too(opened):
    params = some(4)
    free = opened(params, 0, lock=False)
    params["b"][0] = np.nan
    assert exchange(free, params).refused == ["b"]
    assert (free.read(1) == 4).all()


# Real processes

CREATOR = """
import sys, time
from pathlib import Path
import numpy as np
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
path, rank = Path(sys.argv[1]), int(sys.argv[2])
params = {f"p{i}": np.full(20_000, float(rank)) for i in range(20)}
model, segment = adapt(params), Segment(path)
print("ready", flush=True)
sys.stdin.readline()
center, is_creator = SharedCenter.open_or_create(segment, "center-0", model, rank=rank)
center.pull(model)
values = {float(v) for p in params.values() for v in (p.min(), p.max())}
print(is_creator, *values, flush=True)
"""

HOLDER = """
import os, sys, time
from pathlib import Path
import numpy as np
from maniple import Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.snapshot import write_snapshot
from maniple.contracts import ExchangeInfo

class Holding(Rule):
    def exchange(self, x, c, state, moment):
        c[:1] = 77.0
        print("holding", flush=True)
        time.sleep(60)

segment = Segment(Path(sys.argv[1]))
model = adapt({"w": np.zeros((2, 3)), "b": np.zeros(3)})
center, _ = SharedCenter.open_or_create(segment, "center-0", model, rank=1)
ends = os.pipe()
child = os.fork()
if child == 0:
    os.write(ends[1], b".")
    time.sleep(60)
    os._exit(0)
os.read(ends[0], 1)  # the child has begun, and so let go of its parent's locks
print(child, flush=True)
center.exchange(model, Holding(), None, ExchangeInfo())
"""


def script(text: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.process
def test_of_four_simultaneous_creators_one_wins_and_all_get_its_values(segment):
    processes = [script(CREATOR, segment.path, rank) for rank in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    creators = [rank for rank, answer in enumerate(answers) if answer[0] == "True"]
    assert len(creators) == 1
    assert [answer[1:] for answer in answers] == [[str(float(creators[0]))]] * 4


@pytest.mark.process
def test_worker_killed_in_the_middle_of_a_parameter_frees_it_and_is_noticed(segment, opened, monkeypatch):
    params = some(1)
    center = opened(params)
    process = script(HOLDER, segment.path)
    child = 0
    try:
        child = int(process.stdout.readline())  # a data loader's process, which outlives its parent
        assert process.stdout.readline() == "holding\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0)  # nothing is waited for
        outcome = center.pull(adapt(params))
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()
    # Rank 1 of one live worker begins with "w": each element is old or new, and that is reported once.
    assert outcome.torn == ["w"]
    np.testing.assert_array_equal(params["w"].reshape(-1), [77, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(params["b"], 1)
    assert center.pull(adapt(params)).torn == []


def test_downpour_counts_every_change_through_another_s_view(opened):
    params = some()
    center, host = opened(params, 0), opened(some(), 1)
    state = [{"center": np.zeros(6)}, {"center": np.zeros(3)}]
    for _ in range(5):
        params["w"] += 1
        center.exchange(adapt(params), Downpour(), state, ExchangeInfo())
    assert (host.read(0) == 5).all()


def test_version_of_a_run_is_even_in_the_end_when_another_worker_writes_without_locks(opened):
    torch = pytest.importorskip("torch")
    first, second = (opened(torch.nn.ParameterList([torch.zeros(4)] * 1), rank, lock=False) for rank in (0, 1))

    class Interrupted(EASGD):
        def exchange(self, x, c, state, moment):
            if first.versions == [1]:  # the other worker begins in the middle of this exchange, and ends before it
                second.exchange(adapt(torch.nn.ParameterList([torch.ones(4)])), EASGD(0.5), None, ExchangeInfo())
            return super().exchange(x, c, state, moment)

        def operation(self, moment):
            return super().operation(moment)

    first.exchange(adapt(torch.nn.ParameterList([torch.ones(4)])), Interrupted(0.5), None, ExchangeInfo())
    assert first.versions[0] % 2 == 0
