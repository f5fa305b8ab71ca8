"""The place: what the launcher writes into the environment is what the worker finds."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.environment import (
    THREAD_VARIABLES,
    Environment,
    inherited_variables,
    options_from_variables,
    override_environment,
    personal_settings,
    read_environment,
    read_threads,
    shared_memory,
    variables_for,
    variables_to_join,
)
from maniple.environment.other_launchers import find_launch
from maniple.errors import InvalidArgument
from maniple.rules import BSP, EASGD
from maniple.settings.options import DEFAULT_SEED, ENGINES, option_variable
from maniple.worker.share_settings import check_rule
from maniple.worker.worker import connect_to_host

WORD = st.none() | st.text("abc:=0.5,", min_size=1)
PLACES = st.builds(
    Environment,
    rank=st.integers(0, 99),
    world=st.integers(1, 100),
    local_rank=st.integers(0, 99),
    local_world=st.integers(1, 100),
    run=st.none() | st.just(Path("/runs/my run")),
    segment=st.just(Path("/dev/shm/maniple-1")),
    rule=WORD,
    pace=WORD,
    device=WORD,
    seed=st.integers(0, 2**31),
    restarts=st.integers(0, 9),
    launcher=st.sampled_from(["", "maniple"]),
    collectives=st.none() | st.sampled_from(ENGINES),
    collectives_deadline_s=st.floats(1, 1e6),
    master=st.none() | st.just("node-1:29500"),
)


@given(PLACES)
def test_worker_reads_the_environment_that_the_launcher_wrote(environment):
    assert read_environment(variables_for(environment)) == environment


def test_without_a_launcher_it_is_a_world_of_one():
    environment = read_environment({})
    assert environment.is_alone
    assert (environment.rank, environment.world, environment.local_rank, environment.local_world) == (0, 1, 0, 1)
    assert environment.seed == DEFAULT_SEED
    assert environment.run is None


def test_environment_of_a_run_is_not_alone():
    assert not read_environment({"MANIPLE_SEGMENT": "/dev/shm/maniple-1"}).is_alone


def test_alone_the_device_and_the_seed_may_still_be_set():
    environment = read_environment({"MANIPLE_DEVICE": "cuda:1", "MANIPLE_SEED": "7"})
    assert (environment.device, environment.seed) == ("cuda:1", 7)


@pytest.mark.parametrize(
    ("launcher", "env", "found"),
    [
        ("torchrun", "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", (3, 4, 1, 2)),
        (
            "mpirun",
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0",
            (3, 4, 1, 2),
        ),
        ("mpirun", "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_PROCID=0", (3, 4, 1, 2)),
        ("mpirun", "PMI_RANK=3 PMI_SIZE=4", (3, 4, 0, 1)),
        (
            "srun",
            "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=1 "
            "PMI_RANK=3 PMI_SIZE=4",
            (3, 4, 1, 2),
        ),
    ],
)
def test_workers_of_other_launchers_know_who_they_are(launcher, env, found):
    environment = read_environment(dict(word.split("=") for word in env.split()))
    assert environment.launcher == launcher
    assert (environment.rank, environment.world, environment.local_rank, environment.local_world) == found
    assert not environment.is_alone


def test_outside_of_a_step_slurm_has_started_nobody():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).is_alone


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node-[01-04,7],b", "node-01"), ("a,b[1-2]", "a"), ("n[3,5].site", "n3.site"), ("alone", "alone")],
)
def test_rendezvous_of_a_step_is_its_first_node(nodes, first):
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": nodes}
    address, _, port = (read_environment(step | {"SLURM_JOB_ID": "12"}).master or "").rpartition(":")
    assert address == first
    assert 1024 < int(port) < 32768
    assert read_environment(step | {"MASTER_ADDR": "x", "MASTER_PORT": "5"}).master == "x:5"


def test_another_launcher_s_workers_get_no_center_instead_of_one_each():
    environment = read_environment({"RANK": "1", "WORLD_SIZE": "4", "MANIPLE_CENTER": "none"})
    with pytest.raises(InvalidArgument, match=r"EASGD.*MANIPLE_CENTER=none.*4 workers of torchrun.*synchronous rule"):
        check_rule(environment, EASGD())
    check_rule(environment, BSP())
    check_rule(read_environment({}), EASGD())
    check_rule(Environment(segment=Path("/dev/shm/maniple-1"), launcher="torchrun", world=4), EASGD())


def test_workers_of_torchrun_know_that_they_were_started_again():
    env = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert (read_environment(env).restarts, read_environment(env).launcher) == (2, "torchrun")
    assert read_environment(env | {"RAY_RAYLET_PID": "7"}).launcher == "ray"


TORCHRUN = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29500"
SRUN = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_JOB_ID=17"


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (f"{TORCHRUN} TORCHELASTIC_RUN_ID=my/job", "torchrun-my-job"),
        (f"{TORCHRUN} TORCHELASTIC_RUN_ID=none", "torchrun-n1-29500"),
        (f"{SRUN} SLURM_STEP_ID=3", "srun-17-3"),
        (f"{SRUN} SLURM_STEP_ID=0 SLURM_RESTART_COUNT=1", "srun-17-0-1"),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
         "PMIX_NAMESPACE=prterun-n1-77@1", "mpirun-prterun-n1-77-1"),
        (f"{TORCHRUN} TORCHELASTIC_RUN_ID=x MANIPLE_NAME=mine", "mine"),
    ],
)  # fmt: skip
def test_all_workers_of_a_launch_agree_on_the_name_of_their_run(env, name):
    variables = dict(word.split("=") for word in env.split())
    assert find_launch(read_environment(variables), variables).name == name


def test_workers_of_one_machine_know_their_launch_by_the_launcher_s_process():
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    launch = find_launch(read_environment(env), env)
    assert launch.name == find_launch(read_environment(env | {"PMI_RANK": "1"}), env | {"PMI_RANK": "1"}).name
    assert launch.process == os.getppid()
    assert re.fullmatch(rf"mpirun-{os.getppid()}-\d+", launch.name)


def test_workers_that_cannot_agree_on_a_name_require_one():
    env = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    with pytest.raises(InvalidArgument, match=r"mpirun has started 2 workers on several machines.*MANIPLE_NAME"):
        find_launch(read_environment(env), env)


def test_what_a_worker_has_detected_is_its_environment_from_then_on(monkeypatch):
    monkeypatch.setattr("maniple.environment.environment._overrides", [])
    environment = override_environment(
        Environment(rank=1, world=2, segment=Path("/dev/shm/maniple-1"), launcher="mpirun")
    )
    assert read_environment() == environment
    assert read_environment({}).is_alone
    assert read_environment(address="a:1").address == "a:1"


def test_collectives_that_does_not_exist_is_refused():
    with pytest.raises(InvalidArgument, match=r"MANIPLE_COLLECTIVES='smoke'.*shared, torch, mpi"):
        read_environment({"MANIPLE_COLLECTIVES": "smoke"})


MPIRUN = {"PMI_RANK": "0", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MANIPLE_CENTER": "ether"}, "MANIPLE_CENTER='ether' is no center .one of host, none."),
        (MPIRUN | {"MANIPLE_CENTER": "mpi"}, "MANIPLE_CENTER=mpi: .* no longer exist. Unset it"),
    ],
)
def test_a_center_that_workers_cannot_hold_is_refused_before_anybody_waits(env, words):
    with pytest.raises(InvalidArgument, match=words):
        connect_to_host(read_environment(env), lambda: (0, 0, False))


@pytest.mark.parametrize("env", [{"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "3"}])
def test_one_worker_of_another_launcher_or_leftover_variables_train_alone(env):
    assert read_environment(env).is_alone


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MANIPLE_SEED"])
def test_variable_that_is_no_number_is_named(name):
    with pytest.raises(InvalidArgument, match=f"{name}='two'"):
        read_environment({"MANIPLE_SEGMENT": "/dev/shm/maniple-1", name: "two"})


def test_shared_memory_is_dev_shm_by_default():
    assert shared_memory({}) == Path("/dev/shm")
    assert shared_memory({"MANIPLE_SHM": "/mnt/ram"}) == Path("/mnt/ram")


def test_empty_variable_does_not_put_the_center_into_the_current_folder():
    assert shared_memory({"MANIPLE_SHM": ""}) == Path("/dev/shm")


def test_thread_variables_that_the_user_set_are_known():
    assert read_threads({"OMP_NUM_THREADS": "8", "PATH": "/bin"}) == {"OMP_NUM_THREADS": "8"}
    assert read_threads(dict.fromkeys(THREAD_VARIABLES, "1")) == dict.fromkeys(THREAD_VARIABLES, "1")


def test_worker_does_not_inherit_the_settings_of_a_surrounding_run_or_shell():
    around = {"MANIPLE_RULE": "downpour", "MANIPLE_PACE": "every:3", "MANIPLE_WIRE": "", "PATH": "/bin"}
    environment = Environment(segment=Path("/dev/shm/maniple-1"))
    assert read_environment(inherited_variables(around) | variables_for(environment)) == environment
    assert inherited_variables(around) == {"PATH": "/bin"}


def test_worker_reaches_its_own_host_whatever_others_the_shell_knows():
    around = {"MANIPLE_ADDRESS": "a:1", "MANIPLE_TOKEN": "t", "MANIPLE_CERTIFICATE": "c", "MANIPLE_DEVICE": "cuda:1"}
    assert inherited_variables(around) == {"MANIPLE_DEVICE": "cuda:1"}


def test_options_have_variables_apart_from_those_of_an_environment():
    assert option_variable("snapshot_every") == "MANIPLE_SNAPSHOT_EVERY"
    assert option_variable("rule") == "MANIPLE_RULE", "it means the same for both"
    assert option_variable("certificate") == "MANIPLE_OPTION_CERTIFICATE"
    names = variables_for(Environment(certificate=Path("c"), key=Path("k")))
    for key in ("workers", "restarts", "certificate", "key", "devices", "runs"):
        assert option_variable(key) not in names


def test_variables_that_are_set_are_found_and_empty_ones_are_none():
    env = {"MANIPLE_WORKERS": "3", "MANIPLE_RULE": "asgd", "MANIPLE_SEED": "", "MANIPLE_CERTIFICATE": "host.pem"}
    keys = ["workers", "rule", "seed", "certificate", "every"]
    assert options_from_variables(keys, env) == {"workers": "3", "rule": "asgd"}


def test_what_a_launcher_wrote_for_its_worker_is_nobody_s_wish():
    env = {"MANIPLE_WORKERS": "3"} | variables_for(Environment(segment=Path("/dev/shm/maniple-1"), rule="asgd", seed=7))
    assert options_from_variables(["workers", "rule", "seed", "host_deadline"], env) == {"workers": "3"}


def test_personal_settings_stand_where_others_have_theirs():
    assert personal_settings({"HOME": "/home/ada"}) == Path("/home/ada/.config/maniple.yaml")
    assert personal_settings({"HOME": "/home/ada", "XDG_CONFIG_HOME": "/etc/ada"}) == Path("/etc/ada/maniple.yaml")


def test_a_worker_that_joins_another_host_takes_nothing_of_its_own_environment_along():
    outer = variables_for(Environment(rank=1, world=2, segment=Path("/dev/shm/outer"), token="theirs", restarts=0))
    there = variables_to_join(Environment(address="10.0.0.9:29400", token="ours"), outer | {"PATH": "/bin"})
    environment = read_environment(there)
    assert (environment.segment, environment.rank, environment.token) == (None, 0, "ours")
    assert environment.address == "10.0.0.9:29400"
    assert there["PATH"] == "/bin"
    kept = variables_to_join(
        Environment(address="10.0.0.9:29400"), {"MANIPLE_TOKEN": "t", "MANIPLE_CERTIFICATE": "c.pem"}
    )
    assert (read_environment(kept).token, read_environment(kept).certificate) == ("t", Path("c.pem"))


def test_a_run_inside_a_worker_does_not_take_its_threads_and_device_for_a_wish():
    written = variables_for(Environment(segment=Path("/dev/shm/outer"), device="cuda:3")) | {"OMP_NUM_THREADS": "8"}
    assert read_threads(written) == {}
    assert "MANIPLE_DEVICE" not in inherited_variables(written)
    assert read_threads({"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "8"}
    assert inherited_variables({"MANIPLE_DEVICE": "cpu"}) == {"MANIPLE_DEVICE": "cpu"}
