"""Where the host of a run is, and the command that continues one whose host has ended or died."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from maniple.connection.find_host import find_host, locate_host, locate_to_watch, resume_command
from maniple.errors import InvalidArgument
from maniple.record import RunFolder
from maniple.record.folder import SUBMITTED
from maniple.wire.address import HOST_FILE, Address, HostFile

LINEAGE = "0123456789abcdef"


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("MANIPLE_SHM", str(tmp_path / "shm"))
    return RunFolder.create(tmp_path / "runs", "run")


def host_file(path: Path, *, node: str, **values: object) -> HostFile:
    """The file of a host at which nobody answers."""
    about = {"host": "127.0.0.1", "port": 1, "address": "127.0.0.1:1", "certificate": None, "key": None, "unix": None}
    host = HostFile(**about | {"lineage": LINEAGE, "pid": 7} | values, node=node)
    path.write_bytes(msgspec.json.encode(host))
    return host


def test_a_run_that_has_ended_says_how(run):
    run.describe(lineage=LINEAGE, exit_code=4)
    status = find_host(run.path)
    assert (status.description, status.has_ended, status.is_alive) == ("has ended with exit code 4", True, False)


def test_a_run_that_was_only_described_has_not_started(run):
    run.describe(asked={})
    assert find_host(run.path).description == "has not started yet"


def test_a_dead_host_of_this_machine_is_dead_and_the_command_that_continues_it_is_given(run):
    run.describe(lineage=LINEAGE, node=os.uname().nodename, asked={"script": "train.py"})
    status = find_host(run.path)
    assert status.is_dead and not status.is_alive
    assert f"To continue: maniple run --resume {run.path}" in status.description


def test_a_host_elsewhere_that_does_not_listen_is_assumed_to_be_alive_until_it_has_ended(run):
    run.describe(lineage=LINEAGE, node="elsewhere")
    status = find_host(run.path)
    assert status.is_alive and status.is_assumed and "on elsewhere" in status.description
    run.describe(lineage=LINEAGE, node="elsewhere", ended=1.0)
    assert find_host(run.path).has_ended


def test_a_host_elsewhere_that_does_not_answer_is_not_called_dead(run):
    run.describe(lineage=LINEAGE, node="elsewhere")
    host_file(run.path / HOST_FILE, node="elsewhere")
    status = find_host(run.path)
    assert not status.is_alive and not status.is_dead and "does not answer: it was on elsewhere" in status.description


def test_a_host_that_answers_is_alive(run):
    run.describe(lineage=LINEAGE, node="elsewhere")
    with Address().listen() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        host_file(run.path / HOST_FILE, node="elsewhere", address=address)
        status = find_host(run.path)
    assert status.is_alive and not status.is_assumed
    assert status.description == f"is alive on elsewhere (pid 7), listening on {address}"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"is no run folder: it has no run\.json"):
        find_host(tmp_path)


@pytest.mark.parametrize(
    ("asked", "submitted", "command"),
    [
        ({"script": "train.py"}, None, "maniple run --resume {}"),
        ({"model": "net.py:Net"}, None, "maniple run --resume {}"),
        ({}, None, "maniple serve --resume {}"),
        ({"launcher": "torchrun"}, None, "MANIPLE_RESUME={} in the environment of torchrun"),
        (
            {"script": "net.py", "model": "net.py:Net", "ray": {"cpus": 1}, "workers": 1},
            None,
            "maniple submit --ray -n 1 --resume {} --model net.py:Net",
        ),
        (
            {"script": "train.py", "args": ["--lr", "a b"], "workers": 4},
            b'{"queue": "slurm"}',
            "maniple submit --slurm -n 4 --resume {} train.py --lr 'a b'",
        ),
        (
            {"script": "train.py", "workers": 4},
            b"damaged",
            "maniple submit --QUEUE -n 4 --resume {} train.py",
        ),
    ],
)
def test_a_run_is_continued_by_the_command_that_started_it(run, asked, submitted, command):
    run.describe(asked=asked)
    if submitted is not None:
        (run.path / SUBMITTED).write_bytes(submitted)
    assert resume_command(run.path) == command.format(run.path)


def test_a_worker_joins_by_an_address_or_by_the_folder_of_a_run(run, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    environment = locate_host("node-07:29400", tmp_path / "token", None)
    assert (environment.address, environment.token) == ("node-07:29400", "secret")
    with pytest.raises(InvalidArgument, match=r"host\.json cannot be read: No such file.*Give HOST:PORT"):
        locate_host(str(run.path), None, None)
    host_file(run.path / HOST_FILE, node="elsewhere", certificate="/a/certificate")
    (run.path / "token").write_text("of the run\n")
    environment = locate_host(str(run.path), None, None)
    assert (environment.address, environment.token) == ("127.0.0.1:1", "of the run")
    assert environment.certificate == Path("/a/certificate")
    (run.path / HOST_FILE).write_text("{}")
    with pytest.raises(InvalidArgument, match="is not the file of a host"):
        locate_host(str(run.path), None, None)


def test_a_run_that_cannot_be_watched_says_why(run):
    run.describe(lineage=LINEAGE, node="elsewhere")
    with pytest.raises(InvalidArgument, match=r"it is or was on elsewhere, and accepts no connections.*--listen"):
        locate_to_watch(str(run.path))
    run.describe(lineage=LINEAGE, exit_code=0)
    with pytest.raises(InvalidArgument, match=r"has ended with exit code 0.*--resume"):
        locate_to_watch(str(run.path))
    shutil.rmtree(run.path)
    with pytest.raises(InvalidArgument, match="is not an address"):
        locate_to_watch(str(run.path))
