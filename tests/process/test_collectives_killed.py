"""Members of collectives that die or hang: the others name them and end, and nothing is left."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.collectives_ranks import finish, start, sweep

pytestmark = pytest.mark.process
DEADLINE_S = 5.0  # that of the ranks


@pytest.fixture(autouse=True)
def swept(tmp_path: Path) -> Iterator[None]:
    """MPI cannot tidy up after a kill, so the tests do."""
    yield
    sweep(tmp_path)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_that_ends_is_named_by_the_others_at_once(tmp_path: Path, how: str):
    """Over torch, by its connections."""
    (first, said), (second, said_too), (dead, _) = finish(start("torch", 3, tmp_path, how))
    assert dead == (-signal.SIGKILL if how == "kill" else 1)
    assert (first, second) == (1, 1)
    for words in (said, said_too):
        assert "PeerLost: worker 2 has been lost" in words
        assert "an all_reduce" in words


def test_a_worker_that_hangs_is_named_after_the_deadline(tmp_path: Path):
    processes = start("torch", 3, tmp_path, "stop")
    try:
        ended = finish(processes[:2])
    finally:
        processes[2].kill()
        processes[2].communicate()
    for exit_code, words in ended:
        assert exit_code == 1
        assert "WaitedTooLong: worker 2 has not arrived within" in words
        assert f"limit {DEADLINE_S:g} s" in words


@pytest.mark.parametrize("engine", ["shared", "torch"])
def test_a_worker_that_hangs_is_named_after_the_limit_that_the_others_have_learned(tmp_path: Path, engine: str):
    """The default limit is 600 s."""
    processes = start(engine, 3, tmp_path, "stop, learned")
    try:
        ended = finish(processes[:2])
    finally:
        processes[2].kill()
        processes[2].communicate()
    for exit_code, words in ended:
        assert exit_code == 1
        assert "WaitedTooLong" in words
        assert "worker 2" in words
        assert "limit 3 s, learned from the last" in words
        assert "rounds: median" in words


def test_a_killed_worker_ends_all_that_mpi_has_started(tmp_path: Path):
    ((exit_code, words),) = finish(start("mpi", 3, tmp_path, "kill"))
    assert exit_code != 0
    assert "rank 2 goes" in words


def test_a_killed_worker_is_named_where_mpi_has_not_noticed(tmp_path: Path):
    """The launcher knows only a shell, which stays when its worker is killed."""
    stays = 'PATH=/bin:/usr/bin; "$@"; code=$?; [ $code = 137 ] && exec sleep 60; exit $code'
    ((exit_code, words),) = finish(start("mpi", 3, tmp_path, "kill", around=("sh", "-c", stays, "sh")))
    assert exit_code != 0
    assert "PeerLost worker 2 has been lost" in words


def test_a_worker_that_hangs_is_named_over_mpi(tmp_path: Path):
    """And nobody hangs in MPI's own end: those who have failed end, and the launcher ends the rest."""
    ((exit_code, words),) = finish(start("mpi", 3, tmp_path, "stop"))
    assert exit_code != 0
    assert "WaitedTooLong worker 2 has not arrived within" in words
