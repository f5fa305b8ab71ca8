"""A host killed at any instant of a contribution: nothing is lost, nothing applied twice."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.center import Segment, Shared
from maniple.center.stage import Intent, Stage, finish_all, word_of, words
from maniple.contracts import Moment
from maniple.rules import Downpour, blocks

COUNT = 100_000  # 800 kB: 25 blocks, the last one not full
WORD = word_of(1, 1)


@pytest.fixture
def segment(tmp_path, monkeypatch):
    monkeypatch.setattr("maniple.center.stage.kernels", lambda: blocks)  # whose every step can be counted
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    center, _ = Shared.open_or_create(segment, "center-0", adapt({"v": np.zeros(3), "w": np.ones(COUNT)}), rank=0)
    center.close()
    yield segment
    segment.remove()


def opened(segment: Segment) -> Shared:
    center = Shared.open(segment, segment.path / "center-0")
    assert center is not None
    return center


def commit(segment: Segment, *, die_after: int | None = None) -> None:
    """Add 5 to every element of `w`; die by SIGKILL after so many writes to the stage's head."""
    with contextlib.closing(opened(segment)) as center, contextlib.closing(Stage.of(segment.path, "a")) as stage:
        value = stage.reserve(8 * COUNT).view(np.float64)
        value[:] = 5
        if die_after is not None:
            stage._head = Mortal(stage._head, die_after)
            stage._progress = Mortal(stage._progress, 0, stage._head)
        with center.held(1):
            stage.commit(center, Intent("center-0", 1, "blend", 1.0, 1.0, WORD, COUNT), value, answer=blocks.VALUE)


def commit_some(segment: Segment, *, die_after: int | None = None) -> None:
    """Add 5 to some elements of `w`, to one of them twice."""
    with contextlib.closing(opened(segment)) as center, contextlib.closing(Stage.of(segment.path, "a")) as stage:
        stage.reserve(1000)
        if die_after is not None:
            stage._head = Mortal(stage._head, die_after)
        with center.held(1):
            intent = Intent("center-0", 1, "blend", 1, 1, WORD, 3, is_sparse=True)
            stage.commit_at(center, intent, np.array([7, 9, 7]), np.full(3, 5.0))


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
        return center.read(1), words(segment.path).get("a", 0)


@pytest.mark.parametrize("act", [commit, commit_some])
def test_host_killed_between_any_two_steps_has_applied_all_or_nothing_and_knows_which(segment, act):
    act(segment)
    whole, _ = state(segment)
    writes = 0
    while True:
        for path in segment.path.glob("stage-*"):
            path.unlink()
        with contextlib.closing(opened(segment)) as center:
            center.array(1)[:] = 1
        if not dies(act, segment, writes):
            break
        finish_all(segment.path, lambda name: opened(segment))
        value, word = state(segment)
        expected = whole if word == WORD else np.ones(COUNT)
        np.testing.assert_array_equal(value, expected, err_msg=f"killed after {writes} writes")
        with contextlib.closing(opened(segment)) as center:
            assert not center.is_torn(1)
        writes += 1
    assert writes > (5 if act is commit_some else 12)


def test_local_worker_finishes_what_a_killed_host_has_begun_before_it_adds_its_own(segment):
    for writes in range(5, 10):
        with contextlib.closing(opened(segment)) as center:
            center.array(1)[:] = 1
        for path in segment.path.glob("stage-*"):
            path.unlink()
        assert dies(commit, segment, writes)
        params = {"v": np.zeros(3), "w": np.ones(COUNT) + 2}
        local, _ = Shared.open_or_create(segment, "center-0", adapt(params), rank=1)
        outcome = local.exchange(adapt(params), Downpour(), [np.zeros(3), np.ones(COUNT)], Moment())
        local.close()
        assert outcome.torn == []
        value, word = state(segment)
        assert word == WORD
        np.testing.assert_array_equal(value, 1 + 5 + 2)
        assert finish_all(segment.path, lambda name: opened(segment)) == 0


def test_stage_of_a_quiet_worker_takes_a_page(segment, tmp_path: Path):
    commit(segment)
    stage = Stage.of(segment.path, "a")
    stage.shrink()
    assert (segment.path / "stage-a").stat().st_size == 4096
    assert stage.word == WORD
    stage.close()
    commit(segment)
    stage = Stage.of(segment.path, "a")
    stage.remove()
    assert not (segment.path / "stage-a").exists()
