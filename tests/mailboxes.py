"""The mailboxes of a run, read from their files, and workers that exchange through them until they are killed."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from maniple.adapters import adapt
from maniple.center import Segment
from maniple.layout import Layout
from maniple.memory.segment import DEAD, LIVE
from maniple.peers.gossip_exchange import GossipExchange
from maniple.peers.mailbox import Mailbox
from maniple.peers.neighbors import Neighbors
from maniple.rules import Gossip, Rule, parse_rule

SIZE = 100_000  # a commit takes a good part of the time, so kills come inside of it


def sums(segment: Path, rule: Rule, size: int) -> tuple[float, np.ndarray]:
    """The sums of w and of w x over all mailboxes, and the messages on their way."""
    layout = Layout(adapt({"x": np.zeros(size)}).entries)
    paths = {int(path.suffix[1:]): path for path in segment.glob("peers-0.*")}
    found = {rank: Mailbox.find(path, layout, rule.mailbox_vectors) for rank, path in paths.items()}
    boxes = {rank: box for rank, box in found.items() if box is not None}
    headers = {rank: box.header()[0] for rank, box in boxes.items()}
    weight, total = 0.0, np.zeros(size)
    for rank, header in headers.items():
        weight += header["weight"]
        total += header["weight"] * boxes[rank].vectors["x"]["float64"]
        receiver = int(header["receiver"])
        if receiver >= 0 and headers[receiver]["applied"][rank] < header["number"]:
            weight += header["message_weight"]
            total += header["message_mass"] * boxes[rank].outbox["float64"]
    return weight, total


def work(segment: Segment, rule: Gossip, rank: int, world: int, stop: Path) -> None:
    """Exchange without training until there is a file `stop`."""
    model = adapt({"x": np.full(SIZE, float(rank))})
    layout = Layout(model.entries)
    neighbors = Neighbors(segment, 0, layout, rule, rank=rank, seed=0)
    peers, step = GossipExchange(rule, model, layout, neighbors, rank=rank), 0
    peers.begin(world)
    segment.mark(rank, LIVE)
    parent = os.getppid()
    while not stop.exists() and os.getppid() == parent:  # else the test was killed
        step += 1
        neighbors.look(time.monotonic())
        peers.receive(step)
        if peers.is_due() and (act := peers.prepare(step)) is not None:
            act()


def kill_again_and_again(folder: Path, rule: Gossip, *, kills: int, world: int = 4, newcomers: int = 2) -> dict:
    """Kill workers by SIGKILL at random instants and start them again; gives the sums before and after."""
    segment, stop, rng = Segment.create(folder, "0123456789abcdef", folder), folder / "stop", random.Random(kills)
    pids: dict[int, int] = {}

    def start(rank: int) -> None:
        segment.renew(rank)
        if not (pid := os.fork()):
            try:
                work(segment, rule, rank, world, stop)
            finally:
                os._exit(0)
        pids[rank] = pid

    def has_begun(rank: int) -> bool:
        return (segment.path / f"peers-0.{rank}").exists() and segment.state(rank) == LIVE

    def await_begun() -> None:
        deadline = time.monotonic() + 60
        while not all(map(has_begun, pids)):
            assert time.monotonic() < deadline, "workers have not begun"
            time.sleep(0.001)

    try:
        for rank in range(world):
            start(rank)
        await_begun()
        weight = rule.first_weight(world, is_newcomer=False)
        before, joins = (world * weight, weight * sum(range(world))), 0  # the workers are exchanging already
        for count in range(kills):
            time.sleep(rng.uniform(0, 0.03))
            if count % (kills // newcomers) == 1 and not rule.elastic:  # without weight, so the sums do not change
                start(world + joins)
                joins += 1
            rank = rng.choice(list(pids))
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids.pop(rank), 0)
            segment.mark(rank, DEAD)
            if rng.random() < 0.3:  # the others have time to take back what they had sent to it
                time.sleep(rng.uniform(0, 0.05))
            start(rank)
        await_begun()
        time.sleep(0.2)
        stop.touch()
        for rank in list(pids):
            os.waitpid(pids.pop(rank), 0)
        after = sums(segment.path, rule, SIZE)
        spread = np.abs(after[1] - before[1]).max() / world
        messages = sum(
            int(Mailbox.find(path, Layout(adapt({"x": np.zeros(SIZE)}).entries), ("x",)).header()["number"][0])
            for path in segment.path.glob("peers-0.*")
        )
        return {"weights": [before[0], after[0]], "error": float(spread), "messages": messages, "joins": joins}
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        segment.remove()


if __name__ == "__main__":
    found = kill_again_and_again(Path(sys.argv[1]), parse_rule(sys.argv[2]), kills=int(sys.argv[3]))
    print(json.dumps(found))
