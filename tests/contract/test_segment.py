"""Segments of shared memory: found by their path, swept after a dead host, never those of others."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter, sweep
from maniple.center.snapshot import write_snapshot
from maniple.errors import InvalidArgument, SharedMemoryFull
from maniple.memory.segment import DEAD, LEFT, LIVE, NEVER, missing_run_folder
from maniple.record import RunFolder

from ..limits import file_limit

LINEAGE = "0123456789abcdef"
SWEPT = 120  # seconds ago: older than anything that may be in the making


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, LINEAGE, tmp_path)
    yield segment
    segment.remove()


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


def test_folder_without_space_is_left_clean(tmp_path):
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
    RunFolder(folder).describe(lineage=lineage)
    return folder


def dead(root: Path, lineage: str = LINEAGE) -> Path:
    """A segment whose host was killed: its lock is free, its files are there."""
    segment = Segment.create(root, lineage, begun(root, lineage))
    segment.close()
    return segment.path


def dead_with_center(root: Path, run: Path) -> Path:
    """The same, with a center in it."""
    segment = Segment.create(root, LINEAGE, run)
    params = {"w": np.full((2, 3), 5.0), "b": np.full(3, 5.0)}
    SharedCenter.open_or_create(segment, "center-0", adapt(params), rank=0)[0].close()
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
    center, _ = SharedCenter.open_or_create(segment, "center-0", adapt({"w": np.ones(100_000)}), rank=0)
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
        RunFolder(run).describe(lineage="f" * 16)
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"run folder {run} is gone.*--resume.*rm -r {path}"):
            assert saved_by_a_sweep(root) == []
        assert path.exists()
    assert missing_run_folder(path) == run
    shutil.rmtree(run, ignore_errors=True)
    away.rename(run)
    assert missing_run_folder(path) is None
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
            assert SharedCenter.open(segment, center) is None

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
    monkeypatch.setattr("maniple.memory.segment.os.getuid", lambda: 12345)
    assert sweep(tmp_path, nothing) == []
    assert path.exists()


def test_folder_that_is_not_there_has_nothing_to_sweep(tmp_path):
    assert sweep(tmp_path / "nowhere", nothing) == []
