"""What only the center in shared memory has: locks that die with their holder, torn writes, segments, snapshots."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple import EASGD, Downpour, Rule
from maniple.adapters import adapt
from maniple.center import ByteLocks, Segment, Shared, sweep
from maniple.center.segment import DEAD, LEFT, LIVE, NEVER, homeless
from maniple.center.snapshot import write_snapshot
from maniple.contracts import Moment
from maniple.errors import InvalidArgument, SharedMemoryFull, WaitedTooLong
from maniple.record import Folder

from ..limits import file_limit

LINEAGE = "0123456789abcdef"
SWEPT = 120  # seconds ago: older than anything that may be in the making


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, LINEAGE, tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def opened(segment):
    """Open the segment's center for a dict of arrays; closed at the end."""
    centers: list[Shared] = []

    def opened(params, rank: int = 0, *, lock: bool = True) -> Shared:
        center, _ = Shared.open_or_create(segment, "center-0", adapt(params), rank=rank, lock=lock)
        centers.append(center)
        return center

    yield opened
    for center in centers:
        center.close()


def some(fill: float = 0.0) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), fill, "float64"), "b": np.full(3, fill, "float64")}


def exchange(center: Shared, params, rule: Rule | None = None):
    return center.exchange(adapt(params), rule or EASGD(0.5), None, Moment())


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
        def exchange(self, x, c, memory, moment):
            seen.append(center.versions)
            return True

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
        second.exchange(model, EASGD(0.5), None, Moment())
    assert exchange(first, params).torn == []


def test_error_in_a_rule_gives_the_lock_back(opened, monkeypatch):
    class Broken(Rule):
        def mix(self, x, c, memory):
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
    size = whole._path.stat().st_size
    whole.close()
    (segment.path / "center-0").unlink()
    for left in (b"", bytes(size), bytes(4096)):  # before and after it was given its size, and less than that
        (segment.path / "center-0").write_bytes(left)
        params = some(4)
        center, is_creator = Shared.open_or_create(segment, "center-0", adapt(params), rank=1)
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
    assert Shared.open(segment, segment.path / "center-0") is None
    assert [path.name for path in segment.centers()] == ["center-0"]
    opened(some(1))
    center = Shared.open(segment, segment.path / "center-0")
    assert center is not None
    np.testing.assert_array_equal(center.read(0), np.full((2, 3), 1.0))
    center.close()


def test_center_that_does_not_fit_says_how_much_it_needs(segment, opened):
    with file_limit(1 << 20), pytest.raises(SharedMemoryFull, match=r"needs 8\.0 MB.*free.*MANIPLE_SHM"):
        opened({"w": np.zeros(1_000_000)})
    assert (opened({"w": np.ones(1_000_000)}, 1).read(0) == 1).all()  # once there is room, the next one makes it


def test_several_centers_live_beside_each_other(segment):
    centers = [Shared.open_or_create(segment, f"center-{i}", adapt(some(i)), rank=0)[0] for i in range(2)]
    assert [center.read(0)[0, 0] for center in centers] == [0, 1]
    exchange(centers[0], some(8))
    assert [center.read(0)[0, 0] for center in centers] == [4, 1]
    for center in centers:
        center.close()


# Locks


def test_wait_for_a_lock_ends_and_names_the_parameter_and_its_holder(opened, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0.05)
    params = some()
    first, second = opened(params, 0), opened(some(), 3)
    seen = []

    class Holding(Rule):
        def exchange(self, x, c, memory, moment):
            if x.size == 3:  # worker 3 holds "b", and does not go on
                with pytest.raises(WaitedTooLong, match=r"\d\.\d s for the lock of parameter 'b'.*worker 3") as caught:
                    exchange(first, params)
                seen.append(caught.value)
            return True

    exchange(second, some(), Holding())
    assert len(seen) == 1
    assert first.versions == [4, 2]  # what was free was exchanged in the meantime
    assert exchange(first, params).torn == []


def test_parameters_that_others_hold_come_later_and_none_twice(opened):
    params = some()
    first, second = opened(params, 0), opened(some(), 1)
    release = threading.Timer(0.05, lambda: second._locks.give(0))
    assert second._locks.take(0)
    order: list[int] = []

    class Watching(Rule):
        def exchange(self, x, c, memory, moment):
            if not order:
                release.start()
            order.append(x.size)
            return True

    exchange(first, params, Watching())
    release.join()
    assert order == [3, 6]


def test_reading_a_parameter_waits_for_its_writer(opened, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.LOCK_TIMEOUT_S", 0.05)
    first, second = opened(some(), 0), opened(some(), 1)
    assert second._locks.take(1)
    with pytest.raises(WaitedTooLong, match="'b'"):
        first.read(1)
    second._locks.give(1)
    assert first.read(1).shape == (3,)


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


def test_two_holders_of_one_byte_exclude_each_other_and_other_bytes_are_free(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert first.take(5)
    assert not second.take(5)
    assert second.take(6)
    first.give(5)
    assert second.take(5)
    first.close()
    second.close()
    second.close()


def test_hold_gives_back_after_an_error_and_says_what_it_waited_for(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    with pytest.raises(KeyError), first.hold(0, timeout_s=1, what="the lock"):
        with (
            pytest.raises(WaitedTooLong, match=r"the other \(limit 0\.02 s\)"),
            second.hold(0, timeout_s=0.02, what="the other"),
        ):
            pytest.fail("two in one lock")
        raise KeyError
    with second.hold(0, timeout_s=0.02, what="the other"):
        pass
    first.close()
    second.close()


def test_lock_that_is_closed_is_free(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    first.take(0)
    first.close()
    assert second.take(0)
    second.close()


def test_forked_child_does_not_keep_its_parent_s_lock(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert first.take(0)
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ends[0], 1)  # lives on, as a data loader's worker does
        os._exit(0)
    try:
        time.sleep(0.05)
        assert not second.take(0)  # the child's letting go does not unlock the parent's lock
        first.close()  # as the parent's death would
        deadline = time.monotonic() + 60
        while not (taken := second.take(0)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert taken
    finally:
        os.write(ends[1], b".")
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)
        second.close()


# Real processes

CREATOR = """
import sys, time
from pathlib import Path
import numpy as np
from maniple.adapters import adapt
from maniple.center import Segment, Shared
path, rank = Path(sys.argv[1]), int(sys.argv[2])
params = {f"p{i}": np.full(20_000, float(rank)) for i in range(20)}
model, segment = adapt(params), Segment(path)
print("ready", flush=True)
sys.stdin.readline()
center, is_creator = Shared.open_or_create(segment, "center-0", model, rank=rank)
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
from maniple.center import Segment, Shared
from maniple.center.snapshot import write_snapshot
from maniple.contracts import Moment

class Holding(Rule):
    def exchange(self, x, c, memory, moment):
        c[:1] = 77.0
        print("holding", flush=True)
        time.sleep(60)

segment = Segment(Path(sys.argv[1]))
model = adapt({"w": np.zeros((2, 3)), "b": np.zeros(3)})
center, _ = Shared.open_or_create(segment, "center-0", model, rank=1)
ends = os.pipe()
child = os.fork()
if child == 0:
    os.write(ends[1], b".")
    time.sleep(60)
    os._exit(0)
os.read(ends[0], 1)  # the child has begun, and so let go of its parent's locks
print(child, flush=True)
center.exchange(model, Holding(), None, Moment())
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
    # Rank 1 of one live worker begins with "w": each element is old or new, and that is told once.
    assert outcome.torn == ["w"]
    np.testing.assert_array_equal(params["w"].reshape(-1), [77, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(params["b"], 1)
    assert center.pull(adapt(params)).torn == []


# Segments


def test_segment_is_found_by_its_path_and_gone_after_its_removal(tmp_path):
    segment = Segment.create(tmp_path, LINEAGE, tmp_path)
    assert segment.path == tmp_path / f"maniple-{LINEAGE}"
    assert oct(segment.path.stat().st_mode)[-3:] == "700"
    worker = Segment(segment.path)
    worker.close()
    segment.remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgument, match="gone: its host has ended"):
        Segment(segment.path)


def test_states_of_workers_are_seen_by_all(segment):
    worker = Segment(segment.path)
    assert (worker.live, worker.state(0)) == (0, NEVER)
    for rank, state in enumerate((LIVE, LIVE, LEFT, DEAD)):
        worker.mark(rank, state)
    assert segment.live == 2
    assert [segment.state(rank) for rank in range(5)] == [LIVE, LIVE, LEFT, DEAD, NEVER]
    worker.close()


def test_folder_that_refuses_the_segment_is_named(tmp_path):
    with pytest.raises(SharedMemoryFull, match=r"nowhere.*No such file"):
        Segment.create(tmp_path / "nowhere", LINEAGE, tmp_path)


def test_folder_without_room_is_left_clean(tmp_path):
    with file_limit(10), pytest.raises(SharedMemoryFull, match="MANIPLE_SHM"):
        Segment.create(tmp_path, LINEAGE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_segment_of_another_run_is_never_replaced(segment):
    with pytest.raises(InvalidArgument, match="going on"):
        Segment.create(segment.path.parent, LINEAGE, segment.path.parent)
    assert (segment.path / "members").exists()


def nothing(segment: Segment, run: Path) -> None:
    pytest.fail(f"{segment.path} should not be saved")


def begun(root: Path, lineage: str = LINEAGE) -> Path:
    """The folder of a run in `root`."""
    folder = root / f"run-{lineage}"
    folder.mkdir()
    Folder(folder).describe(lineage=lineage)
    return folder


def dead(root: Path, lineage: str = LINEAGE) -> Path:
    """A segment whose host was killed: its lock is free, its files are there."""
    segment = Segment.create(root, lineage, begun(root, lineage))
    segment.close()
    return segment.path


def dead_with_center(root: Path, run: Path) -> Path:
    """The same, with a center in it."""
    segment = Segment.create(root, LINEAGE, run)
    Shared.open_or_create(segment, "center-0", adapt(some(5)), rank=0)[0].close()
    segment.close()
    return segment.path


def test_segment_of_a_living_host_is_left_alone(segment):
    assert sweep(segment.path.parent, nothing) == []
    assert segment.path.exists()


def test_segment_of_a_dead_host_is_saved_and_removed(tmp_path):
    root, run = tmp_path / "shm", begun(tmp_path)
    root.mkdir()
    path = dead_with_center(root, run)

    def salvage(segment: Segment, folder: Path) -> None:
        write_snapshot(segment, folder, lineage=LINEAGE, restored=0, versions={})

    assert sweep(root, salvage) == [path]
    assert list(root.iterdir()) == []
    assert (load_file(run / "center-0.safetensors")["w"] == 5).all()
    assert sweep(root, nothing) == []


@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("run.json is damaged")], ids=repr)
def test_segment_that_cannot_be_saved_stays_and_does_not_stop_the_others(tmp_path, error):
    paths = [dead(tmp_path, f"{i:016x}") for i in range(3)]

    def salvage(segment: Segment, run: Path) -> None:
        if segment.path == paths[1]:
            raise error

    with pytest.warns(UserWarning, match="left where it is"):
        assert sorted(sweep(tmp_path, salvage)) == [paths[0], paths[2]]
    assert sweep(tmp_path, lambda segment, run: None) == [paths[1]]


def test_center_that_does_not_fit_the_disk_stays_in_memory(tmp_path):
    run = begun(tmp_path)
    segment = Segment.create(tmp_path, LINEAGE, run)
    center, _ = Shared.open_or_create(segment, "center-0", adapt({"w": np.ones(100_000)}), rank=0)
    center.close()
    segment.close()

    def salvage(segment: Segment, run: Path) -> None:
        with file_limit(1000):
            write_snapshot(segment, run, lineage=LINEAGE, restored=0, versions={})

    with pytest.warns(UserWarning, match="left where it is"):
        assert sweep(tmp_path, salvage) == []
    assert segment.path.exists()
    assert [path.name for path in run.iterdir()] == ["run.json"]


def test_segment_without_a_center_whose_run_folder_is_gone_is_removed(tmp_path):
    path = dead(tmp_path)
    shutil.rmtree(tmp_path / f"run-{LINEAGE}")
    assert sweep(tmp_path, nothing) == [path]


def saved_by_a_sweep(root: Path) -> list[Path]:
    """Where the next run saves what dead ones have left in `root`."""
    found: list[Path] = []
    sweep(root, lambda _, run: found.append(run))
    return found


@pytest.mark.parametrize("instead", [None, "a folder", "another run"])
def test_center_whose_run_folder_is_gone_stays_in_memory_until_it_is_back(tmp_path, instead):
    """An unmounted file system leaves nothing, or the empty folder it was mounted on; a new run may take the name."""
    root, run, away = tmp_path / "shm", begun(tmp_path), tmp_path / "elsewhere" / "run"
    root.mkdir()
    away.parent.mkdir()
    path = dead_with_center(root, run)
    run.rename(away)
    if instead is not None:
        run.mkdir()
    if instead == "another run":
        Folder(run).describe(lineage="f" * 16)
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"run folder {run} is gone.*--resume.*rm -r {path}"):
            assert saved_by_a_sweep(root) == []
        assert path.exists()
    assert homeless(path) == run
    shutil.rmtree(run, ignore_errors=True)
    away.rename(run)
    assert homeless(path) is None
    assert saved_by_a_sweep(root) == [run]
    assert not path.exists()


def test_center_of_a_run_whose_folder_was_renamed_is_saved_under_the_new_name(tmp_path):
    root, run = tmp_path / "shm", begun(tmp_path)
    root.mkdir()
    path = dead_with_center(root, run)
    (tmp_path / "last").symlink_to(run.name)
    run.rename(tmp_path / "renamed")
    assert saved_by_a_sweep(root) == [tmp_path / "renamed"]
    assert not path.exists()


@pytest.mark.parametrize("made", [[], ["host"]], ids=["no file yet", "host not written"])
def test_half_made_segment_is_removed_only_when_it_is_old(tmp_path, made):
    path = tmp_path / f"maniple-{LINEAGE}"
    path.mkdir(mode=0o700)
    for name in made:
        (path / name).touch()
    assert sweep(tmp_path, nothing) == []
    assert path.exists()
    old = time.time() - SWEPT
    os.utime(path, (old, old))
    assert sweep(tmp_path, nothing) == [path]
    assert not path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "members").unlink(),
        lambda path: (path / "members").write_bytes(b""),
        lambda path: (path / "host").write_bytes(b'{"pid": 1, "ru'),
        lambda path: (path / "host").write_bytes(b"{}"),
        lambda path: (path / "center-0").touch(),
    ],
    ids=["no members", "empty members", "host cut short", "host says nothing", "center not written"],
)
def test_damaged_segment_does_not_stop_later_runs(tmp_path, damage):
    path = dead(tmp_path)
    damage(path)
    other = dead(tmp_path, "f" * 16)

    def salvage(segment: Segment, run: Path) -> None:
        for center in segment.centers():
            assert Shared.open(segment, center) is None

    assert other in sweep(tmp_path, salvage)


def test_folders_and_files_of_the_user_s_own_are_never_removed(tmp_path):
    notes = tmp_path / "maniple-notes"
    notes.mkdir()
    (notes / "thesis.tex").write_text("precious")
    (tmp_path / "maniple-figure.png").write_text("precious")
    old = time.time() - SWEPT
    for path in (*tmp_path.iterdir(), notes / "thesis.tex"):
        os.utime(path, (old, old))
    assert sweep(tmp_path, nothing) == []
    assert (notes / "thesis.tex").read_text() == "precious"
    assert (tmp_path / "maniple-figure.png").exists()


def test_segments_of_other_users_are_left_alone(tmp_path, monkeypatch):
    path = dead(tmp_path)
    monkeypatch.setattr("maniple.center.segment.os.getuid", lambda: 12345)
    assert sweep(tmp_path, nothing) == []
    assert path.exists()


def test_folder_that_is_not_there_has_nothing_to_sweep(tmp_path):
    assert sweep(tmp_path / "nowhere", nothing) == []


def test_downpour_counts_every_change_through_another_s_view(opened):
    params = some()
    center, host = opened(params, 0), opened(some(), 1)
    memory = [np.zeros(6), np.zeros(3)]
    for _ in range(5):
        params["w"] += 1
        center.exchange(adapt(params), Downpour(), memory, Moment())
    assert (host.read(0) == 5).all()
