"""What every test must hold to: no child process and no shared memory left behind."""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
# The tests start over a thousand interpreters: where nothing may be kept, each would compile all of maniple again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a process or a file in shared memory.

    Processes are known by a variable that all descendants inherit, so that those are found too whose
    parents are dead.
    """
    if "unit" in request.node.path.parts:  # they start nothing, and must be quick
        yield
        return
    mark = uuid.uuid4().hex
    memory = SHARED_MEMORY / f"test-{mark}"  # of this test's own: other runs on the machine do not matter
    memory.mkdir()
    monkeypatch.setenv("MANIPLE_TEST", mark)
    monkeypatch.setenv("MANIPLE_SHM", str(memory))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(memory.with_name("nowhere")))  # not the settings of who runs the tests
    yield
    deadline = time.monotonic() + 5  # what was killed may take a moment to be gone
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    segments = list(memory.iterdir())
    shutil.rmtree(memory)
    assert not segments, f"shared memory left behind: {segments}"


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as on a machine without the extra `fast`, for tests where it makes no difference how updates are computed.

    Results are the same to the bit, and each worker begins 0.7 s sooner.
    """
    paths = [str(Path(__file__).parent / "process" / "bare"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def require(engine: str, is_here: bool, reason: str) -> None:
    """Skip a test whose engine is missing; fail it where MANIPLE_REQUIRE lists that engine."""
    if not is_here:
        if engine in os.environ.get("MANIPLE_REQUIRE", "").split(","):
            pytest.fail(f"{engine} is required here: {reason}")
        pytest.skip(reason)


def _marked(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and f"MANIPLE_TEST={mark}".encode() in (process / "environ").read_bytes():
                    found.append(
                        f"{process.name} {(process / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                    )
            except OSError:
                continue
    return found
