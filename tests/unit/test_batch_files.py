"""Prepared batches: the files of a folder, read in any order and in advance."""

from pathlib import Path

import numpy as np
import pytest

from maniple import BatchFiles
from maniple.errors import InvalidArgument
from maniple.feed.local_feed import WaitTimes
from maniple.record import Events, read_events
from maniple.sampler import Shard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve batches, whose names are not in the order of the alphabet, beside other files."""
    for i in range(12):
        np.savez(tmp_path / f"batch-{i}.npz", x=np.full((4, 2), i, np.uint8), y=np.arange(4) + i)
    (tmp_path / "README").touch()
    (tmp_path / "folder.npz").mkdir()
    return tmp_path


def test_files_are_in_the_order_of_their_numbers(folder: Path):
    files = BatchFiles(folder)
    assert len(files) == 12
    assert [batch["x"][0, 0] for batch in files.read()] == list(range(12))
    assert [batch["y"][0] for batch in files] == list(range(12))
    assert files[-1]["x"].dtype == np.uint8 and list(files[-1]) == ["x", "y"]
    assert [batch["y"][0] for batch in files[2:4]] == [2, 3]


def test_a_file_of_one_array_is_that_array(tmp_path: Path):
    for i in (10, 9):
        np.save(tmp_path / f"{i}.npy", np.full(3, i))
    assert [batch.tolist() for batch in BatchFiles(str(tmp_path)).read()] == [[9] * 3, [10] * 3]


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_numbers_are_taken_in_advance_by_that_many_and_all_are_read(folder: Path, ahead: int):
    taken = []

    def numbers():
        for index in (3, 1, 4, 1, 5, 9, 2, 6):
            taken.append(index)
            yield index

    read = BatchFiles(folder).read(numbers(), ahead=ahead)
    assert next(read)["y"][0] == 3
    assert len(taken) == min(8, 1 + ahead)
    assert [batch["y"][0] for batch in read] == [1, 4, 1, 5, 9, 2, 6]


def test_a_loop_that_is_left_early_ends_the_reader(folder: Path):
    for _ in BatchFiles(folder).read():
        break
    read = BatchFiles(folder).read(iter([0, 1]))
    next(read)
    read.close()
    assert list(read) == []


def test_a_sampler_divides_the_files_in_another_order_each_epoch(folder: Path):
    files = BatchFiles(folder)
    samplers = [Shard(len(files), rank=rank, world=2, seed=(0,)) for rank in (0, 1)]
    orders = [[[int(batch["y"][0]) for batch in files.read(each)] for each in samplers] for _ in range(2)]
    assert all(sorted(one + other) == list(range(12)) and len(one) == len(other) for one, other in orders)
    assert orders[0] != orders[1]


def test_the_time_lost_is_recorded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WaitTimes, "events", Events(tmp_path / "worker-0.jsonl"))
    assert len(list(BatchFiles(folder).read())) == 12
    rows = read_events(tmp_path / "worker-0.jsonl")
    assert {row["feed"] for row in rows} == {"files"} and sum(row["batches"] for row in rows) == 12


@pytest.mark.parametrize("content", [b"", b"PK\3\4 damaged", b"no array"])
def test_a_damaged_file_is_named(folder: Path, content: bytes):
    (folder / "batch-2.npz").write_bytes(content)
    read = BatchFiles(folder).read()
    next(read), next(read)
    with pytest.raises(InvalidArgument, match=r"batch-2\.npz cannot be read"):
        next(read)


def test_pickled_objects_are_refused(tmp_path: Path):
    np.save(tmp_path / "0.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InvalidArgument, match=r"0\.npy cannot be read: .*pickle"):
        BatchFiles(tmp_path)[0]


def test_a_folder_without_batches_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"has no \.npz or \.npy file"):
        BatchFiles(tmp_path)
    with pytest.raises(InvalidArgument, match="is no folder"):
        BatchFiles(tmp_path / "missing")


def test_a_number_of_batches_in_advance_must_be_sensible(folder: Path):
    with pytest.raises(InvalidArgument, match=r"ahead=0 is out of range \(1 to 256"):
        BatchFiles(folder).read(ahead=0)
