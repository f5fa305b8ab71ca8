"""The doctor's checks of a machine, with limits that are set or made up here: what is grave, and the way out."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from maniple.doctor import Case, check_case, chosen
from maniple.doctor.checks import Finding, SlurmCase
from maniple.doctor.machine import check_cores, check_descriptors, check_disk, check_gpus, check_memory, check_threads
from maniple.errors import InvalidArgument


def only(findings) -> Finding:
    (finding,) = findings
    return finding


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MANIPLE_SHM", str(tmp_path))
    return tmp_path


def test_shared_memory_that_cannot_be_written_to_is_grave(memory, monkeypatch):
    monkeypatch.setenv("MANIPLE_SHM", str(memory / "nowhere"))
    assert only(check_memory(Case())).level == "grave"


@pytest.mark.parametrize(
    ("free_mb", "workers", "model_mb", "level", "words"),
    [
        (300, 1, 0, "ok", "has 300 MB free of 1,000"),
        (300, 2, 100, "ok", "has 300 MB free"),
        (300, 3, 100, "warning", "a synchronous rule needs 400 MB for 3 workers"),
        (300, 1, 301, "grave", "the center needs 301 MB). Enlarge it"),
        (200, 1, 0, "warning", "`maniple doctor -n 1 --model-size MB` tells whether yours fits"),
        (0.5, 1, 0, "grave", "the center needs 1 MB"),
    ],
)
def test_memory_is_compared_with_what_the_model_needs(memory, monkeypatch, free_mb, workers, model_mb, level, words):
    space = SimpleNamespace(f_frsize=1000, f_bavail=1000 * free_mb, f_blocks=1_000_000)
    monkeypatch.setattr("os.statvfs", lambda _: space)
    found = only(check_memory(Case(workers=workers, model_mb=model_mb)))
    assert found.level == level and words in str(found)


@pytest.mark.parametrize(
    ("limits", "workers", "level", "words"),
    [
        ((4096, 4096), 1, "ok", "may open 4,096 files"),
        ((512, 4096), 1, "warning", r"below 1,024, the usual least). Write `ulimit -n 4096`"),
        ((512, 100_000), 1000, "grave", "the host of 1,000 workers needs 4,032). Write `ulimit -n 4096`"),
        ((512, 512), 1000, "grave", "The system allows 512 at most: raise it in /etc/security/limits.conf"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, "ok", "files"),
    ],
)
def test_open_files_are_compared_with_the_number_of_workers(monkeypatch, limits, workers, level, words):
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = only(check_descriptors(Case(workers=workers)))
    assert found.level == level and words in str(found)


@pytest.mark.parametrize(
    ("mine", "total", "workers", "level", "words"),
    [
        (4, 4, 4, "ok", "4 of 4 cores may be used"),
        (1, 4, 1, "warning", "all workers would share it"),
        (4, 8, 5, "warning", "5 workers share them"),
    ],
)
def test_cores_are_compared_with_the_number_of_workers(monkeypatch, mine, total, workers, level, words):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(mine)))
    monkeypatch.setattr("os.cpu_count", lambda: total)
    monkeypatch.setattr("maniple.doctor.machine.granted_cores", lambda: None)
    found = only(check_cores(Case(workers=workers)))
    assert found.level == level and words in str(found)


def test_a_control_group_that_grants_less_is_a_warning(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("maniple.doctor.machine.granted_cores", lambda: 1.5)
    cores, granted = check_cores(Case(workers=4))
    assert (cores.level, granted.level) == ("ok", "warning")
    assert "grants the time of 1.5 of 4 cores" in str(granted)


def test_more_threads_than_cores_are_a_warning_with_the_variable(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    found = only(check_threads(Case(workers=2)))
    assert found.level == "warning" and "OMP_NUM_THREADS=4 (4 cores for 2 workers, 2 each)" in str(found)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert only(check_threads(Case(workers=2))).level == "ok"


def test_a_disk_too_small_for_snapshots_is_a_warning(tmp_path):
    assert only(check_disk(Case(runs=tmp_path / "not" / "yet", model_mb=1e12))).level == "warning"
    (tmp_path / "file").touch()
    assert "cannot be written to" in str(only(check_disk(Case(runs=tmp_path / "file" / "runs"))))


@pytest.mark.parametrize(
    ("gpus", "devices", "level"),
    [(2, ("cuda:1", "cpu"), "ok"), (1, ("cuda:1",), "grave"), (None, ("cuda",), "grave"), (None, ("cpu",), "ok")],
)
def test_devices_are_compared_with_the_gpus_that_torch_sees(gpus, devices, level):
    case = Case(devices=devices)
    case.once("imported", lambda _: {"errors": {}, "gpus": gpus})
    assert only(check_gpus(case)).level == level


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(workers=0), "-n 0"),
        (Case(wait_s=0), "--timeout 0"),
        (Case(model_mb=-1), "--model-size -1"),
        (Case(script=Path("nowhere.py")), "there is no script 'nowhere.py'"),
        (Case(host="nowhere"), "'nowhere' is neither a folder nor HOST:PORT"),
        (Case(host="node:x"), "is not an address"),
        (Case(slurm=SlurmCase(walltime="soon")), "soon"),
        (Case(slurm=SlurmCase(memory="much")), "much"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused_before_anything_is_checked(case, words):
    with pytest.raises(InvalidArgument, match=words):
        check_case(case)


def test_checks_are_chosen_by_what_the_case_names():
    assert {check.of for check in chosen(Case())} == {"machine"}
    assert {check.of for check in chosen(Case(host="node-07:1", slurm=SlurmCase()))} == {"host", "slurm"}
