"""The cores of each worker: fair shares, and near its GPU on machines that are made up of files."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maniple.launch.cores import core_list, divide_cores, granted_cores, split_cores, threads_each

ADDRESSES = ["0000:07:00.0", "0000:0f:00.0", "0000:87:00.0", "0000:90:00.0"]


@given(st.sets(st.integers(0, 255), min_size=1, max_size=64), st.integers(1, 12))
@example({0, 1, 2, 3, 4}, 2)
@example({0, 1}, 3)
def test_cores_are_split_fairly_and_without_overlap(cores, workers):
    cores = sorted(cores)
    parts = split_cores(cores, workers)
    assert len(parts) == workers
    assert divide_cores(cores, [None] * workers) == parts, "as without GPUs"
    if workers > len(cores):
        assert parts == [cores] * workers
    else:
        assert [core for part in parts for core in part] == cores
        sizes = [len(part) for part in parts]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes of 8 cores (0-3 and 8-11, 4-7 and 12-15), and two GPUs at each."""
    for i, address in enumerate(ADDRESSES):
        gpu = tmp_path / "proc/driver/nvidia/gpus" / address
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t Some GPU\nGPU UUID: \t GPU-{i}aaaa-bbbb\nDevice Minor: \t {i}\n")
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{i // 2}\n")
        (device / "local_cpulist").write_text(["0-3,8-11\n", "4-7,12-15\n"][i // 2])
    return tmp_path


CUDA = [f"cuda:{i}" for i in range(4)]
ALL = list(range(16))


def test_each_worker_has_cores_near_its_gpu(machine):
    parts = divide_cores(ALL, CUDA, root=machine)
    assert parts == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert divide_cores(ALL, ["cuda:3", "cuda:0"], root=machine) == [core_set(1), core_set(0)]


def core_set(node: int) -> list[int]:
    return sorted(core_list(["0-3,8-11", "4-7,12-15"][node]))


def test_two_workers_of_one_gpu_and_one_without_have_cores_of_their_own(machine):
    assert divide_cores(ALL, ["cuda:0", "cuda", "cpu"], root=machine) == [[0, 1, 2, 3], [8, 9, 10, 11], core_set(1)]


def test_cores_that_this_process_may_not_use_are_never_given(machine):
    assert divide_cores([0, 1, 4, 5], ["cuda:0", "cuda:2"], root=machine) == [[0, 1], [4, 5]]
    assert divide_cores([4, 5], ["cuda:0", "cuda:2"], root=machine) == [[4], [5]], "none is near the first"


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [("2,0", [1, 0]), ("GPU-3aaaa-bbbb, GPU-1", [1, 0]), ("0000", None), ("MIG-1,0", None), ("", None)],
)
def test_gpus_are_numbered_as_cuda_sees_them(machine, visible, nodes):
    parts = divide_cores(ALL, ["cuda:0", "cuda:1"], visible=visible, root=machine)
    assert parts == ([core_set(node) for node in nodes] if nodes else split_cores(ALL, 2))


def test_what_the_machine_does_not_tell_changes_nothing(machine):
    for address in ADDRESSES[:2]:
        (machine / "sys/bus/pci/devices" / address / "numa_node").write_text("-1\n")
    (machine / "sys/bus/pci/devices" / ADDRESSES[2] / "local_cpulist").unlink()
    devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:7"]
    assert divide_cores(ALL, devices, root=machine) == split_cores(ALL, 4)
    assert divide_cores(ALL, ["cuda:x", None], root=machine / "nowhere") == split_cores(ALL, 2)


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("files", "granted", "threads"),
    [
        ({}, None, 32),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, 32),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "600000 100000"}, 6.0, 3),
        ({"proc/self/cgroup": "0::/../../pod", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        (  # the limit of a group above this one
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000",
                "sys/fs/cgroup/job/cpu.max": "450000 100000",
            },
            4.5, 2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n0::/",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "800000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8.0, 4,
        ),
        ({"proc/self/cgroup": "nonsense\n0::/", "sys/fs/cgroup/cpu.max": "1 0"}, None, 32),
    ],
)  # fmt: skip
def test_threads_follow_the_time_that_control_groups_grant(tmp_path, files, granted, threads):
    plant(tmp_path, files)
    assert granted_cores(tmp_path) == granted
    assert threads_each(64, 2, root=tmp_path) == threads


@pytest.mark.parametrize(("text", "cores"), [("", set()), ("5\n", {5}), ("0-2,7", {0, 1, 2, 7})])
def test_lists_of_cores_are_read_as_the_kernel_writes_them(text, cores):
    assert core_list(text) == cores
