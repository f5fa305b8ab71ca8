"""The tests' own machines: what the tests of clusters take for granted."""

from tests.cluster.slurm import Cluster
from tests.waiting import await_


def test_hosts_have_names_addresses_and_memory_of_their_own_and_one_file_system(cluster: Cluster, tmp_path):
    cluster.on(1, "sh", "-c", f"echo $(hostname) > {tmp_path}/name; touch /dev/shm/mine")
    assert (tmp_path / "name").read_text() == "h1\n"
    assert [path.name for path in cluster.memory(1).iterdir()] == ["mine"]
    assert not list(cluster.memory(2).iterdir())
    assert "h2" in cluster.on(1, "ssh", "-F", str(cluster.ssh_config), "h2", "hostname")
    (cluster.memory(1) / "mine").unlink()


def test_a_job_runs_and_a_host_that_was_powered_off_comes_back(cluster: Cluster, tmp_path):
    assert "h3" in cluster.on(0, "timeout", "30", "srun", "-w", "h3", "hostname")
    pid = cluster.on(3, "sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!").strip()
    cluster.off(3)
    cluster.boot(3)
    assert "sleep 600" not in cluster.on(3, "sh", "-c", f"tr '\\0' ' ' < /proc/{pid}/cmdline", check=False)
    await_(lambda: "h3" in cluster.on(0, "timeout", "30", "srun", "-w", "h3", "hostname", check=False))


def test_a_cut_host_is_not_reached_until_it_is_healed(cluster: Cluster):
    probe = ("bash", "-c", f"timeout 2 bash -c ': < /dev/tcp/{cluster.address(2)}/22' && echo open")
    await_(lambda: "open" in cluster.on(1, *probe, check=False))
    cluster.cut(2)
    assert "open" not in cluster.on(1, *probe, check=False)
    cluster.heal(2)
    await_(lambda: "open" in cluster.on(1, *probe, check=False))
