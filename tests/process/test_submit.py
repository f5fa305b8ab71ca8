"""`maniple submit` where Slurm says no: commands are missing, refuse, or fall silent. The real one: tests/cluster."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from maniple.cli import cli
from maniple.cli import host_job as hosting
from maniple.errors import InvalidArgument, QueueRefused, WorkerFailed
from maniple.host.listener import Listen
from maniple.job import Job
from maniple.queues import queue
from maniple.queues.queue import JobRequest, QueueResources
from maniple.queues.slurm import Slurm
from maniple.queues.submission import WORKERS, QueuedWorkers, Submission
from maniple.record import RunFolder
from maniple.record.folder import write_json
from maniple.wire.address import Address, HostFile
from tests.waiting import PATIENCE_S, await_

from .conftest import MANIPLE

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


def test_missing_commands_are_reported_before_anything_is_started(fake, submit, tmp_path, monkeypatch):
    (tmp_path / "bin" / "scancel").unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    process = submit()
    assert "needs the command scancel" in said(process)
    assert process.returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--host-job",)])
def test_a_refusal_is_reported_in_the_words_of_the_queue(fake, submit, tmp_path, options):
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


def test_a_queue_that_does_not_answer_is_retried_and_ctrl_c_cancels(fake, submit, tmp_path):
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


def test_ctrl_c_while_sbatch_is_waited_for_cancels_the_job_though_scancel_fails_at_first(fake, submit, tmp_path):
    fake(
        sbatch="touch $LOG/asked; sleep 1; " + SBATCH,
        scancel="[ -e $LOG/refused ] || { touch $LOG/refused; exit 1; }; " + SCANCEL,
    )
    process = submit()
    await_((tmp_path / "asked").exists)
    process.send_signal(signal.SIGINT)
    output = said(process)
    assert process.returncode == 130, output
    assert (tmp_path / "scancel").read_text() == "77\n"


def test_a_second_array_for_the_same_run_is_refused(fake, submit, tmp_path):
    (tmp_path / "queue").write_text("77|0|COMPLETED|h1|None\n")
    said(submit())
    (tmp_path / "queue").write_text("77|0|PENDING||Priority\n")
    assert "End them first: maniple stop runs/run" in said(submit())
    (tmp_path / "down").touch()
    with pytest.raises(QueueRefused, match="does not tell whether jobs 77"):
        call(tmp_path, "submit", "--slurm", "-n", "1", "--resume", "runs/run", "train.py")


def call(folder: Path, *words: str) -> str:
    """A command of ours, in this process."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(cli, words, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def prepared(folder: Path, **about: object) -> RunFolder:
    """The folder of a run whose host is, or was, a job on another machine, and does not listen."""
    run = RunFolder.create(folder / "runs", "run")
    run.describe(asked={}, lineage="5eed", node="elsewhere", **about)
    posted = HostFile("127.0.0.1", 1, "127.0.0.1:1", None, None, None, "5eed", "elsewhere", 1)
    write_json(run.path / "host.json", msgspec.to_builtins(posted))
    order = JobRequest(QueueResources(1), run.path, folder, Path(sys.executable), ())
    Submission(Job(script=folder / "train.py"), order, has_host_job=True, jobs={"host": "77"}).write()
    return run


def test_the_job_of_a_host_that_saves_its_center_is_not_cancelled_before_the_end(fake, tmp_path):
    fake(squeue="echo >> $LOG/asked; " + SQUEUE)
    run = prepared(tmp_path)
    stop = subprocess.Popen([str(MANIPLE), "stop", "runs/run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    asked = tmp_path / "asked"
    await_(lambda: asked.exists() and len(asked.read_text()) >= 3)
    assert not (tmp_path / "scancel").exists()
    run.describe(ended=1.0, exit_code=0)
    assert "stopped: the host has ended with exit code 0. Its center" in said(stop)
    assert (tmp_path / "scancel").read_text() == "77\n"


def test_a_run_that_was_stopped_goes_on_with_a_host_in_the_queue(fake, tmp_path):
    run = prepared(tmp_path, ended=1.0, exit_code=0)
    (run.path / "submit.json").unlink()
    run.stop()
    call(tmp_path, "submit", "--slurm", "-n", "1", "--host-job", "--resume", "runs/run", "train.py")
    assert not run.is_stopped
    assert "exit code" not in call(tmp_path, "status", "runs/run")


def test_a_job_that_cannot_be_written_down_is_cancelled(fake, tmp_path, monkeypatch):
    run = prepared(tmp_path)
    submission = Submission.read(run.path)
    monkeypatch.setattr(Submission, "write", lambda _: write_json(tmp_path / "none" / "full", 0))
    with pytest.raises(FileNotFoundError):
        submission.submit(WORKERS)
    assert (tmp_path / "scancel").read_text() == "77\n"


def test_a_host_whose_workers_were_never_submitted_ends(fake, tmp_path, monkeypatch):
    workers = QueuedWorkers(Submission.read(prepared(tmp_path).path))
    assert workers.updates() == [] and not workers.is_done
    monkeypatch.setattr("maniple.queues.submission._SUBMIT_TIMEOUT_S", 0.0)
    workers.updates()
    assert workers.is_done
    with pytest.raises(WorkerFailed, match="there is no job of workers"):
        workers.check(has_joined=False)


def test_a_host_near_its_walltime_asks_to_be_queued_again_until_it_is(fake, tmp_path, monkeypatch, capfd):
    fake(scontrol="echo $* >> $LOG/scontrol; [ -e $LOG/refused ] || { touch $LOG/refused; echo busy >&2; exit 1; }")
    monkeypatch.setattr(hosting, "_RETRY_S", 0.0)
    monkeypatch.setattr(hosting, "_REQUEUE_S", 1.0)
    hosting.requeue_host(Submission.read(prepared(tmp_path).path))
    assert (tmp_path / "scontrol").read_text().startswith("requeue 77\nrequeue 77\n")
    assert "not requeued yet: scontrol has refused (1): busy" in capfd.readouterr().err


def test_a_host_that_cannot_begin_cancels_its_workers(fake, tmp_path):
    run = prepared(tmp_path)
    submission = Submission.read(run.path)
    nowhere = Listen(Address("203.0.113.1", 0))
    jobs = {"host": "77", "workers": "78"}
    msgspec.structs.replace(submission, job=replace(submission.job, listen=nowhere), jobs=jobs).write()
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(InvalidArgument, match="cannot listen on"):
        hosting.main(run.path)
    signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "scancel").read_text() == "78\n"


def test_a_run_whose_host_answers_elsewhere_does_not_go_on_here(tmp_path, monkeypatch):
    run = prepared(tmp_path)
    monkeypatch.setattr("maniple.connection.find_host._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        posted = json.loads((run.path / "host.json").read_text())
        write_json(run.path / "host.json", posted | {"address": f"127.0.0.1:{server.getsockname()[1]}"})
        with pytest.raises(InvalidArgument, match="is active: its host answers on"):
            call(tmp_path, "serve", "--resume", "runs/run")


def test_a_command_that_hangs_is_given_up(fake, monkeypatch):
    fake(sbatch="exec sleep 30")
    monkeypatch.setattr(queue, "_COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(QueueRefused, match="has not answered within"):
        Slurm().submit(Path("script"))
