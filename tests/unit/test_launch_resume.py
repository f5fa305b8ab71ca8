"""The command that `maniple stop` prints: how to continue the run in a folder, if its record names a program."""

import pytest

from maniple.launch.resume import command_to_resume
from maniple.record import RunFolder


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ({"script": "train.py", "launcher": "maniple"}, "maniple run --resume {}"),
        ({"launcher": "maniple"}, "maniple serve --resume {}"),
        ({"launcher": "torchrun"}, None),
        ({"script": "train.py", "launcher": "maniple", "ray": {"cpus": 1}}, None),
    ],
)
def test_a_run_whose_program_is_known_can_be_continued_by_a_command(tmp_path, monkeypatch, asked, command):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(tmp_path / "runs", "run")
    run.describe(lineage="0123456789abcdef", asked=asked)
    assert command_to_resume(run.path) == (command and command.format("runs/run"))
