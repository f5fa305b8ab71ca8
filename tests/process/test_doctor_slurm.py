"""The doctor and Slurm, by commands of the test's own that say what Slurm 22.05 says."""

import os
from pathlib import Path

import pytest

from tests.doctoring import assert_found, doctor, grave

pytestmark = [pytest.mark.process]

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


def test_what_slurm_can_give_is_reported(slurm, tmp_path):
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


def test_a_session_file_says_what_to_check(slurm, tmp_path):
    """Of Slurm, if it says so or the command line does; what is typed counts more."""
    (tmp_path / "train.py").touch()
    session = tmp_path / "session.yaml"
    asked = "script: train.py\ninstances: 3\nworkers: 2000\npartition: gpu\ngpus_per_worker: 5\n"
    session.write_text(asked + "slurm: true\n")
    assert_found(doctor(str(session))[1], "geometry", "grave", "5 GPUs", "has 64 cores, 4 GPUs")
    assert_found(doctor("--gpus-per-worker", "4", str(session))[1], "geometry", "ok", "1 worker fit")
    session.write_text(asked)
    assert grave(doctor("--slurm", str(session))[1]) == {"geometry"}
    session.write_text(asked.replace("train.py", "nowhere.py"))
    code, found = doctor(str(session))
    assert code == 2
    assert "there is no script" in found[0]["text"]


def test_slurm_that_does_not_answer_is_found(slurm, monkeypatch):
    (slurm / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    code, found = doctor("--slurm", "--timeout", "0.5")
    assert code == 1
    assert_found(found, "slurm", "grave", "not answered within 0.5 s", "scontrol ping")
    (slurm / "sinfo").write_text(
        "#!/bin/sh\necho 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1\n"
    )
    assert_found(doctor("--slurm")[1], "slurm", "grave", "Unable to contact slurm controller", "munge")
    (slurm / "sinfo").write_text(f"#!/bin/sh\ncat <<'END'\n{NODES}END\n")
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'Access denied' >&2; exit 1\n")
    assert_found(doctor("--slurm")[1], "default memory", "warning", "scontrol fails: Access denied", "--mem")
    monkeypatch.setenv("PATH", str(slurm))
    (slurm / "sbatch").unlink()
    assert_found(doctor("--slurm")[1], "slurm", "grave", "no sbatch in PATH", "module load slurm")
