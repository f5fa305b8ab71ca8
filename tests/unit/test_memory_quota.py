"""The memory quota of a run: how much remote workers and clients may take, and the error beyond it."""

import os
from pathlib import Path

import pytest

from maniple.center import memory_quota
from maniple.center.memory_quota import MemoryQuota
from maniple.errors import SharedMemoryFull

PAGE = 4096


def reserve(path: Path, size: int) -> None:
    """A file whose blocks are allocated at once, as in shared memory."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_memory_is_granted_up_to_the_limit(tmp_path):
    reserve(tmp_path / "center", 6_000_000)
    quota = MemoryQuota(tmp_path, 10_000_000)
    quota.take(3_900_000)
    with pytest.raises(SharedMemoryFull, match=r"for 4\.5 MB more: .* holds 6\.0 MB of the 10\.0 MB.*--max-memory"):
        quota.take(4_500_000)
    quota.take(0)


def test_files_of_subfolders_count_and_removed_ones_do_not(tmp_path):
    (tmp_path / "feed-a").mkdir()
    reserve(tmp_path / "feed-a" / "slot-0", 8 * PAGE)
    quota = MemoryQuota(tmp_path, 10 * PAGE)
    with pytest.raises(SharedMemoryFull):
        quota.take(3 * PAGE)
    (tmp_path / "feed-a" / "slot-0").unlink()
    quota.take(3 * PAGE)


def test_the_number_of_files_is_limited_too(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_quota, "MAX_FILES", 3)
    for name in "abc":
        (tmp_path / name).touch()
    quota = MemoryQuota(tmp_path, 10 * PAGE)
    with pytest.raises(SharedMemoryFull, match=r"it has 3 files \(limit 3\)\. Put several values into one array"):
        quota.take(0, files=1)
    quota.take(PAGE)  # a file that grows is no new one


def test_without_a_limit_most_of_the_free_memory_is_granted(tmp_path):
    quota = MemoryQuota(tmp_path)
    quota.take(PAGE)
    with pytest.raises(SharedMemoryFull):
        quota.take(2 * quota.limit_bytes)
