"""The doctor: faults that are planted one by one, each found, named and told what to do about."""

import contextlib
import http.server
import os
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maniple.launch.cores import divide_cores
from tests.doctoring import assert_found, doctor, grave, looked

from .conftest import MANIPLE, PATIENCE_S, await_, is_gone

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]
CORES = sorted(os.sched_getaffinity(0))


# This machine


def test_a_full_shared_memory_is_found(tiny, monkeypatch):
    memory = tiny("shm", "8m")
    monkeypatch.setenv("MANIPLE_SHM", str(memory))
    assert_found(looked("memory"), "memory", "warning", f"{memory} has 8 MB free of 8", "--shm-size", "MANIPLE_SHM")
    assert_found(looked("memory", model_mb=4), "memory", "ok")
    assert_found(looked("memory", model_mb=4, workers=4), "memory", "warning", "a rule of the circle needs 20 MB")
    (memory / "fill").write_bytes(bytes(6 << 20))
    assert_found(looked("memory", model_mb=4), "memory", "grave", "2 MB free of 8", "the center needs 4 MB")


def test_a_shared_memory_that_is_no_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("MANIPLE_SHM", str(tmp_path / "nowhere"))
    assert_found(looked("memory"), "memory", "grave", "nowhere cannot be written to", "MANIPLE_SHM")


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_few_file_descriptors_are_found(few_descriptors):
    assert_found(
        looked("descriptors", workers=64), "descriptors", "grave", "200 files", "64 workers needs 576", "ulimit"
    )
    assert_found(looked("descriptors"), "descriptors", "warning", "200 files", "ulimit -n 4096")


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


def test_more_workers_than_cores_and_a_limit_on_their_time_are_found(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr("maniple.doctor.machine._QUOTA", tmp_path / "cpu.max")
    found = looked("cores", workers=1000)
    assert_found(found, "cores", "warning", "1000 workers share them", "fewer workers")
    assert_found(found, "cores", "warning", "grants the time of 0.5 of", "--cpus")


def test_a_full_disk_is_found(tiny):
    disk = tiny("disk", "1m")
    assert_found(
        looked("disk", runs=disk / "runs"), "disk", "warning", f"{disk} has 1 MB free", "need 100 MB", "--runs"
    )


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
    assert_found(looked("name"), "name", "warning", "localhost is", "127.0.0.1", "/etc/hosts", "--listen")
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert_found(looked("name"), "name", "warning", "nowhere.invalid does not resolve", "--listen")


def test_all_of_a_machine_is_looked_at_in_one_call(tmp_path):
    """As a person calls it, with three faults at once; colours are for terminals."""
    command = f"ulimit -n 150; exec {MANIPLE} doctor -n 16 --devices cuda:99"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("grave    descriptors: a process may open 150 files (the host of") for line in lines)
    assert any(line.startswith("grave    devices: ") for line in lines)
    assert any(line.startswith("ok       versions: python 3") for line in lines)
    assert any(line.startswith("grave    versions: numba cannot be imported: ") for line in lines), "as planted"
    assert lines[-1].startswith("3 grave, ")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "'nowhere' is no address"),
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
        "maniple: warning: each worker starts more threads than it has cores: OMP_NUM_THREADS"
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


# A host


def test_a_name_that_does_not_resolve_is_found():
    code, found = doctor("nowhere.invalid:29400")
    assert code == 1
    assert_found(found, "address", "grave", "nowhere.invalid does not resolve", "/etc/hosts")


def test_a_closed_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, found = doctor(f"127.0.0.1:{port}")
    assert code == 1
    assert grave(found) == {"port"}
    assert_found(found, "port", "grave", "connection refused", "--listen 0.0.0.0:PORT")


def test_a_host_that_says_nothing_is_found():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, found = doctor("--timeout", "0.5", f"127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "takes the connection and says nothing", "logs/server.log")


def test_another_service_on_the_port_is_found():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, found = doctor("--timeout", "2", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert code == 1
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "an HTTP server is at", "host.json")


@pytest.fixture
def greets() -> Iterator[Callable[[bytes], str]]:
    """Makes services that say something at once."""
    made: list[socket.socket] = []

    def greets(words: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        made.append(listener)

        def serve() -> None:
            link, _ = listener.accept()
            with contextlib.suppress(OSError), link:
                link.sendall(words)
                link.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield greets
    for one in made:
        one.close()


def test_another_version_of_the_protocol_is_found(greets):
    _, found = doctor(greets(b"mnpl\x02\x00" + bytes(10)))
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "version 2 of the protocol, this one 1", "Install the same maniple")
    _, found = doctor(greets(b"SSH-2.0-OpenSSH_9.2p1\r\n"))
    assert_found(found, "greeting", "grave", "b'SSH-' does not begin a frame of maniple")


def test_what_keeps_a_worker_out_is_found(serve, tmp_path, monkeypatch):
    host = serve("--listen", "127.0.0.1:0")
    address = host.address
    host.await_event("server", "serving")
    (tmp_path / "wrong").write_text("0" * 64)
    code, found = doctor("--token-file", str(tmp_path / "wrong"), address)
    assert code == 1
    assert grave(found) == {"token"}
    assert_found(found, "token", "grave", "the token is not this run's", "--token-file")
    assert_found(doctor(address)[1], "token", "grave", "no token was given", "MANIPLE_TOKEN_FILE")

    monkeypatch.setenv("MANIPLE_TOKEN_FILE", str(host.token))
    code, found = doctor(address)
    assert code == 0, found
    assert_found(found, "token", "ok", "both sides know")
    assert_found(found, "both versions", "ok", "maniple")
    assert_found(found, "center", "ok", "no model is shared yet")
    assert_found(found, "way", "ok", "MB/s")
    assert not host.events("server", "joined"), "the doctor is no worker"

    (tmp_path / "certificate").write_text("no certificate")
    code, found = doctor("--certificate", str(tmp_path / "certificate"), address)
    assert code == 1
    assert_found(found, "encryption", "grave", "cannot be used", "Copy certificate.pem")


def test_encryption_on_one_side_only_is_found(serve, tmp_path):
    pytest.importorskip("cryptography")
    host, plain = serve("--listen", "127.0.0.1:0", "--tls"), serve("--listen", "127.0.0.1:0")
    address, token = host.address, ("--token-file", str(host.token))
    for one in (host, plain):
        one.await_event("server", "serving")
    code, found = doctor("--timeout", "2", *token, address)
    assert code == 1
    assert grave(found) == {"encryption"}
    assert_found(found, "encryption", "grave", "encrypts", "no certificate was given", "--certificate")
    certificate = ("--certificate", str(host.folder / "certificate.pem"))
    code, found = doctor(*token, *certificate, address)
    assert code == 0, found
    assert_found(found, "encryption", "ok", "encrypted")
    code, found = doctor(*token, *certificate, plain.address)
    assert grave(found) == {"encryption"}
    assert_found(found, "encryption", "grave", "the host does not encrypt", "--tls")
    assert doctor(str(host.folder))[0] == 0, "a run folder has it all"


def test_another_version_and_another_clock_are_found(serve, tmp_path, monkeypatch):
    """A host on a machine whose clock is an hour ahead, and which has another maniple and NumPy."""
    planted = tmp_path / "planted"
    for name, version in (("maniple", "9.9.9"), ("numpy", "0.1.2")):
        (planted / f"{name}-{version}.dist-info").mkdir(parents=True)
        (planted / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (planted / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 3600\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{planted}:{os.environ.get('PYTHONPATH', '')}")
        host = serve("--listen", "127.0.0.1:0")
    address = host.address
    host.await_event("server", "serving")
    code, found = doctor("--token-file", str(host.token), address)
    assert code == 1
    assert grave(found) == {"both versions"}
    assert_found(found, "both versions", "grave", "maniple", "9.9.9 at the host", "pip install maniple==9.9.9")
    assert_found(found, "both versions", "warning", "numpy", "0.1.2 at the host")
    assert_found(found, "both clocks", "warning", "3.6e+03 s ahead of", "limit 1 s", "time server")


# A run folder


def test_what_is_wrong_with_a_run_folder_is_found(serve, tmp_path):
    host = serve("--listen", "127.0.0.1:0")
    assert host.address
    host.await_event("server", "serving")
    joined = host.join(
        """
        import os, signal, numpy as np, maniple
        worker = maniple.join()
        worker.share({"w": np.zeros(1000, "f4")})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    joined.wait(PATIENCE_S)
    host.await_event("server", "lost")
    code, found = doctor(str(host.folder))
    assert code == 0, found
    assert_found(found, "host process", "ok", f"process {host.process.pid}")
    assert_found(found, "token file", "ok")
    assert_found(found, "center", "ok", "center-0 has digest", "1 parameters, 0.00 MB")
    assert_found(found, "losses", "warning", "worker 0 was lost", "within the last hour", "worker-0.log")

    host.token.chmod(0o644)
    code, found = doctor(str(host.folder))
    assert code == 0
    assert_found(found, "token file", "warning", "mode 0644", "chmod 600")
    token = host.token.read_text()
    host.token.unlink()
    code, found = doctor(str(host.folder))
    assert grave(found) == {"token file"}
    assert_found(found, "token file", "grave", "cannot be read: No such file", "copy")
    host.token.write_text(token)

    host.process.kill()
    host.wait()
    await_(lambda: is_gone(host.server_pid))
    code, found = doctor(str(host.folder))
    assert code == 1
    assert grave(found) == {"host process", "port"}
    assert_found(found, "host process", "grave", "is dead", "it was killed", "maniple serve --resume")
    assert_found(looked("leftovers"), "leftovers", "warning", "of a dead run holds", "--resume RUN")
    for path in Path(os.environ["MANIPLE_SHM"]).iterdir():
        shutil.rmtree(path)
    assert_found(looked("leftovers"), "leftovers", "ok")


def test_a_run_that_has_ended_or_does_not_listen_is_told_so(run, tmp_path):
    done = run("import numpy as np, maniple; maniple.join().share({'w': np.zeros(3)})", "-n", "1")
    code, found = doctor(str(done.folder))
    assert code == 1
    assert_found(found, "host process", "grave", "the run ended at", "exit code 0", "--resume")
    assert_found(found, "run folder", "warning", "no host.json", "--listen")
    assert_found(found, "models", "ok", "digest")
    code, found = doctor(str(tmp_path))
    assert code == 1
    assert_found(found, "run folder", "grave", "no run.json", "runs/last")


# Slurm, by commands of the test's own that say what Slurm 22.05 says

NODES = """\
main*|up|1-00:00:00|n1|8|16000|(null)|idle
main*|up|1-00:00:00|n2|8|16000|(null)|down*
gpu|up|4:00:00|g1|64|256000|gpu:a100:4(S:0-1)|mixed
gpu|up|4:00:00|g2|64+|256000+|gpu:a100:4,craynetwork:1|drained
old|inact|infinite|o1|4|8000|(null)|idle
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    partition = "PartitionName=main DefaultTime=NONE DefMemPerCPU=500 MaxTime=1-00:00:00 Nodes=n[1-2] State=UP"
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        said = {"sinfo": NODES, "scontrol": partition}.get(name, "")
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{said.rstrip()}\nEND\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    ("asked", "check", "words"),
    [
        (["--partition", "gqu"], "partition", ["no partition gqu", "there are: gpu, main, old"]),
        (["--partition", "old"], "partition", ["partition old is not up"]),
        (["--partition", "gpu", "--walltime", "5:00:00"], "walltime", ["5:00:00 is too long", "allows 04:00:00"]),
        (["--walltime", "1-00:00:01"], "walltime", ["1-00:00:01 is too long", "allows 1-00:00:00"]),
        (["--cpus-per-worker", "9"], "geometry", ["no node has 9 cores", "largest node of partition main has 8 cores"]),
        (["--gpus-per-worker", "1"], "geometry", ["no node has 1 core, 1 GPU and any MB", "0 GPUs"]),
        (["--partition", "gpu", "--gpus-per-worker", "5"], "geometry", ["5 GPUs", "has 64 cores, 4 GPUs"]),
        (["--mem", "64G"], "geometry", ["65536 MB", "16000 MB", "--mem"]),
    ],
)
def test_what_slurm_cannot_give_is_found(slurm, asked, check, words):
    code, found = doctor("--slurm", *asked)
    assert code == 1
    assert grave(found) == {check}
    assert_found(found, check, "grave", *words)


def test_what_slurm_can_give_is_told(slurm, tmp_path):
    asked = ["--partition", "gpu", "--gpus-per-worker", "2", "--cpus-per-worker", "8", "--walltime", "3:00:00"]
    code, found = doctor("--slurm", *asked, "--runs", str(Path.home() / "runs"))
    assert code == 0, found
    assert_found(found, "slurm", "ok", "5 nodes in partitions gpu, main, old")
    assert_found(found, "partition", "ok", "partition gpu has 1 of 2 nodes that take jobs")
    assert_found(found, "geometry", "ok", "2 workers fit on 1 node that")
    found = doctor("--slurm", "--cpus-per-worker", "2")[1]
    assert_found(found, "default memory", "warning", "1000 MB of memory if --mem is not given", "--mem 4G")
    found = doctor("--slurm", "--runs", str(tmp_path))[1]
    assert_found(found, "shared folder", "warning", f"written to {tmp_path}", "--runs")


def test_slurm_that_does_not_answer_is_found(slurm, monkeypatch):
    (slurm / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    code, found = doctor("--slurm", "--timeout", "0.5")
    assert code == 1
    assert_found(found, "slurm", "grave", "not answered within 0.5 s", "scontrol ping")
    (slurm / "sinfo").write_text(
        "#!/bin/sh\necho 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1\n"
    )
    assert_found(doctor("--slurm")[1], "slurm", "grave", "Unable to contact slurm controller", "munge")
    monkeypatch.setenv("PATH", str(slurm))
    (slurm / "sbatch").unlink()
    assert_found(doctor("--slurm")[1], "slurm", "grave", "no sbatch in PATH", "module load slurm")
