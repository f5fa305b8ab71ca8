"""The job: each worker's arguments, device, cores and thread variables."""

from pathlib import Path

import msgspec
import pytest

from maniple.center.segment import MAX_WORKERS
from maniple.errors import InvalidArgument
from maniple.launch.job import Job, thread_variables
from maniple.launch.memory import remembered
from maniple.place import THREAD_VARIABLES, Limits


def job(**options) -> Job:
    return Job(**{"script": Path(__file__)} | options)


def test_rank_and_world_in_arguments_become_each_worker_s_own():
    asked = job(args=("--shard", "part-{rank}-of-{world}.npz", "{rank}{rank}"), workers=4)
    assert asked.arguments(3) == ["--shard", "part-3-of-4.npz", "33"]


@pytest.mark.parametrize("arg", ['{"lr": 0.1}', "{}", "{0}", "{Rank}", "{ rank }", "{rank!r}", "{{", "%s", "$rank", ""])
def test_other_braces_are_left_alone(arg):
    assert job(args=(arg,), workers=2).arguments(1) == [arg]


def test_workers_share_devices_in_turn():
    asked = job(workers=5, devices=("cuda:0", "cuda:1"))
    assert [asked.device(rank) for rank in range(5)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert job().device(0) is None


def test_thread_variables_are_set_except_where_the_user_has():
    assert thread_variables(2, {}) == dict.fromkeys(THREAD_VARIABLES, "2")
    left = thread_variables(2, {"MKL_NUM_THREADS": "7"})
    assert "MKL_NUM_THREADS" not in left
    assert left["OMP_NUM_THREADS"] == "2"


def test_a_user_s_omp_num_threads_holds_for_all_libraries():
    others = set(THREAD_VARIABLES) - {"OMP_NUM_THREADS"}
    assert thread_variables(2, {"OMP_NUM_THREADS": "1"}) == dict.fromkeys(others, "1")
    assert thread_variables(2, {"OMP_NUM_THREADS": "4,2"}) == dict.fromkeys(others, "2"), "a list is OpenMP's own"


@pytest.mark.parametrize("workers", [0, -1, MAX_WORKERS + 1])
def test_number_of_workers_out_of_range_is_refused(workers):
    with pytest.raises(InvalidArgument, match=f"{workers} workers"):
        job(workers=workers).check()


def test_negative_restarts_are_refused():
    with pytest.raises(InvalidArgument, match="--restarts -1"):
        job(restarts=-1).check()


def test_negative_seed_is_refused_before_workers_start():
    with pytest.raises(InvalidArgument, match="seed"):
        job(seed=-1).check()


def test_missing_script_names_the_near_one(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(InvalidArgument, match=r"Did you mean .*train\.py"):
        job(script=tmp_path / "trian.py").check()
    with pytest.raises(InvalidArgument, match="no script"):
        job(script=tmp_path / "nowhere" / "x.py").check()


def test_folder_is_no_script(tmp_path):
    with pytest.raises(InvalidArgument, match="no script"):
        job(script=tmp_path).check()


def test_good_job_passes():
    job(workers=MAX_WORKERS, restarts=3).check()


def test_each_host_has_its_share_of_the_workers():
    asked = job(workers=6, hosts=("a", "b"))
    assert asked.workers_per_node == 3
    assert [asked.node(rank) for rank in range(6)] == ["a", "a", "a", "b", "b", "b"]
    assert job(workers=2).node(1) is None
    assert job(workers=2).workers_per_node == 2


@pytest.mark.parametrize("hosts", [("-oProxyCommand=x",), ("a b",), ("",), ("a", "a")])
def test_what_is_no_list_of_hosts_is_refused(hosts):
    with pytest.raises(InvalidArgument, match="--hosts"):
        job(workers=2, hosts=hosts).check()


def test_what_was_asked_for_is_written_down():
    asked = job(args=("a",), workers=2, rule="easgd", pace="every:5", devices=("cpu",), restarts=1, seed=9).asked()
    expected = {
        "session": None,
        "args": ["a"],
        "workers": 2,
        "launcher": "maniple",
        "rule": "easgd",
        "pace": "every:5",
        "devices": ["cpu"],
        "hosts": [],
        "ray": None,
        "restarts": 1,
        "seed": 9,
        "wire": None,
        "circle": None,
        "deterministic": False,
        "listen": None,
        "controller": None,
        "controller_args": [],
        "max_batches": 0,
        "max_epochs": 0,
        "total_duration": 0.0,
        "validate_every": 0,
        "patience": 0,
        "snapshot_every": 300.0,
        "feeds": [],
        "producers": 1,
        "model": None,
        "model_args": [],
        "snapshot_epochs": None,
    }
    assert asked == {"script": str(Path(__file__).resolve())} | expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"feeds": ("nowhere.py",)}, "there is no script 'nowhere.py' for --feed"),
        ({"feeds": ("",)}, "there is no script"),
        ({"feeds": ("'",)}, "cannot be split into words"),
        ({"feeds": (__file__,), "producers": 0}, "--producers 0: 1 to 256 copies"),
    ],
)
def test_producers_that_cannot_be_started_are_refused_before_anything_starts(options, said):
    with pytest.raises(InvalidArgument, match=said):
        job(**options).check()


def test_feed_script_has_arguments_in_the_same_quotes():
    asked = job(feeds=(f"{__file__} --size 8 'two words'",))
    asked.check()
    assert asked.feed_command(0) == [__file__, "--size", "8", "two words"]


def test_run_that_goes_on_has_what_was_asked_for_when_it_began(tmp_path):
    before = job(seed=7, rule="easgd", controller="c.py:C", controller_args=("a=1",), limits=Limits(patience=3))
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"asked": before.asked()}))
    again = remembered(job(resume=tmp_path, rule="asgd"), tmp_path)
    assert (again.seed, again.rule, again.controller, again.controller_args) == (
        7,
        "asgd",
        f"{Path.cwd()}/c.py:C",
        ("a=1",),
    )
    assert again.limits == Limits(), "a person says anew when to stop"
    assert remembered(job(script=None, resume=tmp_path), tmp_path).limits == Limits(patience=3)
    assert remembered(job(resume=tmp_path, seed=7), tmp_path).seed == 7
    with pytest.raises(InvalidArgument, match=r"--seed 8 .* seed is 7"):
        remembered(job(resume=tmp_path, seed=8), tmp_path)


@pytest.mark.parametrize("device", ["gpu0", "cuda:x", "0", "cuda 0", "cuda:0;1"])
def test_a_word_that_is_no_device_is_refused(device):
    with pytest.raises(InvalidArgument, match="is no device"):
        job(devices=("cpu", device)).check()


def test_a_missing_script_is_not_answered_by_one_with_another_name(tmp_path):
    (tmp_path / "stdin.py").touch()
    with pytest.raises(InvalidArgument, match="there is no script") as refused:
        job(script=tmp_path / "train.py").check()
    assert "Did you mean" not in str(refused.value)
