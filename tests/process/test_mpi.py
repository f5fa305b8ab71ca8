"""A center in MPI windows: scripts as users write them, started by mpiexec, with MANIPLE_CENTER=mpi and no host."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.center import Shared
from maniple.center.snapshot import check_snapshot
from maniple.host import Host
from maniple.place import shared_memory
from maniple.record import read_events
from tests.conftest import require
from tests.contract.circle_ranks import PATIENCE_S, find_mpiexec, sweep

BEGIN = """
import json, os, re, signal, sys, time
from pathlib import Path
sys.modules["numba"] = None  # ranks start sooner without a compiler
import numpy as np
import maniple

worker = maniple.join()
"""

TRAIN = (
    BEGIN
    + """
x = np.random.default_rng(0).normal(size=(400, 5))
y = x @ np.arange(1.0, 6.0)
models = [{"w": np.zeros(5)} for _ in range(3)]
rules = [maniple.EASGD(), maniple.ASGD(), maniple.Downpour()]
replicas = [worker.share(model, rule=rule, pace=maniple.Every(2)) for model, rule in zip(models, rules)]
sampler, taken, error = worker.sampler(400), [], ""
try:
    worker.ask("next")
except maniple.errors.InvalidArgument as one:
    error = str(one)
while not worker.should_stop:
    for batch in sampler.batches(10):
        taken += batch.tolist()
        for model, replica in zip(models, replicas):
            model["w"] -= 0.1 * x[batch].T @ (x[batch] @ model["w"] - y[batch]) / len(batch)
            replica.step()
        worker.log(loss=1.0)
    worker.barrier()  # the circle mpi
with worker.lock():
    Path(f"said-{worker.rank}.json").write_text(json.dumps({"taken": taken, "error": error, "world": worker.world}))
"""
)


def launch(folder: Path, script: str, world: int, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks."""
    launcher = find_mpiexec()
    require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
    (folder / "train.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.run(
        [str(launcher), "-n", str(world), sys.executable, "train.py", *args],
        cwd=folder,
        env=env | {"MANIPLE_CENTER": "mpi", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def ended(folder: Path) -> dict:
    return json.loads((folder / "runs/last/run.json").read_text())


@pytest.fixture
def swept(tmp_path: Path):
    """mpich leaves its own files in shared memory when ranks are killed."""
    yield
    sweep(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of three rules on four ranks, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    done = launch(folder, TRAIN, 4, MANIPLE_MAX_EPOCHS="12", MANIPLE_NAME="first")
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def test_elastic_averaging_asgd_and_downpour_train_in_one_job_without_a_host(trained):
    folder, printed = trained
    assert (
        f"mpirun has started 4 workers, who hold the center in MPI windows; run folder {folder}/runs/first" in printed
    )
    for number in range(3):
        saved = load_file(folder / f"runs/last/center/center-{number}.safetensors")
        np.testing.assert_allclose(saved["w"], np.arange(1.0, 6.0), atol=0.1)


def test_each_sample_is_taken_once_per_epoch_over_all_ranks(trained):
    said = [json.loads((trained[0] / f"said-{rank}.json").read_text()) for rank in range(4)]
    assert sorted(index for one in said for index in one["taken"]) == sorted(12 * list(range(400)))
    assert ended(trained[0])["samples"] == 12 * 400


def test_there_is_nobody_to_ask(trained):
    said = json.loads((trained[0] / "said-3.json").read_text())
    assert "nobody answers 'next': with MANIPLE_CENTER=mpi there is no controller" in said["error"]


def test_the_run_folder_is_that_of_any_run(trained):
    run = trained[0] / "runs/first"
    described = ended(trained[0])
    assert (described["exit_code"], described["asked"]["workers"], described["asked"]["center"]) == (0, 4, "mpi")
    manifest = check_snapshot(run / "center/snapshot-000001", described["lineage"])
    assert [one.name for one in manifest.centers] == ["center-0", "center-1", "center-2"]
    for rank in range(4):
        kinds = {row["event"] for row in read_events(run / f"events/worker-{rank}.jsonl")}
        assert {"join", "share", "pull", "exchange", "log", "leave"} <= kinds
    assert [row["event"] for row in read_events(run / "events/host.jsonl")] == ["start", "snapshot", "end"]


def test_a_host_takes_over_what_a_job_has_saved(trained, tmp_path):
    shutil.copytree(trained[0] / "runs/first", tmp_path / "first", symlinks=True)
    host = Host.resume(shared_memory(), tmp_path / "first", {})
    center = Shared.open(host.segment, host.segment.path / "center-2")
    assert center is not None
    np.testing.assert_array_equal(center.read(0), load_file(trained[0] / "runs/first/center/center-2.safetensors")["w"])
    assert center.versions[0] > 0
    center.close()
    host.close(0)


LOOP = (
    BEGIN
    + """
# mpich's files in shared memory, to be removed after a kill: only who maps them knows that they are this job's.
names = set(re.findall(r"mpich_shm_\\w+", Path("/proc/self/maps").read_text()))
Path(f"mpich-{worker.rank}").write_text(" ".join(names))
how = sys.argv[1]
if how == "early" and worker.rank == 2:
    raise RuntimeError("an error before share")
model = {"w": np.zeros(5 if how != "differs" or worker.rank != 2 else 6)}
replica = worker.share(model, rule=maniple.Downpour(), pace=maniple.Every(10 if how == "term" else 1))
if how == "stop":
    worker._seat._job.deadline_s = 5.0  # from here on: ranks may begin far apart
for number in range(5 if how == "stop" else 1_000_000):
    model["w"] += 1
    replica.step()
    time.sleep(0.01)
    if worker.should_stop:
        break
    if number == 3 and how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if worker.rank == 2 and number == 3 and how == "raise":
        raise RuntimeError("an error of the script")
    if worker.rank == 2 and number == 3 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if worker.rank == 2 and how == "kill" and list(Path("runs/last/center").glob("snapshot-*")):
        os.kill(os.getpid(), signal.SIGKILL)
print(f"worker {worker.rank} has ended after {number}: {worker._seat.stop}", flush=True)
"""
)


def test_a_script_that_fails_on_one_rank_stops_the_others_and_the_center_is_saved(tmp_path):
    done = launch(tmp_path, LOOP, 3, "raise")
    assert done.returncode != 0
    assert "RuntimeError: an error of the script" in done.stderr
    for rank in (0, 1):
        assert f"worker {rank} has ended after" in done.stdout
    assert "worker 2 has failed" in done.stdout
    saved = load_file(tmp_path / "runs/last/center/center-0.safetensors")["w"]
    assert saved[0] >= 4 and len(set(saved)) == 1
    assert ended(tmp_path)["exit_code"] == 1
    assert "UCX" not in done.stderr  # nothing of MPI's was left open


def test_ranks_that_are_told_to_end_make_their_last_exchange_before_the_center_is_saved(tmp_path):
    done = launch(tmp_path, LOOP, 3, "term")
    assert done.returncode == 128 + signal.SIGTERM
    assert (
        load_file(tmp_path / "runs/last/center/center-0.safetensors")["w"].tolist() == [3 * 5.0] * 5
    )  # each ends after its fifth step
    assert ended(tmp_path)["exit_code"] == 0


def test_who_does_not_come_to_share_is_named_at_once(tmp_path):
    done = launch(tmp_path, LOOP, 3, "early")
    assert done.returncode != 0
    assert "an error before share" in done.stderr
    for rank in (0, 1):
        assert f"PeerLost: worker 2 has failed, and will not come to share center-0, where worker {rank}" in done.stderr
    assert ended(tmp_path)["exit_code"] == 1


def test_a_killed_rank_ends_the_job_and_the_last_snapshot_stays(tmp_path, swept):
    done = launch(tmp_path, LOOP, 3, "kill", MANIPLE_SNAPSHOT_EVERY="0.1")
    assert done.returncode != 0
    snapshots = sorted((tmp_path / "runs/last/center").glob("snapshot-*"))
    check_snapshot(snapshots[0], ended(tmp_path)["lineage"])
    assert "exit_code" not in ended(tmp_path)


def test_a_rank_that_stands_still_is_named_and_the_center_is_saved(tmp_path, swept):
    done = launch(tmp_path, LOOP, 3, "stop")
    assert done.returncode != 0
    assert "PeerLost: worker 2 has not been heard of for" in done.stderr
    assert load_file(tmp_path / "runs/last/center/center-0.safetensors")["w"][0] >= 10


LIMITED = (
    BEGIN
    + """
model = {"w": np.full(5, float(worker.rank))}
replica = worker.share(model)
for number in range(1_000_000):
    gradients = {"w": model["w"] - 1}
    replica.reduce(gradients)
    model["w"] -= 0.1 * gradients["w"]
    replica.step()
    if worker.should_stop:
        break
print(f"worker {worker.rank} had {model['w'][0]!r}", flush=True)
"""
)


def test_batches_of_all_ranks_are_counted_and_bsp_keeps_its_center_there_too(tmp_path):
    done = launch(tmp_path, LIMITED, 3, MANIPLE_RULE="bsp", MANIPLE_MAX_BATCHES="300")
    assert done.returncode == 0, done.stderr
    assert 300 <= ended(tmp_path)["batches"] < 600
    assert load_file(tmp_path / "runs/last/center/center-0.safetensors")["w"] == pytest.approx(1.0, abs=0.01)


BUSY = (
    BEGIN
    + """
model = {"w": np.zeros(5), "large": np.zeros(700_000)}
replica = worker.share(model, rule=maniple.Downpour(), pace=maniple.Every(1))
if worker.rank == 0:
    end = time.monotonic() + 60
    while not Path("done").exists() and time.monotonic() < end:  # it makes no call of maniple or MPI
        time.sleep(0.01)
    print("in time" if Path("done").exists() else "too late", flush=True)
else:
    for _ in range(5):
        model["w"] += 1
        replica.step()
    Path("done").touch()
"""
)


def test_memory_of_a_rank_that_computes_is_read_and_written_over_the_network(tmp_path):
    # Ranks that are told not to know that they are neighbours reach each other as those of other machines do.
    done = launch(tmp_path, BUSY, 2, MPIR_CVAR_NOLOCAL="1", UCX_TLS="tcp,self")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in time\n"
    assert load_file(tmp_path / "runs/last/center/center-0.safetensors")["w"].tolist() == [5.0] * 5


def test_one_rank_is_a_world_of_one(tmp_path):
    done = launch(tmp_path, TRAIN, 1, MANIPLE_MAX_EPOCHS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "said-0.json").read_text())["world"] == 1
    assert not (tmp_path / "runs").exists()
