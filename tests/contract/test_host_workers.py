"""Membership of workers of external launchers, which nobody waits for: their processes show whether they live."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from maniple.errors import InvalidArgument
from maniple.host.heartbeat_service import HostWorkers
from maniple.memory.segment import DEAD, LIVE, Segment
from maniple.record import Events, read_events
from maniple.wire.messages import JoinRequest


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create(Path(os.environ["MANIPLE_SHM"]), "0" * 16, tmp_path)
    yield segment
    segment.remove()


def comes(members: HostWorkers, segment: Segment, pid: int, *, is_back: bool = False) -> Any:
    """A local external worker of rank 0 joins; return its connection."""
    stream: Any = object()
    members.join("a", stream, JoinRequest("here", pid, 0, 0, is_near=True, is_back=is_back))
    segment.mark(0, LIVE)
    return stream


def test_external_worker_whose_connection_breaks_is_not_dead_while_its_process_lives(segment):
    members = HostWorkers(segment, Events(None), 2, are_external=True)
    broken = comes(members, segment, os.getpid())
    losing = threading.Thread(target=members.lose, args=("a", broken, "it broke"), kwargs={"is_silent": False})
    losing.start()
    losing.join(0.2)
    assert losing.is_alive() and segment.state(0) == LIVE
    comes(members, segment, os.getpid(), is_back=True)
    losing.join(60)
    assert not losing.is_alive() and segment.state(0) == LIVE


def test_external_worker_whose_process_has_ended_is_dead(segment):
    members = HostWorkers(segment, Events(None), 2, are_external=True)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stream = comes(members, segment, process.pid)
    process.communicate(b"\n")
    members.lose("a", stream, "it ended", is_silent=False)
    assert segment.state(0) == DEAD


def test_external_worker_that_nobody_has_announced_is_not_its_predecessor(segment):
    members = HostWorkers(segment, Events(None), 2, are_external=True)
    comes(members, segment, os.getpid())
    before = segment.incarnation(0)
    members.join("b", object(), JoinRequest("here", os.getpid(), 0, 1, is_near=True))
    assert segment.incarnation(0) == before + 1


def test_an_elastic_launcher_may_start_more_or_fewer_the_next_time(segment):
    members = HostWorkers(segment, Events(None), 2, are_external=True)
    for rank in (3, 0, 1, 2):  # in any order
        members.join(
            f"of-four-{rank}", object(), JoinRequest("here", os.getpid(), rank, 0, is_near=True, external_workers=4)
        )
    assert segment.external_workers == 4
    assert members.join("stranger", object(), JoinRequest("there", 1, -1, 0))[0] == 4
    members.join("of-two-1", object(), JoinRequest("here", os.getpid(), 1, 0, is_near=True, external_workers=2))
    members.join("of-two-0", object(), JoinRequest("here", os.getpid(), 0, 0, is_near=True, external_workers=2))
    assert segment.external_workers == 2, "worker 0 knows best"
    assert (
        HostWorkers(segment, Events(None), 4, are_external=True).join(
            "again", object(), JoinRequest("there", 1, -1, 0)
        )[0]
        > 1
    )
    with pytest.raises(InvalidArgument, match="has the rank of one of them"):
        members.join("of-five-0", object(), JoinRequest("here", os.getpid(), 0, 0, is_near=True, external_workers=5))


def test_task_that_was_cut_off_takes_nothing_from_the_one_in_its_place(segment):
    """Each was requeued: the first is on a node that the queue took for dead."""
    members = HostWorkers(segment, Events(None), 2, is_queued=True)
    assert members.join("a", object(), JoinRequest("h1", 7, 0, 1))[0] == 0
    assert members.join("b", object(), JoinRequest("h2", 7, 0, 2))[0] == 0
    assert members.join("a", object(), JoinRequest("h1", 7, 0, 1, is_back=True))[0] == 2
    assert (members.rank("a"), members.rank("b")) == (2, 0)


def test_rows_tell_of_members_in_the_order_in_which_they_came_and_went(segment, tmp_path):
    class Slow(Events):
        """Rows whose writer is delayed at random, as by the kernel."""

        def write(self, event: str, /, **values: Any) -> None:
            time.sleep(random.random() * 1e-3)
            super().write(event, **values)

    events = Slow(tmp_path / "server.jsonl")
    members = HostWorkers(segment, events, 0)

    def come_and_go(name: str) -> None:
        members.join(name, cast(Any, object()), JoinRequest("there", 1, -1, 0))
        members.leave(name, is_early=False)

    threads = [threading.Thread(target=come_and_go, args=(f"w{i}",)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    live = 0
    for row in read_events(tmp_path / "server.jsonl"):
        live += 1 if row["event"] == "joined" else -1
        assert row["live"] == live
    assert live == 0
