"""The command that starts a worker by ssh on another machine."""

import pytest

from maniple.errors import InvalidArgument
from maniple.launch.remote_workers import ssh_command


def test_ssh_asks_nothing_and_gives_up_in_time(tmp_path, monkeypatch):
    (tmp_path / "ssh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ssh_command("node-07", ["python", "a b.py"], connect_s=2.5)
    assert command[0] == str(tmp_path / "ssh") and command[-2:] == ["node-07", "exec python 'a b.py'"]
    assert {"BatchMode=yes", "ConnectTimeout=3"} <= set(command)
    assert command[-3] == "--", "a host that begins with a dash is no option"


def test_without_ssh_the_remedy_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"needs the command ssh.*Install an OpenSSH client"):
        ssh_command("node-07", [])
