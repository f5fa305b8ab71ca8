"""What a system may refuse, made to happen."""

import contextlib
import resource
from pathlib import Path


@contextlib.contextmanager
def descriptor_limit(more: int):
    """This process may open so many files more than it has now."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 1 + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def file_limit(size_bytes: int):
    """No file of this process may grow beyond `size_bytes`: a full disk, as far as the writer sees."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
