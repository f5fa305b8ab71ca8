"""The doctor on machines with a real Slurm and sshd: what is fine is said so, and faults of the network are found."""

import shutil
from pathlib import Path

from tests.cluster.slurm import Cluster
from tests.doctoring import Findings, assert_found, grave, read
from tests.process.conftest import MANIPLE


def doctor(cluster: Cluster, *arguments: str, folder: Path) -> Findings:
    """What is found on h0, where ssh knows how to reach the others."""
    ssh = folder / "bin" / "ssh"
    if not ssh.exists():
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.ssh_config} "$@"\n')
        ssh.chmod(0o755)
    path = f"PATH={ssh.parent}:/usr/bin:/bin"
    return read(cluster.on(0, "env", path, MANIPLE, "doctor", "--json", *arguments, folder=folder, check=False))


def test_partition_limits_of_a_real_slurm_are_found(cluster: Cluster, tmp_path):
    found = doctor(
        cluster, "--slurm", "--cpus-per-worker", "2", "--gpus-per-worker", "1", "--timeout", "30", folder=tmp_path
    )
    assert grave(found) == set(), found
    assert_found(found, "slurm", "ok", "4 nodes in partitions main, urgent")
    assert_found(found, "walltime", "ok", "any time")
    assert_found(found, "geometry", "ok", "8 workers fit on 4 nodes", "4 cores, 2 GPUs, 4000 MB")
    assert_found(found, "shared folder", "warning", str(tmp_path))
    cluster.on(0, "scontrol", "update", "partitionname=urgent", "maxtime=60")
    try:
        asked = ("--partition", "urgent", "--walltime", "3:00:00", "--gpus-per-worker", "3", "--timeout", "30")
        found = doctor(cluster, "--slurm", *asked, folder=tmp_path)
    finally:
        cluster.on(0, "scontrol", "update", "partitionname=urgent", "maxtime=infinite")
    assert grave(found) == {"walltime", "geometry"}
    assert_found(found, "walltime", "grave", "3:00:00 is too long", "partition urgent allows 01:00:00")
    assert_found(found, "geometry", "grave", "3 GPUs", "largest node of partition urgent has 4 cores, 2 GPUs")


def test_other_machines_are_looked_at_by_ssh(cluster: Cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('training')")
    cluster.cut(3)
    cluster.on(2, "sh", "-c", f"mount -t tmpfs tmpfs {tmp_path}")
    try:
        asked = ("--hosts", "h1,h2,h3,nowhere", "--script", "train.py", "-n", "1000", "--timeout", "6")
        found = doctor(cluster, *asked, folder=tmp_path)
        cut_off = doctor(cluster, "--timeout", "2", "h3:29400", folder=tmp_path)
    finally:
        cluster.on(2, "umount", str(tmp_path))
        cluster.heal(3)
    assert grave(found) == {"far ssh", "far folder"}, found
    assert grave(cut_off) == {"port"}
    assert_found(cut_off, "port", "grave", "h3:29400 cannot be reached", "firewall", "nc -vz h3 29400")
    assert_found(found, "far ssh", "grave", "h3 is not reached by ssh", "ssh -o BatchMode=yes h3 true")
    assert_found(found, "far ssh", "grave", "nowhere is not reached by ssh", "resolve")
    assert_found(found, "far ssh", "ok", "h1 is reached")
    assert_found(found, "far versions", "ok", "h1 has the same Python")
    assert_found(found, "far folder", "ok", f"h1 has {tmp_path} and the same train.py")
    assert_found(found, "far folder", "grave", f"h2 has no train.py in {tmp_path}", "scp")
    assert_found(found, "way back", "ok", "h1 reaches this machine as h0")
    assert_found(found, "way there", "ok", "a port of h2 is reached")
    assert_found(found, "far machine", "warning", "h1: 2 of 2 cores", "1000 workers share them")
