"""Files in shared memory: mapped, reserved before they are written, and never those of others."""

import os

import pytest

from maniple.errors import InvalidArgument, SharedMemoryFull
from maniple.memory.shm import map_file, open_owned, read_owned
from tests.limits import file_limit


def test_two_mappings_of_a_file_are_the_same_memory(tmp_path):
    first = map_file(tmp_path / "a", 100)
    second = map_file(tmp_path / "a")
    first[10:13] = b"abc"
    assert (len(second), second[10:13]) == (100, b"abc")


def test_a_file_grows_and_keeps_its_content(tmp_path):
    map_file(tmp_path / "a", 3)[:] = b"abc"
    assert map_file(tmp_path / "a", 5)[:] == b"abc\0\0"
    assert map_file(tmp_path / "a", 2)[:] == b"abc\0\0", "it never shrinks: others may have mapped it"


def test_a_mapping_outlives_its_file(tmp_path):
    memory = map_file(tmp_path / "a", 3)
    (tmp_path / "a").unlink()
    memory[:] = b"abc"
    assert memory[:] == b"abc"
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "a")


def test_a_new_file_replaces_none(tmp_path):
    map_file(tmp_path / "a", 3, is_new=True)
    with pytest.raises(FileExistsError):
        map_file(tmp_path / "a", 3, is_new=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_full_memory_is_an_error_that_says_what_was_needed_and_leaves_the_file_as_it_was(tmp_path, is_new):
    if not is_new:
        map_file(tmp_path / "a", 5)
    reason = r"a center needs 1\.0 MB, and [0-9,.]+ MB are free: File too large.*--shm-size=8g.*MANIPLE_SHM"
    with file_limit(1000), pytest.raises(SharedMemoryFull, match=reason):
        map_file(tmp_path / "a", 1_000_000, what="a center", is_new=is_new)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == ([] if is_new else [5])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SharedMemoryFull, match=r"nowhere refuses the run's shared memory: No such file"):
        map_file(tmp_path / "nowhere" / "a", 10)


def test_a_link_or_a_pipe_is_not_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises((InvalidArgument, IsADirectoryError)):
            open_owned(tmp_path / name, os.O_RDWR)
    assert read_owned(tmp_path / "file") == b"precious"


def test_a_file_of_another_user_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"theirs")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(InvalidArgument, match=f"belongs to user {owner} .* runs as user {owner + 1}.*MANIPLE_SHM"):
        read_owned(tmp_path / "file")
