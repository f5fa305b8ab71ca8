"""A host killed at any instant of a contribution: nothing is lost, nothing applied twice."""

import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.gate import Gate
from maniple.center.shared import finish_all
from maniple.center.staging import AppliedTable, Intent, StagingFiles, applied_number, by_worker
from maniple.contracts import ExchangeInfo, Operation
from maniple.errors import SharedMemoryFull
from maniple.rules import Downpour
from maniple.rules.kernels import numpy_kernels as blocks

pytestmark = pytest.mark.usefixtures("entry_chunks")

COUNT = 100_000  # 800 kB: 25 blocks, the last one not full
NUMBER = applied_number(1, 1)


@pytest.fixture
def segment(tmp_path, monkeypatch):
    monkeypatch.setattr("maniple.center.staging.kernels", lambda: blocks)  # whose every step can be counted
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    center, _ = SharedCenter.open_or_create(segment, "center-0", adapt({"v": np.zeros(3), "w": np.ones(COUNT)}), rank=0)
    center.close()
    yield segment
    segment.remove()


def applied(segment: Segment) -> dict[str, int]:
    return by_worker(AppliedTable(segment.path).rows())


def opened(segment: Segment) -> SharedCenter:
    center = SharedCenter.open(segment, segment.path / "center-0")
    assert center is not None
    return center


def commit(segment: Segment, *, die_after: int | None = None) -> None:
    """Add 5 to every element of `w`; die by SIGKILL after so many writes to the stage's head."""
    with (
        contextlib.closing(opened(segment)) as center,
        contextlib.closing(StagingFiles(segment.path).open("a")) as stage,
    ):
        value = stage.reserve(8 * COUNT).view(np.float64)
        value[:] = 5
        if die_after is not None:
            stage._head = Mortal(stage._head, die_after)
            stage._progress = Mortal(stage._progress, 0, stage._head)
            stage._numbers = Mortal(stage._numbers, 0, stage._head)
        with center.locked(1):
            stage.commit(center, Intent("center-0", 1, "blend", 1.0, 1.0, NUMBER, COUNT), value, answer=blocks.VALUE)


def commit_some(segment: Segment, *, die_after: int | None = None) -> None:
    """Add 5 to some elements of `w`, to one of them twice."""
    with (
        contextlib.closing(opened(segment)) as center,
        contextlib.closing(StagingFiles(segment.path).open("a")) as stage,
    ):
        stage.reserve(1000)
        if die_after is not None:
            stage._head = Mortal(stage._head, die_after)
            stage._numbers = Mortal(stage._numbers, 0, stage._head)
        with center.locked(1):
            intent = Intent("center-0", 1, "blend", 1, 1, NUMBER, 3, is_sparse=True)
            stage.commit_at(center, intent, np.array([7, 9, 7]), np.full(3, 5.0))


def commit_gated(segment: Segment, *, die_after: int | None = None) -> None:
    """Add 5 to every element of `w`, of which the gate lets a small part through."""
    model, gate = adapt({"v": np.zeros(3), "w": np.ones(COUNT)}), f"changes {Gate()}"
    with (
        contextlib.closing(SharedCenter.open_or_create(segment, "center-0", model, rank=0, gate=gate)[0]) as center,
        contextlib.closing(StagingFiles(segment.path).open("a")) as stage,
    ):
        assert center.gate is not None
        for _ in range(center.gate.gate.window):
            center.gate.weigh(1, Operation("blend"), [(np.ones(1), None)], 0)
        value = stage.reserve(8 * COUNT).view(np.float64)
        value[:] = 5
        if die_after is not None:
            stage._head = Mortal(stage._head, die_after)
            stage._progress = Mortal(stage._progress, 0, stage._head)
            stage._numbers = Mortal(stage._numbers, 0, stage._head)
        with center.locked(1):
            intent = Intent("center-0", 1, "blend", 1.0, 1.0, NUMBER, COUNT)
            assert 0 < center.gate.adjust(intent, value, center.array(1), 0).factor < 0.01
            stage.commit(center, intent, value, answer=blocks.VALUE)


class Mortal:
    """The head of a stage whose process dies after some writes."""

    def __init__(self, head: Any, writes: int, clock: "Mortal | None" = None) -> None:
        self._head, self._writes, self._clock = head, writes, clock or self

    def __getitem__(self, i: int) -> int:
        return self._head[i]

    def __setitem__(self, i: int, value: int) -> None:
        if self._clock._writes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._clock._writes -= 1
        self._head[i] = value


def dies(act: Any, segment: Segment, writes: int) -> bool:
    """Let a child do it; True if it died on the way."""
    pid = os.fork()
    if pid == 0:
        act(segment, die_after=writes)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def state(segment: Segment) -> tuple[np.ndarray, int]:
    with contextlib.closing(opened(segment)) as center:
        return center.read(1), applied(segment).get("a", 0)


@pytest.mark.parametrize("act", [commit, commit_some, commit_gated])
def test_host_killed_between_any_two_steps_has_applied_all_or_nothing_and_knows_which(segment, act):
    act(segment)
    whole, _ = state(segment)
    writes = 0
    while True:
        StagingFiles(segment.path).forget("a")
        with contextlib.closing(opened(segment)) as center:
            center.array(1)[:] = 1
        if not dies(act, segment, writes):
            break
        finish_all(segment)
        value, word = state(segment)
        expected = whole if word == NUMBER else np.ones(COUNT)
        np.testing.assert_array_equal(value, expected, err_msg=f"killed after {writes} writes")
        with contextlib.closing(opened(segment)) as center:
            assert not center.is_torn(1)
        writes += 1
    assert writes > (5 if act is commit_some else 12)


def test_local_worker_finishes_what_a_killed_host_has_begun_before_it_adds_its_own(segment):
    for writes in range(5, 10):
        with contextlib.closing(opened(segment)) as center:
            center.array(1)[:] = 1
        StagingFiles(segment.path).forget("a")
        assert dies(commit, segment, writes)
        params = {"v": np.zeros(3), "w": np.ones(COUNT) + 2}
        local, _ = SharedCenter.open_or_create(segment, "center-0", adapt(params), rank=1)
        outcome = local.exchange(
            adapt(params), Downpour(), [{"center": np.zeros(3)}, {"center": np.ones(COUNT)}], ExchangeInfo()
        )
        local.close()
        assert outcome.torn == []
        value, word = state(segment)
        assert word == NUMBER
        np.testing.assert_array_equal(value, 1 + 5 + 2)
        assert finish_all(segment) == 0


# Workers that are away


def test_worker_that_is_away_has_a_word_and_no_stage(segment):
    commit(segment)
    stages = StagingFiles(segment.path)
    stages.retire("a", stages.open("a"))
    assert not (segment.path / "stage-a").exists()
    assert applied(segment) == {"a": NUMBER}
    again = stages.open("a")
    assert (again.is_known, again.applied) == (True, NUMBER)
    again.close()
    stages.forget("a")
    assert not list(segment.path.glob("stage-*")) and applied(segment) == {}


def test_successor_of_a_killed_server_keeps_the_words_of_its_workers_and_not_their_stages(segment):
    commit(segment)
    stages = StagingFiles(segment.path)
    for k in range(50):
        stage = stages.open(f"worker{k}")
        stage.skip(applied_number(k + 1, 1))
        stage.close()
    assert dies(commit_some, segment, 4)  # half-way, and its parameter is gone from memory
    before = applied(segment)
    (segment.path / "center-0").rename(segment.path / "elsewhere")
    successor = StagingFiles(segment.path)
    successor.remove_leftovers()
    assert [path.name for path in segment.path.glob("stage-*")] == ["stage-a"], "what is not finished stays"
    assert applied(segment) == before
    assert successor.open("worker7").applied == applied_number(8, 1)
    (segment.path / "elsewhere").rename(segment.path / "center-0")


def test_those_who_have_been_away_for_the_longest_time_are_forgotten_and_that_is_known(segment, monkeypatch):
    monkeypatch.setattr("maniple.center.staging.ROWS", 4)
    stages = StagingFiles(segment.path)
    opened = {name: stages.open(name) for name in "abcd"}
    for number, name in enumerate("bcd", 1):
        opened[name].skip(applied_number(number, 1))
        stages.retire(name, opened[name])
    stages.retire("b", stages.open("b"))  # back for a moment: now c is the one that has been away for the longest time
    assert stages.forgotten == 0
    assert not stages.open("e").is_known
    assert stages.forgotten == 1
    assert set(applied(segment)) == {"a", "b", "d", "e"}, "a is connected, and stays"
    successor = StagingFiles(segment.path)
    assert successor.forgotten == 1
    assert successor.open("b").applied == applied_number(1, 1)
    assert not successor.open("c").is_known
    with pytest.raises(SharedMemoryFull, match="cannot serve more"):
        for name in "vwxyz":
            successor.open(name)
