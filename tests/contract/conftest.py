"""Shared memory for the collectives, and a host for the clients under test."""

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import maniple
from maniple.center import Segment

from ..serving import TOKEN, Serving


@pytest.fixture
def entry_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centers with one chunk per parameter, for tests about single chunks."""
    monkeypatch.setattr("maniple.center.shared.CHUNK_BYTES", 0)


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ.get("MANIPLE_SHM", "/dev/shm")), secrets.token_hex(8), Path("/tmp"))
    yield segment
    segment.remove()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    memory = Path(os.environ["MANIPLE_SHM"], "host")  # not on a disk, which is slower for the largest array
    host = Serving(memory)
    monkeypatch.setenv("MANIPLE_ADDRESS", str(host.address))
    monkeypatch.setenv("MANIPLE_TOKEN", TOKEN)
    yield host
    host.close()
    shutil.rmtree(memory)


@pytest.fixture
def client(host: Serving) -> Iterator[maniple.Client]:
    with maniple.Client(timeout_s=10) as client:
        yield client
