"""Workers of one machine agree on where gradients meet that lie on GPUs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maniple.center import Segment
from maniple.collectives import engines as choice
from maniple.collectives.engines import EngineDecision, EngineOffer, agree_on_engine
from maniple.environment import Environment
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.memory.segment import DEAD, LEFT, LIVE

WORLD = 3


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ["MANIPLE_SHM"]), "0" * 16, tmp_path)
    for rank in range(WORLD):
        segment.mark(rank, LIVE)
    yield segment
    segment.remove()


def gpu(rank: int) -> EngineOffer:
    return EngineOffer(f"cuda:{rank}", f"GPU-{rank}")


def decision(segment: Segment, rank: int, offer: EngineOffer, **settings) -> EngineDecision:
    restarts = settings.pop("restarts", 0)
    deadline_s = settings.pop("deadline_s", 60.0)
    environment = Environment(
        rank=rank, world=WORLD, segment=segment.path, launcher="maniple", collectives_deadline_s=deadline_s, **settings
    )
    return agree_on_engine(
        environment, segment, "collectives-0", offer, restarts=lambda: restarts, on_wait=lambda: None
    )


def all_decisions(segment: Segment, offers: dict[int, EngineOffer], **settings) -> dict[int, str]:
    """What the workers agree on who come all at once."""
    found: dict[int, str] = {}

    def ask(rank: int) -> None:
        found[rank] = decision(segment, rank, offers[rank], **settings).engine

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in offers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_workers_with_gpus_of_their_own_reduce_over_nccl(segment):
    assert all_decisions(segment, {rank: gpu(rank) for rank in range(WORLD)}) == dict.fromkeys(range(WORLD), "torch")


@pytest.mark.parametrize("odd", range(WORLD))
def test_one_worker_on_the_cpu_makes_all_reduce_in_host_memory(segment, odd):
    offers = {rank: gpu(rank) for rank in range(WORLD)} | {odd: EngineOffer("cpu")}
    if odd == 0:  # which does not wait for the others, and they not for it to decide_engine
        assert decision(segment, 0, offers[0]).engine == "shared"
    assert all_decisions(segment, offers) == dict.fromkeys(range(WORLD), "shared")


def test_worker_on_the_cpu_waits_for_nobody(segment):
    assert decision(segment, 1, EngineOffer("cpu"), deadline_s=0.0).engine == "shared"


def test_worker_that_is_gone_before_it_could_say_where_its_model_lies_is_not_waited_for(segment):
    segment.mark(2, DEAD)
    assert all_decisions(segment, {0: gpu(0), 1: gpu(1)}) == {0: "shared", 1: "shared"}
    segment.mark(2, LIVE)
    assert decision(segment, 2, gpu(2)).engine == "shared", "it is back, and takes what was decided"


def test_the_others_decide_if_worker_0_is_gone(segment, monkeypatch):
    monkeypatch.setattr(choice, "_RETURN_S", 0.05)
    segment.mark(0, LEFT)
    assert all_decisions(segment, {1: gpu(1), 2: gpu(2)}) == {1: "shared", 2: "shared"}


def test_worker_that_does_not_come_is_named(segment):
    with pytest.raises(WaitedTooLong, match=r"worker 1, 2 has not said within 0\.05 s where its model is"):
        decision(segment, 0, gpu(0), deadline_s=0.05)
    with pytest.raises(WaitedTooLong, match="worker 0 has not said"):
        decision(segment, 1, gpu(1), deadline_s=0.05)


def test_workers_that_may_rejoin_reduce_in_host_memory(segment):
    offers = {rank: gpu(rank) for rank in range(WORLD)}
    assert set(all_decisions(segment, offers, restarts=1).values()) == {"shared"}


def test_worker_that_joins_a_group_over_nccl_is_refused_with_the_reason(segment):
    all_decisions(segment, {rank: gpu(rank) for rank in range(WORLD)})
    with pytest.raises(InvalidArgument, match=r"admits no newcomers.*--collectives shared"):
        decision(segment, WORLD, gpu(WORLD))
