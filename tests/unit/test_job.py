"""The job: each worker's arguments, device, cores and thread variables."""

from pathlib import Path

import click
import msgspec
import pytest

from maniple.cli import cli
from maniple.cli.make_job import job_from
from maniple.environment import THREAD_VARIABLES
from maniple.errors import InvalidArgument
from maniple.host.listener import Listen
from maniple.job import ExternalWorkers, Job, thread_variables
from maniple.launch.resume import with_saved_settings
from maniple.memory.segment import MAX_WORKERS
from maniple.settings.options import Limits
from maniple.wire.address import Address


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_workers": 0}, r"--min-workers 0 is out of range \(1 or more\)"),
        ({"workers": 2, "min_workers": 3}, "--min-workers 3 is more than the 2 workers"),
        ({"workers": 2, "min_workers": 2, "strict": True}, "--strict ends the run when any worker dies"),
    ],
)
def test_workers_that_must_be_left_are_checked(values, words):
    with pytest.raises(InvalidArgument, match=words):
        job(**values).check()
    job(workers=2, min_workers=2).check()


def test_validate_every_is_refused_for_a_model_which_validates_after_each_epoch():
    with pytest.raises(InvalidArgument, match=r"--validate-every 5 .* validates after each epoch"):
        job(model=f"{__file__}:Net", limits=Limits(validate_every=5)).check()
    job(model=f"{__file__}:Net", limits=Limits(patience=5)).check()


def test_negative_restarts_are_refused():
    with pytest.raises(InvalidArgument, match="--restarts -1"):
        job(restarts=-1).check()


def test_negative_seed_is_refused_before_workers_start():
    with pytest.raises(InvalidArgument, match="seed"):
        job(seed=-1).check()


def test_missing_script_names_the_closest_one(tmp_path):
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


def test_the_requested_settings_are_recorded():
    asked = job(args=("a",), workers=2, rule="easgd", pace="every:5", devices=("cpu",), restarts=1, seed=9).record()
    expected = {
        "session": None,
        "args": ["a"],
        "workers": 2,
        "launcher": "maniple",
        "rule": "easgd",
        "default_rule": None,
        "pace": "every:5",
        "overlap": False,
        "devices": ["cpu"],
        "hosts": [],
        "ray": None,
        "restarts": 1,
        "seed": 9,
        "min_workers": 1,
        "strict": False,
        "wire": None,
        "collectives": None,
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
        "target": None,
        "stop_at_target": False,
        "baseline": None,
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


def test_resumed_run_has_the_settings_it_began_with(tmp_path):
    before = job(seed=7, rule="easgd", controller="c.py:C", controller_args=("a=1",), limits=Limits(patience=3))
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"asked": before.record()}))
    again = with_saved_settings(job(resume=tmp_path, rule="asgd"), tmp_path)
    assert (again.seed, again.rule, again.controller, again.controller_args) == (
        7,
        "asgd",
        f"{Path.cwd()}/c.py:C",
        ("a=1",),
    )
    assert again.limits == Limits(), "a person says anew when to stop"
    assert with_saved_settings(job(script=None, resume=tmp_path), tmp_path).limits == Limits(patience=3)
    assert with_saved_settings(job(resume=tmp_path, seed=7), tmp_path).seed == 7
    with pytest.raises(InvalidArgument, match=r"--seed 8 .* seed is 7"):
        with_saved_settings(job(resume=tmp_path, seed=8), tmp_path)


@pytest.mark.parametrize("device", ["gpu0", "cuda:x", "0", "cuda 0", "cuda:0;1"])
def test_a_word_that_is_no_device_is_refused(device):
    with pytest.raises(InvalidArgument, match="is no device"):
        job(devices=("cpu", device)).check()


def test_a_missing_script_is_not_answered_by_one_with_another_name(tmp_path):
    (tmp_path / "stdin.py").touch()
    with pytest.raises(InvalidArgument, match="there is no script") as refused:
        job(script=tmp_path / "train.py").check()
    assert "Did you mean" not in str(refused.value)


def resumed(run: Path, *words: str) -> Job:
    """The job of `maniple run --resume RUN`, with more words."""
    return job_of("--resume", str(run), *words)


def job_of(*words: str) -> Job:
    """The job of `maniple run` with these words."""
    found: list[Job] = []

    @click.command(params=cli.commands["run"].params, context_settings={"allow_interspersed_args": False})
    def command(**options) -> None:
        found.append(job_from(**options))

    command.main(list(words), standalone_mode=False)
    return found[0]


@pytest.mark.parametrize("wire", ["int4", "topk"])
def test_a_codec_for_changes_is_refused_for_a_rule_that_sends_values(wire, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert job_of("--rule", "downpour", "--wire", wire, str(script)).wire == wire
    with pytest.raises(InvalidArgument, match=f"wire='{wire}' carries changes only"):
        job_of("--rule", "easgd", "--wire", wire, str(script))


def write_run(run: Path, begun: Job, **about) -> None:
    (run / "run.json").write_bytes(msgspec.json.encode({"asked": begun.record(), "lineage": "ab"} | about))


def test_a_run_is_resumed_with_its_script_arguments_and_workers(tmp_path):
    limits = Limits(max_epochs=4)
    begun = job(args=("--lr", "0.1"), workers=3, restarts=2, feeds=(__file__,), limits=limits, deterministic=True)
    write_run(tmp_path, begun, exit_code=130)
    again = resumed(tmp_path)
    assert (again.script, again.args, again.workers) == (Path(__file__).resolve(), ("--lr", "0.1"), 3)
    assert (again.restarts, again.feeds, again.limits, again.deterministic) == (2, (__file__,), limits, True)
    other = resumed(tmp_path, "-n", "2", "--restarts", "0", "--max-epochs", "9")
    assert (other.workers, other.restarts, other.limits.max_epochs) == (2, 0, 9), "what is given now counts more"
    named = resumed(tmp_path, "other.py", "--lr", "0.2")
    assert (named.script, named.args, named.workers, named.limits) == (Path("other.py"), ("--lr", "0.2"), 1, Limits())
    write_run(tmp_path, begun, exit_code=0)
    assert resumed(tmp_path).limits == Limits(), "a limit that was reached would end it at once"


def test_the_model_and_the_machines_of_a_run_are_resumed_too(tmp_path):
    begun = job(model=f"{__file__}:Net", model_args=("lr=0.1",), workers=4, hosts=("a", "b"), devices=("cpu", "cuda:0"))
    write_run(tmp_path, begun)
    again = with_saved_settings(resumed(tmp_path), tmp_path)
    assert (again.model, again.model_args) == (f"{Path(__file__).resolve()}:Net", ("lr=0.1",))
    assert (again.workers, again.hosts, again.devices) == (4, ("a", "b"), ("cpu", "cuda:0"))
    again.check()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"lineage": None}, "is no run folder"),
        ({"asked": {"script": None}}, "host alone, which `maniple serve --resume`"),
        ({"asked": {"script": "t.py", "launcher": "torchrun"}}, "torchrun has started.*MANIPLE_RESUME"),
    ],
)
def test_a_run_that_names_no_script_is_resumed_by_other_means(tmp_path, about, said):
    write_run(tmp_path, job(), **about)
    with pytest.raises(InvalidArgument, match=rf"names no script to run: it .*{said}"):
        resumed(tmp_path)


def test_the_script_of_another_users_run_is_not_started_unless_it_is_named(tmp_path, monkeypatch):
    write_run(tmp_path, job())
    monkeypatch.setattr("os.getuid", lambda: (tmp_path / "run.json").stat().st_uid + 1)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        resumed(tmp_path)
    assert resumed(tmp_path, "train.py").script == Path("train.py")


TORCHRUN = ExternalWorkers("torchrun", 2, tie=-1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "bsp"),
        ({"devices": ("cpu", "cpu")}, "bsp"),
        ({"wire": "bfloat16"}, "bsp"),
        ({"rule": "easgd"}, None),  # named
        ({"pace": "every:10"}, "easgd"),  # values are exchanged, which bsp does not do
        ({"wire": "int8"}, "bsp"),
        ({"wire": "topk"}, "bsp"),  # gradients are changes
        ({"hosts": ("a", "b")}, "easgd"),
        ({"listen": Listen(Address("127.0.0.1", 0))}, "easgd"),  # workers may join
        ({"devices": ("cuda:0", "cpu")}, "easgd"),  # of unequal speed
        ({"script": None}, None),  # a host alone
        ({"script": None, "external": TORCHRUN, "listen": Listen(Address("127.0.0.1", 0))}, "bsp"),
        ({"script": None, "external": TORCHRUN, "listen": Listen(Address("0.0.0.0", 0))}, "easgd"),  # several machines
    ],
)
def test_default_rule_is_synchronous_only_for_equal_workers_of_one_machine(options, expected):
    assert job(workers=2, **options).with_default_rule().default_rule == expected


@pytest.mark.parametrize(
    ("before", "options", "expected"),
    [
        ("bsp", {}, "bsp"),
        ("bsp", {"pace": "every:20"}, "easgd"),
        ("bsp", {"wire": "int8"}, "bsp"),
        ("bsp", {"listen": Listen(Address("127.0.0.1", 0))}, "easgd"),
        ("bsp", {"script": None}, None),  # `maniple serve`, which workers anywhere join
        ("bsp", {"rule": "localsgd"}, None),
        ("easgd", {}, "easgd"),
        (None, {}, "easgd"),  # of a version that had no other
    ],
)
def test_resumed_run_keeps_its_default_rule_only_if_that_suits_the_new_options(tmp_path, before, options, expected):
    write_run(tmp_path, job(workers=2, default_rule=before))
    assert with_saved_settings(job(workers=2, resume=tmp_path, **options), tmp_path).default_rule == expected


def test_rule_that_is_named_counts_more_than_the_default():
    assert job(workers=2).with_default_rule().effective_rule == "bsp"
    assert job(workers=2, rule="localsgd").with_default_rule().effective_rule == "localsgd"
