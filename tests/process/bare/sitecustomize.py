"""Read by every interpreter that has this folder in PYTHONPATH: it finds no numba, as without the extra `fast`."""

import sys

sys.modules["numba"] = None  # type: ignore[assignment] - so that it counts as not installed
