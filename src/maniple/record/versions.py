"""Versions: what a run was made with."""

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in ("maniple", "numpy", "torch", "numba", "mpi4py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
