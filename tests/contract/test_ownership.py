"""Shared memory of another user is not used, whatever run folder names it."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from maniple.center import Segment, sweep
from maniple.cli import cli
from maniple.connection.find_host import find_host, locate_to_watch
from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.host.listener import _token
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import abandoned_segments, has_live_host, segment_path
from maniple.worker.external_launch import has_center
from tests.conftest import require

OTHER = 65534
LINEAGE = "0123456789abcdef"


def given_away(path: Path) -> None:
    """Make all of it another user's, as if that user had made it."""
    for one in [path, *path.rglob("*")]:
        os.lchown(one, OTHER, OTHER)


def foreign(path: Path) -> str:
    given_away(path)
    return "belongs to user 65534"


def opened(path: Path) -> str:
    path.chmod(0o777)
    return "mode 0777"


def linked(path: Path) -> str:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)
    return "is a link"


@pytest.fixture(params=[foreign, opened, linked], ids=["another-user", "open-mode", "link"])
def squatted(request, tmp_path, monkeypatch):
    """A run whose host was killed, and in place of whose memory there is what somebody else has put there."""
    require("root", os.geteuid() == 0 or request.param is not foreign, "giving files away needs root")
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setenv("MANIPLE_SHM", str(memory))
    host = Host.start(memory, tmp_path / "runs", "one", {"workers": 1})
    (host.segment.path / "token").write_text("stolen")
    (host.segment.path / "host.json").write_text(
        f'{{"host":"","port":1,"address":"127.0.0.1:1","unix":null,"certificate":null,"key":null,"lineage":"{LINEAGE}",'
        f'"node":"{os.uname().nodename}","pid":1,"segment":"{host.segment.path}"}}'
    )
    host.events.close()
    host.segment.close()
    reason = request.param(host.segment.path)
    return tmp_path / "runs" / "one", host.segment.path, reason


def test_it_is_not_adopted_by_a_run_that_goes_on(squatted, tmp_path):
    run, segment, reason = squatted
    before = sorted(path.name for path in segment.iterdir())
    for act in (Host.resume, Host.start_prepared):
        with pytest.raises(InvalidArgument, match=reason) as error:
            act(tmp_path / "shm", run, {})
        assert "MANIPLE_SHM" in str(error.value) and str(segment) in str(error.value)
    with pytest.raises(InvalidArgument, match=reason):
        Segment(segment)
    with pytest.raises(InvalidArgument, match=reason):
        Segment.create(segment.parent, segment.name.removeprefix("maniple-"), run)
    assert sorted(path.name for path in segment.iterdir()) == before


def test_it_is_not_watched_and_status_says_why(squatted):
    run, segment, reason = squatted
    with pytest.raises(InvalidArgument, match=reason):
        locate_to_watch(str(run))
    assert not has_live_host(segment)
    where = find_host(run)
    assert not where.is_alive and not where.is_dead and reason in where.description
    result = CliRunner().invoke(cli, ["status", str(run)])
    assert reason in result.output
    result = CliRunner().invoke(cli, ["change", str(run), "alpha=0.5"])
    assert result.exit_code != 0 and reason in str(result.exception) + result.output


def test_it_is_neither_swept_nor_counted_nor_taken_for_a_center(squatted):
    run, segment, _ = squatted
    (run / "host.json").write_bytes((segment / "host.json").read_bytes())
    saved = []
    assert sweep(segment.parent, lambda *about: saved.append(about)) == []
    assert not saved and (segment / "members").exists()
    assert abandoned_segments(segment.parent) == []
    assert not has_center(run)


def test_a_file_of_another_user_in_it_is_not_used(tmp_path):
    require("root", os.geteuid() == 0, "giving files away needs root")
    segment = Segment.create(tmp_path, LINEAGE, tmp_path)
    segment.close()
    os.chown(segment.path / "members", OTHER, OTHER)
    with pytest.raises(InvalidArgument, match="belongs to user 65534"):
        Segment(segment.path)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("secret")
    for name in ("lock", "token"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(InvalidArgument, match="is no file of maniple's"):
        ByteLocks(tmp_path / "lock")
    with pytest.raises(InvalidArgument, match="is no file of maniple's"):
        _token(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    with pytest.raises(InvalidArgument):
        ByteLocks(tmp_path / "dangling")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lineage", ["../../etc", "a/b", "", "x" * 100, "a\nb"])
def test_a_lineage_that_leads_elsewhere_is_refused(tmp_path, lineage):
    with pytest.raises(InvalidArgument, match="is no lineage"):
        segment_path(tmp_path, lineage)
