"""The doctor's own mechanism, and Slurm's words."""

import threading

import pytest

from maniple.doctor import CHECKS, Case, examine, glance
from maniple.doctor.checks import Check, Finding, fine, grave, warning
from maniple.doctor.queues import parse_nodes
from maniple.environment.variables import binding_variables, values_of, visible_gpus
from maniple.errors import InvalidArgument
from maniple.job import RayResources
from maniple.queues.slurm import duration_s, size_mb


def check(name: str, look, **rest) -> Check:
    return Check(name, "machine", look, **rest)


def fail(case: Case) -> list[Finding]:
    raise ZeroDivisionError("by zero")


def refuse(case: Case) -> list[Finding]:
    raise InvalidArgument("2 is no address. Write HOST:PORT.")


def test_findings_come_in_the_order_of_the_list_and_name_their_check():
    second = threading.Event()

    def slow(case: Case) -> list[Finding]:
        assert second.wait(30), "checks run at the same time"
        return [fine("slow")]

    def quick(case: Case) -> list[Finding]:
        second.set()
        return [fine("quick"), warning("seen", limit="limit", fix="Do this.")]

    found = examine(Case(), [check("first", slow), check("second", quick)])
    assert [(one.check, str(one)) for one in found] == [
        ("first", "slow."),
        ("second", "quick."),
        ("second", "seen (limit). Do this."),
    ]


def test_an_error_in_one_check_is_a_finding_and_hides_no_other():
    found = examine(Case(), [check("a", fail), check("b", refuse), check("c", lambda _: [fine("well")])])
    assert [one.level for one in found] == ["warning", "grave", "ok"]
    assert "ZeroDivisionError: by zero" in found[0].seen
    assert str(found[1]) == "2 is no address. Write HOST:PORT."


def test_what_others_have_said_becomes_one_line():
    assert str(grave("ssh:\n  no route\n", limit="5 s", fix="Go.")) == "ssh: no route (5 s). Go."


def test_launchers_tell_what_quick_checks_find_that_is_not_fine():
    warn = lambda _: [fine("a"), warning("b", limit="", fix="Do."), grave("c", limit="", fix="Do.")]  # noqa: E731
    found = glance(Case(), [check("quick", warn, is_quick=True), check("slow", warn)])
    assert [(one.check, one.seen) for one in found] == [("quick", "b"), ("quick", "c")]


def test_launchers_do_not_wait_for_a_check_that_hangs(monkeypatch):
    monkeypatch.setattr("maniple.doctor.checks._GLANCE_S", 0.01)
    end = threading.Event()

    def hang(case: Case) -> list[Finding]:
        end.wait(60)
        return [warning("late", limit="", fix="Do.")]

    assert glance(Case(), [check("hangs", hang, is_quick=True)]) == []
    end.set()


def test_what_several_checks_need_is_found_out_once():
    case, calls = Case(), []
    looks = [check(str(i), lambda case: [fine(str(case.once("x", lambda _: calls.append(1) or 7)))]) for i in range(5)]
    assert {one.seen for one in examine(case, looks)} == {"7"}
    assert calls == [1]


def test_checks_wait_only_for_what_they_need():
    case, other = Case(), threading.Event()

    def wait(case: Case) -> list[Finding]:
        return [fine(str(case.once("slow", lambda _: other.wait(30))))]

    def free(case: Case) -> list[Finding]:
        return [fine(str(case.once("other", lambda _: other.set())))]

    assert [one.seen for one in examine(case, [check("a", wait), check("b", free)])] == ["True", "None"]


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "level", "words"),
    [
        (1, 1, 3, "ok", "3 fit at a time"),
        (2, 0, 4, "warning", "3 fit at a time"),
        (5, 0, 1, "grave", "no node has 5 CPUs"),
        (1, 3, 1, "grave", "the largest have 4 CPUs and 2 GPUs"),
    ],
)
def test_workers_fit_on_nodes_of_ray_or_not(cpus, gpus, workers, level, words):
    case = Case(workers=workers, ray=RayResources("auto", cpus, gpus))
    case.once("ray", lambda _: [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}, {"memory": 9.0}])
    found = examine(case, [one for one in CHECKS if one.name == "resources"])
    assert [one.level for one in found] == [level]
    assert words in str(found[0])


def test_no_two_checks_have_one_name():
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    assert {one.of for one in CHECKS} == {"machine", "host", "run", "slurm", "ray", "hosts"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("90:10", 5410), ("3:00:00", 10800), ("1-12", 129_600), ("1-00:30", 88_200),
        ("2-01:00:05", 176_405), ("infinite", float("inf")), ("UNLIMITED", float("inf")),
    ],
)  # fmt: skip
def test_durations_are_read_as_slurm_reads_them(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-1", "1h", "3:00:"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(InvalidArgument, match="is no time"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "megabytes"), [("4000", 4000), ("4G", 4096), ("512m", 512), ("1T", 1 << 20), ("2048K", 2)]
)
def test_sizes_are_read_as_slurm_reads_them(text, megabytes):
    assert size_mb(text) == megabytes
    with pytest.raises(InvalidArgument, match="no size"):
        size_mb(f"{text}x")


def test_nodes_are_read_as_sinfo_prints_them():
    first, second = parse_nodes(
        "main*|up|infinite|n1|8|16000|(null)|idle~\ngpu|down|30:00|g1|64+|256000+|gpu:a100:4(S:0-1),gpu:2|mix\n"
    )
    assert (first.partition, first.is_default, first.is_up, first.gpus, first.state) == ("main", True, True, 0, "idle")
    assert (second.partition, second.is_default, second.is_up, second.cpus) == ("gpu", False, False, 64)
    assert (second.gpus, second.limit_s, second.memory_mb) == (6, 1800, 256_000)
    assert first.is_usable
    assert not parse_nodes("main|up|1|n1|1|1|(null)|drained*\n")[0].is_usable


def test_variables_of_this_machine_are_read_in_one_place():
    env = {"OMP_PROC_BIND": "true", "KMP_AFFINITY": "", "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4"}
    assert binding_variables(env) == {"OMP_PROC_BIND": "true"}
    assert values_of(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), env) == {"OMP_NUM_THREADS": "4"}
    assert visible_gpus(env) == "1"
    assert visible_gpus({}) is None
