"""What a system may refuse, made to happen."""

import contextlib
import resource


@contextlib.contextmanager
def file_limit(size_bytes: int):
    """No file of this process may grow beyond `size_bytes`: a full disk, as far as the writer sees."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
