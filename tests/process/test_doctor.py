"""The doctor at this machine: faults that are planted one by one, each found, named and told what to do about."""

import os
import resource
import socket
import subprocess
from collections.abc import Iterator

import pytest

from maniple.launch.cores import divide_cores
from tests.doctoring import assert_found, doctor, looked
from tests.waiting import PATIENCE_S

from .conftest import MANIPLE

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]
CORES = sorted(os.sched_getaffinity(0))


def test_a_full_shared_memory_is_found(tiny, monkeypatch):
    memory = tiny("shm", "8m")
    monkeypatch.setenv("MANIPLE_SHM", str(memory))
    assert_found(looked("memory"), "memory", "warning", f"{memory} has 8 MB free of 8", "--shm-size", "MANIPLE_SHM")
    assert_found(looked("memory", model_mb=4), "memory", "ok")
    assert_found(looked("memory", model_mb=4, workers=4), "memory", "warning", "a synchronous rule needs 20 MB")
    (memory / "fill").write_bytes(bytes(6 << 20))
    assert_found(looked("memory", model_mb=4), "memory", "grave", "2 MB free of 8", "the center needs 4 MB")


def test_a_shared_memory_that_is_no_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("MANIPLE_SHM", str(tmp_path / "nowhere"))
    assert_found(looked("memory"), "memory", "grave", "nowhere cannot be written to", "MANIPLE_SHM")


def test_too_few_file_descriptors_are_found(monkeypatch):
    unlimited = resource.RLIM_INFINITY

    def with_limits(soft: int, hard: int, workers: int):
        monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
        return looked("descriptors", workers=workers)

    found = with_limits(200, unlimited, 64)
    assert_found(found, "descriptors", "grave", "200 files", "64 workers needs 288", "ulimit -n 4096")
    assert_found(with_limits(200, 2000, 1), "descriptors", "warning", "200 files", "ulimit -n 2000")
    assert_found(with_limits(200, 500, 64), "descriptors", "grave", "allows 500 at most", "limits.conf")
    assert_found(with_limits(unlimited, unlimited, 64), "descriptors", "ok")


def test_too_many_threads_are_found(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "640")
    assert_found(looked("threads", workers=2), "threads", "warning", "OMP_NUM_THREADS=640", "Unset it")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_found(looked("threads", workers=2), "threads", "ok")


@pytest.fixture
def one_core() -> Iterator[None]:
    os.sched_setaffinity(0, CORES[:1])
    yield
    os.sched_setaffinity(0, CORES)


@pytest.mark.skipif(os.cpu_count() == 1, reason="a machine with one core has nothing to lose")
def test_one_core_only_is_found(one_core):
    assert_found(looked("cores"), "cores", "warning", f"1 of {os.cpu_count()} cores", "taskset")


def test_more_workers_than_cores_and_a_limit_on_their_time_are_found(monkeypatch):
    monkeypatch.setattr("maniple.doctor.machine.granted_cores", lambda: 0.5)
    found = looked("cores", workers=1000)
    assert_found(found, "cores", "warning", "1000 workers share them", "fewer workers")
    assert_found(found, "cores", "warning", "grants the time of 0.5 of", "--cpus")
    monkeypatch.setattr("maniple.doctor.machine.granted_cores", lambda: 1.0)
    found = looked("cores", workers=1)
    assert all("grants" not in one["text"] for one in found), "a container with enough for its workers is healthy"


def test_a_full_disk_is_found(tiny):
    disk = tiny("disk", "1m")
    assert_found(
        looked("disk", runs=disk / "runs"), "disk", "warning", f"{disk} has 1 MB free", "need 100 MB", "--runs"
    )


def test_a_file_in_the_place_of_run_folders_is_found(tmp_path):
    (tmp_path / "runs").touch()
    assert_found(looked("disk", runs=tmp_path / "runs"), "disk", "grave", "runs cannot be written to", "--runs")


def test_a_clock_that_was_never_set_is_found(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e6)
    assert_found(looked("clock"), "clock", "warning", "1970-01-12", "installed after that", "timedatectl")


@pytest.mark.skipif(len(CORES) == 1, reason="one core cannot be narrowed")
def test_cores_that_an_import_of_torch_takes_away_and_devices_that_are_not_there_are_found(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = looked("binding", "devices", devices=("cpu", "cuda:7"))
    assert_found(found, "binding", "warning", f"1 of its {len(CORES)} cores", "unset OMP_PROC_BIND")
    assert_found(found, "devices", "grave", "--devices asks for cuda:7", "CUDA_VISIBLE_DEVICES=", "nvidia-smi")


def test_a_name_that_only_this_machine_knows_is_found(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert_found(looked("name"), "name", "warning", "localhost is", "127.0.0.1", "hostnamectl", "--listen")
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert_found(looked("name"), "name", "warning", "nowhere.invalid does not resolve", "--listen")
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: own)
    assert_found(looked("name"), "name", "ok", "127.0.1.1 to itself, as is usual", "--listen")


def test_all_of_a_machine_is_looked_at_in_one_call(tmp_path):
    """As a person calls it, with three faults at once; colours are for terminals."""
    command = f"ulimit -n 90; exec {MANIPLE} doctor -n 16 --devices cuda:99"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("grave    descriptors: a process may open 90 files (the host of") for line in lines)
    assert any(line.startswith("grave    devices: ") for line in lines)
    assert any(line.startswith("ok       versions: python 3") for line in lines)
    assert any(line.startswith("warning  versions: numba cannot be imported: ") for line in lines), "as planted"
    assert lines[-1].startswith("2 grave, ")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/nowhere"], "'runs/nowhere' is neither a folder nor HOST:PORT"),
        (["node-07:http"], "'node-07:http' is not an address"),
        (["nowhere.yaml"], "there is no session file 'nowhere.yaml'"),
        (["--partition", "gpu"], "add --slurm, or --ray"),
        (["-n", "0"], "1 worker or more"),
        (["--hosts", "a,a"], "names a host twice"),
        (["--slurm", "--walltime", "soon"], "--walltime soon is no time"),
        (["--slurm", "--mem", "much"], "--mem much is no size"),
        (["--token-file", "nowhere", "127.0.0.1:1"], "nowhere cannot be read"),
    ],
)
def test_bad_arguments_have_an_exit_code_of_their_own(arguments, words):
    code, found = doctor(*arguments)
    assert code == 2
    assert words in found[0]["text"]


def test_a_launcher_warns_before_it_begins_and_begins(run):
    script = "import numpy as np, maniple; maniple.join().share({'w': np.zeros(3)})"
    loud = run(script, "-n", "1", env={"OMP_NUM_THREADS": "640"})
    assert loud.process.returncode == 0
    assert loud.output.startswith(
        "maniple: warning: each worker starts more threads than its share of cores: OMP_NUM_THREADS"
    )
    quiet = run(script, "-n", "1", "-q", env={"OMP_NUM_THREADS": "640"})
    assert quiet.output == ""


def test_bound_workers_keep_their_cores_after_importing_torch(run):
    """All threads of theirs, also those that torch has started."""
    pytest.importorskip("torch")
    done = run(
        """
        import os, torch, numpy as np, maniple
        worker = maniple.join()
        worker.share({"w": np.zeros(3)})
        torch.randn(300, 300) @ torch.randn(300, 300)
        cores = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
        worker.log(main=cores[os.getpid()], all=sorted({core for part in cores.values() for core in part}))
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    for rank, given in enumerate(divide_cores(CORES, [None, None])):
        row = done.events(rank, "log")[0]
        assert row["main"] == row["all"] == given
