"""What every test must hold to: no child process and no shared memory left behind."""

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = Path("/dev/shm")
# The tests start over a thousand interpreters: where nothing may be kept, each would compile all of maniple again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell's background jobs ignore SIGINT, and all that the tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests with bounds in seconds, or that keep both cores busy by themselves.
TIMED = (
    "tests/cluster/",  # rates of links, how long a worker may be silent; one cluster is enough at a time
    "tests/process/test_chaos.py",  # how soon all exchange again after a death
    "tests/process/test_many_workers.py",  # 200 workers that join in 10 s, answers in 0.1 s
    "tests/process/test_killed_workers.py",  # 8 workers, one killed each second
    "tests/process/test_fuzz.py",  # three attackers at once
    "tests/process/test_watch_web.py",  # how soon a death is seen
    "tests/process/test_bsp.py::test_killed_worker_is_left_behind_and_comes_back",
    "tests/process/test_failures.py::test_ctrl_c_ends_all_and_saves_the_center",
    "tests/process/test_failures.py::test_ctrl_c_ends_also_workers_that_do_not_listen",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/soak takes many minutes, and is collected only if it is named: `make soak`."""
    is_soak = collection_path == Path(__file__).parent / "soak"
    return True if is_soak and not any("soak" in arg for arg in config.args) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `make test`, which runs two tests at a time: the tests of a file come after one another in one process.

    So fixtures of a file are made once. Timed tests come after one another too, from whichever files: such a test has
    one ordinary test beside it, and never one of its own kind.
    """
    from xdist.scheduler import LoadFileScheduling

    # Not marks `xdist_group`: those of pytest-xdist 3.8 have no effect with pytest 9.2, whose ids of tests are fixed.
    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "timed" if nodeid.startswith(TIMED) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # files as they are listed: unit tests, the shortest, fill up the end
    return Files(config, log)


@contextmanager
def own_memory(mark: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shared memory that no other test and no other run on the machine uses, and that must be empty at the end."""
    memory = SHARED_MEMORY / f"test-{mark}"
    memory.mkdir()
    patch.setenv("MANIPLE_SHM", str(memory))
    settings = memory.with_name(f"{memory.name}-settings")  # not those of who runs the tests; some libraries make it
    patch.setenv("XDG_CONFIG_HOME", str(settings))
    yield
    shutil.rmtree(settings, ignore_errors=True)
    segments = list(memory.iterdir())
    shutil.rmtree(memory)
    assert not segments, f"shared memory left behind: {segments}"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_by_fixtures() -> Iterator[None]:
    """As below, for what outlives a test because several share it."""
    with pytest.MonkeyPatch.context() as patch, own_memory(uuid.uuid4().hex, patch):
        yield


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
    monkeypatch.setenv("MANIPLE_TEST", mark)
    with own_memory(mark, monkeypatch):
        yield
        deadline = time.monotonic() + 5  # what was killed may take a moment to be gone
        while (left := _marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"processes left behind: {left}"


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as on a machine without the extra `fast`, for tests where it makes no difference how updates are computed.

    Results are the same to the bit, and each worker begins with a second less of work, with torch two and a half.
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
