"""Submissions: what cannot be asked of a queue, and that what was asked is found again in the run folder."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from maniple.cli import cli
from maniple.errors import InvalidArgument, WorkerFailed
from maniple.host.listener import Listen
from maniple.job import Job, RayResources
from maniple.queues.queue import JobRequest, QueueResources, Task
from maniple.queues.slurm import Slurm, phase_of
from maniple.queues.submission import QueuedWorkers, Submission
from maniple.settings.options import Limits
from maniple.wire.address import Address


@pytest.mark.parametrize(
    ("settings", "states", "failed"),
    [
        ({}, ["COMPLETED", "OUT_OF_MEMORY", "COMPLETED"], ""),
        ({}, ["COMPLETED", "OUT_OF_MEMORY", "FAILED"], "1 task failed: 2"),
        ({"strict": True}, ["COMPLETED", "OUT_OF_MEMORY", "COMPLETED"], "1 task failed: 1"),
        ({"min_workers": 3}, ["COMPLETED", "OUT_OF_MEMORY", "COMPLETED"], "1 task failed: 1"),
        ({}, ["OUT_OF_MEMORY"] * 3, "3 tasks failed: 0, 1, 2"),
    ],
)
def test_a_task_without_memory_fails_the_run_only_where_that_was_requested(
    tmp_path, monkeypatch, settings, states, failed
):
    order = JobRequest(QueueResources(3), tmp_path, tmp_path, Path("python"), ("train.py",), wait_s=60)
    array = QueuedWorkers(Submission(Job(Path("train.py"), workers=3, **settings), order, jobs={"workers": "7"}))
    tasks = [Task("7", number, state, phase_of(state), "node-1") for number, state in enumerate(states)]
    monkeypatch.setattr(Slurm, "tasks", lambda *_: tasks)
    lost = []
    array._host = SimpleNamespace(lose=lambda rank, why, node: lost.append((rank, why, node)))
    said = array.updates()
    assert [line for line in said if "OUT_OF_MEMORY" in line]
    assert array.is_done
    if failed:
        with pytest.raises(WorkerFailed, match=failed):
            array.check(has_joined=True)
    else:
        array.check(has_joined=True)
        assert lost == [(1, "OUT_OF_MEMORY", "node-1")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stop", "."], "is no run folder"),
        (["status", "."], "is no run folder"),
        (["status", "odd"], "was not written by maniple"),
        (["submit", "-n", "2", "train.py"], "Add --slurm"),
        (["submit", "--slurm", "train.py"], "Add --instances"),
        (["submit", "--slurm", "-n", "0", "train.py"], "--instances 0 is out of range (1 or more)"),
        (["submit", "--slurm", "-n", "2", "--walltime", "3h", "train.py"], "--walltime 3h is no time"),
        (["submit", "--slurm", "-n", "2", "--walltime", "1:00", "train.py"], "is not longer than --leave-early 60"),
        (["submit", "--slurm", "-n", "2", "--resume", "odd/none", "train.py"], "is no run folder"),
        (["submit", "--slurm", "-n", "2", "--mem", "lots", "train.py"], "--mem lots is no size"),
        (["submit", "--slurm", "-n", "2", "--sbatch", "-J a\nrm", "train.py"], "holds the control character"),
        (["submit", "--slurm", "-n", "2", "--rule", "bsp", "train.py"], "has all workers meet"),
        (["submit", "--slurm", "-n", "2", "--rule", "gossip", "train.py"], "through shared memory"),
        (["submit", "--slurm", "-n", "2", "none.py"], "there is no script"),
        (
            ["submit", "--slurm", "-n", "2", "--dry-run", "--name", "a\nb", "train.py"],
            "--name 'a\\nb' holds the control",
        ),
        (["submit", "--slurm", "-n", "2", "--dry-run", "train.py", "a\nb"], "argument 'a\\nb' holds the control"),
        (["run", "--name", "a\x1bb", "train.py"], "--name 'a\\x1bb' holds the control character"),
        (["run", "--hosts", "a\x1bb", "train.py"], "holds the control character"),
        (["join", "--task", "127.0.0.1:1", "train.py"], "SLURM_ARRAY_TASK_ID is not set"),
    ],
)
def test_mistakes_are_reported(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text("[1]")
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert isinstance(done.exception, InvalidArgument | click.UsageError)
    assert message in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_a_submission_is_found_again_in_its_folder(tmp_path):
    job = Job(
        script=Path("train.py"),
        args=("--lr", "0.1"),
        workers=3,
        runs=Path("/somewhere/runs"),
        listen=Listen(Address("10.0.0.7", 29400), tls=True),
        limits=Limits(max_epochs=3, total_duration=1.5),
        controller_args=("a=1",),
    )
    resources = QueueResources(3, walltime="1:00", sbatch=("--qos=high",))
    order = JobRequest(resources, tmp_path, Path("/home/me"), Path("/bin/python"), ("/home/me/train.py", "--lr", "0.1"))
    submission = Submission(job, order, has_host_job=True, jobs={"host": "7"}).write()
    assert Submission.read(tmp_path) == submission


def test_resources_of_a_ray_cluster_count_whole_workers_on_each_machine():
    nodes = [{"CPU": 5.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 2.0}]
    assert RayResources(cpus=2).places(nodes) == 3
    assert RayResources(cpus=2, gpus=0.5).places(nodes) == 2
    assert RayResources(cpus=0, gpus=2).places(nodes) == 0


SLURM = Slurm()
PLAIN = JobRequest(QueueResources(2), Path("/home/me/runs/one"), Path("/home/me"), Path("/opt/python"), ("train.py",))
INJECTED = "x\n#SBATCH --wrap=evil\nrm -rf ~"


@pytest.mark.parametrize("bad", [INJECTED, "a\rb", "a\0b", "a\x1b[2J", "a\x85b", "a\u2028b", "a\udc80b"])
@pytest.mark.parametrize(
    "order",
    [
        lambda bad: replace(PLAIN, run=Path("/home/me/runs") / bad),
        lambda bad: replace(PLAIN, folder=Path("/home") / bad),
        lambda bad: replace(PLAIN, python=Path("/opt") / bad),
        lambda bad: replace(PLAIN, command=("train.py", bad)),
        *(
            lambda bad, name=name: replace(PLAIN, resources=QueueResources(2, **{name: bad}))
            for name in ("allocation", "partition", "walltime", "mem")
        ),
        *(
            lambda bad, name=name: replace(PLAIN, resources=QueueResources(2, **{name: (bad,)}))
            for name in ("sbatch", "host_sbatch")
        ),
    ],
    ids=["run", "folder", "python", "argument", "allocation", "partition", "walltime", "mem", "sbatch", "host_sbatch"],
)
def test_no_control_character_reaches_a_script_of_sbatch(order, bad):
    for text in (SLURM.workers_script, SLURM.host_script):
        with pytest.raises(InvalidArgument):
            text(order(bad))


def test_the_end_of_a_line_behind_a_size_is_refused():
    with pytest.raises(InvalidArgument, match=r"--mem '4G\\n' holds the control character '\\n'.*Leave it out"):
        SLURM.check(QueueResources(2, mem="4G\n"))


def test_names_with_spaces_are_one_word_for_sbatch():
    text = SLURM.workers_script(replace(PLAIN, resources=QueueResources(2, partition='a --wrap="x', allocation="it's")))
    assert '#SBATCH --partition="a --wrap=\\"x"' in text
    assert '#SBATCH --account="it\'s"' in text


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" ")), max_size=4))
def test_any_printable_argument_reaches_the_worker_as_it_is(words):
    words = [word for word in words if word.isprintable() and "{rank}" not in word and "{world}" not in word]
    text = SLURM.workers_script(replace(PLAIN, command=("train.py", *words)))
    assert shlex.split(text.splitlines()[-1])[-1 - len(words) :] == ["train.py", *words]
