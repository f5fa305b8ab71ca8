"""Files in shared memory: reserve them, map them, and open only those that belong to this user.

Every mapping goes through `map_file`. Not `multiprocessing.shared_memory`: its resource tracker (Python 3.11) removes
files that other processes still use. A mapping ends with the last array that points into it. To remove a file, unlink
it: processes that have mapped it keep their mapping.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

from maniple.errors import InvalidArgument, SharedMemoryFull


def map_file(path: Path, size: int = 0, *, what: str = "a table of the run", is_new: bool = False) -> mmap.mmap:
    """Map a whole file. With `size`, create it where it is missing and reserve `size` bytes; its content stays.

    Args:
        what: what the memory is for, in the error.
        is_new: the file must not exist yet (FileExistsError), and is removed again if there is no room for it.

    Raises:
        SharedMemoryFull: the file cannot be created or reserved.
        FileNotFoundError: there is no such file, and no `size` to create it with.
    """
    flags = os.O_RDWR | (os.O_CREAT if size else 0) | (os.O_EXCL if is_new else 0)
    try:
        file = open_owned(path, flags)
    except FileExistsError:
        raise
    except OSError as error:
        if size:
            raise shared_memory_full(path.parent, error) from error
        raise
    try:
        if size:
            reserve(file, size, path.parent, what)
        return mmap.mmap(file, 0)
    except SharedMemoryFull:
        if is_new:
            path.unlink()
        raise
    finally:
        os.close(file)


def reserve(file: int, size: int, folder: Path, what: str) -> None:
    """Reserve the first `size` bytes of an open file; what is there stays.

    Writing to pages that were not reserved kills the process with SIGBUS when the memory is full; reserving them first
    makes that a SharedMemoryFull.
    """
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.ftruncate(file, before)
        raise shared_memory_full(folder, error, f"{what} needs {_megabytes(size)}") from error


def shared_memory_full(folder: Path, error: OSError, need: str = "") -> SharedMemoryFull:
    """The error for a folder in memory that grants no room; `need` says for what, and how much."""
    if need:
        space = os.statvfs(folder)
        need = f"{need}, and {_megabytes(space.f_bavail * space.f_frsize)} are free: "
    return SharedMemoryFull(
        f"{folder} refuses the run's shared memory: {need}{error.strerror}. Enlarge it (`mount -o remount,size=8G "
        "/dev/shm`; in a container `--shm-size=8g`), remove what fills it, or set MANIPLE_SHM to another folder that "
        "is held in memory."
    )


def open_owned(path: Path, flags: int) -> int:
    """Open a regular file that belongs to this user.

    The opened file is checked, not the name before it is opened: no process can exchange the file in between.

    Raises:
        InvalidArgument: it is a link or another kind of file, or belongs to another user.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, or a socket or pipe
            raise InvalidArgument(f"{path} is no file of maniple's, but a link or a socket. Remove it.") from None
        raise
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
        return file
    os.close(file)
    raise InvalidArgument(
        f"{path} belongs to user {about.st_uid} or is no regular file, and this process runs as user {os.getuid()}, so "
        "it is not used. Let its owner remove it, or set MANIPLE_SHM to another folder."
    )


def read_owned(path: Path) -> bytes:
    """The content of a regular file that belongs to this user."""
    with os.fdopen(open_owned(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
