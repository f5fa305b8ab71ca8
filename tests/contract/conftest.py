"""The memory that the circles under test lie in."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from maniple.center import Segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ.get("MANIPLE_SHM", "/dev/shm")), secrets.token_hex(8), Path("/tmp"))
    yield segment
    segment.remove()
