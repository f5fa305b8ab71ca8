"""`maniple submit` where Slurm says no: commands are missing, refuse, or fall silent. The real one: tests/cluster."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from maniple.errors import QueueRefused
from maniple.launch import slurm

from .conftest import MANIPLE, PATIENCE_S, await_

pytestmark = pytest.mark.usefixtures("without_numba")

SBATCH = "echo $* >> $LOG/sbatch; cat $2 > $LOG/script; echo '77;cluster'"
SQUEUE = (
    "[ -e $LOG/down ] && { echo >> $LOG/asked; echo 'Unable to contact slurm controller' >&2; exit 1; }; cat $LOG/queue"
)
SCANCEL = "echo $* >> $LOG/scancel; echo '77|0|CANCELLED||None' > $LOG/queue"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands of Slurm that do what a line of shell says."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "queue").write_text("77|0|RUNNING|h1|None\n")

    def fake(**lines: str) -> None:
        for name, line in lines.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)

    fake(sbatch=SBATCH, squeue=SQUEUE, scancel=SCANCEL)
    return fake


@pytest.fixture
def submit(tmp_path: Path):
    """Start `maniple submit`."""
    started: list[subprocess.Popen[str]] = []

    def submit(*options: str) -> subprocess.Popen[str]:
        command = [str(MANIPLE), "submit", "--slurm", "-n", "1", "--listen", "127.0.0.1:0", "--name", "run", *options]
        started.append(
            subprocess.Popen(
                [*command, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield submit
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=PATIENCE_S)[0]


def test_missing_commands_are_told_before_anything_is_begun(fake, submit, tmp_path, monkeypatch):
    (tmp_path / "bin" / "scancel").unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    process = submit()
    assert "needs the command scancel" in said(process)
    assert process.returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--host-job",)])
def test_a_refusal_is_told_in_the_words_of_the_queue(fake, submit, tmp_path, options):
    fake(sbatch="echo 'sbatch: error: invalid account' >&2; exit 1")
    process = submit(*options)
    assert "sbatch has refused (1): sbatch: error: invalid account" in said(process)
    assert process.returncode == 3
    assert not (tmp_path / "scancel").exists()


def test_a_host_in_the_queue_without_workers_is_cancelled(fake, submit, tmp_path):
    fake(sbatch="[ -e $LOG/script ] && exit 1; " + SBATCH)
    process = submit("--host-job")
    assert "sbatch has refused" in said(process)
    assert (tmp_path / "scancel").read_text() == "77\n"


def test_a_queue_that_falls_silent_is_asked_again_and_ctrl_c_cancels(fake, submit, tmp_path):
    (tmp_path / "down").touch()
    process = submit()
    asked = tmp_path / "asked"
    await_(lambda: asked.exists() and len(asked.read_text()) >= 2)  # so the first silence has been told
    assert process.poll() is None
    (tmp_path / "down").unlink()
    process.send_signal(signal.SIGINT)
    output = said(process)
    assert process.returncode == 130, output
    assert "job 77: 1 worker in the queue" in output
    assert "the queue does not answer" in output
    assert (tmp_path / "scancel").read_text() == "77\n"
    assert json.loads((tmp_path / "runs/run/submit.json").read_text())["jobs"] == {"workers": "77"}


def test_tasks_that_end_without_a_word_are_a_failure(fake, submit, tmp_path):
    (tmp_path / "queue").write_text("77|0|COMPLETED|h1|None\n")
    process = submit()
    assert "no task of job 77 has called maniple.join()" in said(process)
    assert process.returncode == 1


def test_a_second_array_for_the_same_run_is_refused(fake, submit, tmp_path):
    (tmp_path / "queue").write_text("77|0|COMPLETED|h1|None\n")
    said(submit())
    (tmp_path / "queue").write_text("77|0|PENDING||Priority\n")
    assert "End them first: maniple stop runs/run" in said(submit())


def test_a_command_that_hangs_is_given_up(fake, monkeypatch):
    fake(sbatch="exec sleep 30")
    monkeypatch.setattr(slurm, "_CALL_S", 0.2)
    with pytest.raises(QueueRefused, match="has not answered within"):
        slurm.submit(Path("script"))
