"""A worker's seat at its host, where all begin together."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.center import Segment, Shared
from maniple.center.segment import DEAD, LIVE
from maniple.contracts import Center
from maniple.errors import PeerLost
from maniple.place import Place
from maniple.rules import BSP
from maniple.worker import seat
from maniple.worker.far import Far
from maniple.worker.seat import Near
from tests.serving import TOKEN, Serving


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ["MANIPLE_SHM"]), "0" * 16, tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def second(segment: Segment) -> Iterator[Near]:
    """The seat of worker 1 in a run that is to be repeatable; its host does not answer."""
    place = Place(rank=1, world=2, segment=segment.path, address="127.0.0.1:1", token="x", launcher="maniple")
    near = Near(place.told(deterministic=True), lambda: (0, 0, False))
    yield near
    near.leave(is_early=False)


def open_as(near: Near | Far) -> tuple[Center, bool]:
    return near.open("center-0", adapt({"w": np.full(3, 2.0)}, None), rule=BSP(), lock=True, wire="float32")


def test_worker_0_that_was_silent_for_a_while_still_makes_the_center(segment, second):
    segment.mark(0, DEAD)  # as the server says of one that has not beaten for a while
    found: list[tuple[Center, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(open_as(second)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "worker 1 has begun with its own values"
    segment.mark(0, LIVE)
    model = adapt({"w": np.full(3, 1.0)}, None)
    first, is_creator = Shared.open_or_create(segment, "center-0", model, rank=0, lock=True, note="")
    waiting.join(60)
    assert is_creator and not found[0][1]
    assert found[0][0].read(0).tolist() == [1.0] * 3
    for center in (first, found[0][0]):
        center.close()


def test_a_repeatable_run_does_not_begin_without_worker_0(segment, second, monkeypatch):
    monkeypatch.setattr(seat, "_RETURN_S", 0.1)
    segment.mark(0, DEAD)
    with pytest.raises(PeerLost, match="worker 0 is gone and has not made center-0"):
        open_as(second)


def test_over_the_network_too_all_begin_with_the_values_of_worker_0(tmp_path):
    serving = Serving(tmp_path, world=2)
    place = Place(
        world=2, segment=tmp_path / "elsewhere", address=str(serving.address), token=TOKEN, launcher="maniple"
    )
    seats = [Far(place.told(rank=rank, node="elsewhere"), lambda: (0, 0, False)) for rank in (0, 1)]
    found: list[tuple[Center, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(open_as(seats[1])))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "worker 1 has begun with its own values"
    model = {"w": np.full(3, 1.0)}
    first, is_creator = seats[0].open("center-0", adapt(model, None), rule=BSP(), lock=True, wire="float32")
    waiting.join(60)
    assert is_creator and not found[0][1]
    mine = adapt({"w": np.full(3, 2.0)}, None)
    found[0][0].pull(mine)
    assert mine.array(0).tolist() == [1.0] * 3
    for center in (first, found[0][0]):
        center.close()
    for one in seats:
        one.leave(is_early=False)
    serving.close()
