"""Workers of one machine agree on where gradients meet that lie on GPUs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maniple.center import Segment
from maniple.center.segment import DEAD, LEFT, LIVE
from maniple.circle import choice
from maniple.circle.choice import Decided, Offer, agree
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.place import Place

WORLD = 3


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ["MANIPLE_SHM"]), "0" * 16, tmp_path)
    for rank in range(WORLD):
        segment.mark(rank, LIVE)
    yield segment
    segment.remove()


def gpu(rank: int) -> Offer:
    return Offer(f"cuda:{rank}", f"GPU-{rank}")


def asked(segment: Segment, rank: int, offer: Offer, **settings) -> Decided:
    restarts = settings.pop("restarts", 0)
    deadline_s = settings.pop("deadline_s", 60.0)
    place = Place(
        rank=rank, world=WORLD, segment=segment.path, launcher="maniple", circle_deadline_s=deadline_s, **settings
    )
    return agree(place, segment, "circle-0", offer, restarts=lambda: restarts, on_wait=lambda: None)


def all_asked(segment: Segment, offers: dict[int, Offer], **settings) -> dict[int, str]:
    """What the workers agree on who come all at once."""
    found: dict[int, str] = {}

    def ask(rank: int) -> None:
        found[rank] = asked(segment, rank, offers[rank], **settings).engine

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in offers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_workers_with_gpus_of_their_own_meet_over_nccl(segment):
    assert all_asked(segment, {rank: gpu(rank) for rank in range(WORLD)}) == dict.fromkeys(range(WORLD), "torch")


@pytest.mark.parametrize("odd", range(WORLD))
def test_one_worker_on_the_cpu_has_all_meet_in_host_memory(segment, odd):
    offers = {rank: gpu(rank) for rank in range(WORLD)} | {odd: Offer("cpu")}
    if odd == 0:  # which does not wait for the others, and they not for it to decide
        assert asked(segment, 0, offers[0]).engine == "shared"
    assert all_asked(segment, offers) == dict.fromkeys(range(WORLD), "shared")


def test_worker_on_the_cpu_waits_for_nobody(segment):
    assert asked(segment, 1, Offer("cpu"), deadline_s=0.0).engine == "shared"


def test_worker_that_is_gone_before_it_could_say_where_its_model_lies_is_not_waited_for(segment):
    segment.mark(2, DEAD)
    assert all_asked(segment, {0: gpu(0), 1: gpu(1)}) == {0: "shared", 1: "shared"}
    segment.mark(2, LIVE)
    assert asked(segment, 2, gpu(2)).engine == "shared", "it is back, and takes what was decided"


def test_the_others_decide_if_worker_0_is_gone(segment, monkeypatch):
    monkeypatch.setattr(choice, "_RETURN_S", 0.05)
    segment.mark(0, LEFT)
    assert all_asked(segment, {1: gpu(1), 2: gpu(2)}) == {1: "shared", 2: "shared"}


def test_worker_that_does_not_come_is_named(segment):
    with pytest.raises(WaitedTooLong, match=r"worker 1, 2 has not said within 0\.05 s where its model lies"):
        asked(segment, 0, gpu(0), deadline_s=0.05)
    with pytest.raises(WaitedTooLong, match="worker 0 has not said"):
        asked(segment, 1, gpu(1), deadline_s=0.05)


def test_workers_that_may_come_back_meet_in_host_memory(segment):
    offers = {rank: gpu(rank) for rank in range(WORLD)}
    assert set(all_asked(segment, offers, restarts=1).values()) == {"shared"}


def test_worker_that_joins_those_who_meet_over_nccl_is_told_why_it_cannot(segment):
    all_asked(segment, {rank: gpu(rank) for rank in range(WORLD)})
    with pytest.raises(InvalidArgument, match=r"takes in nobody.*--circle shared"):
        asked(segment, WORLD, gpu(WORLD))
