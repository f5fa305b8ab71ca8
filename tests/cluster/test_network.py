"""Workers on other machines, over links that are quick, slow, or cut: real processes, each with an address of its own.

Each worker adds known whole numbers in each step, and Downpour's center is the sum of what all have added: a
contribution that is lost or counted twice shows, whichever it is.
"""

import json
import signal
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.host.heartbeat_service import HEARTBEAT_TIMEOUT_S
from maniple.record import Row, read_events
from tests.cluster.conftest import Network
from tests.waiting import PATIENCE_S, await_

MANIPLE = str(Path(sys.executable).with_name("maniple"))
HOST, WORKERS = 1, (2, 3, 4)
MAXIMUM_RATE = 0.25
RESENT_S = 5.0  # TCP waits for up to a second before it sends packets again, and longer for those that are lost twice
TIMED = ("exchange", "broken", "progress")  # rows about the time that exchanges take
SCRIPT = f"""
    import sys, time
    from pathlib import Path

    import numpy as np

    sys.modules["numba"] = None  # the host applies the rule; without a compiler workers start sooner
    import maniple

    amount, size = int(sys.argv[1]), int(sys.argv[2])
    params = {{f"w{{i}}": np.zeros(size, ("float32", "float64")[i % 2]) for i in range(4)}}
    worker = maniple.join()
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.RateLimit({MAXIMUM_RATE}))
    change = amount * (1 + np.arange(size) % 3)
    while not Path("go").exists():
        time.sleep(0.02)
    while not (replica.steps and Path("stop").exists()):
        time.sleep(0.02)
        for value in params.values():
            value += change
        replica.step()
    print("steps", replica.steps)
"""
BYTES_PER_ELEMENT = 2 * 4 + 2 * 8  # of all four parameters


class Training:
    """A host and three workers on machines of their own, all running the script above."""

    def __init__(self, network: Network, folder: Path, size_bytes: int) -> None:
        self._network, self._folder, self._size = network, folder, size_bytes // BYTES_PER_ELEMENT
        self._run = folder / "runs" / "run"
        (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
        listen = ["--listen", f"{network.address(HOST)}:0"]
        self._host = self._start(HOST, "serve", *listen, "--runs", "runs", "--name", "run", "--quiet")
        where = await_(lambda: (self._run / "host.json").exists() and json.loads((self._run / "host.json").read_text()))
        # Elsewhere there is a copy of the token, and nothing else of the run.
        (folder / "token").write_text((self._run / "token").read_text())
        join = ["join", "--token-file", "token", where["address"], "script.py"]
        self._workers = {host: self._start(host, *join, str(self._amount(host)), str(self._size)) for host in WORKERS}
        self.await_exchanges(0)

    def begin(self) -> None:
        """Let the workers, which have shared the parameters, make steps."""
        (self._folder / "go").touch()

    def rows(self, who: int | str, *events: str) -> list[Row]:
        """The rows of the worker on a host, or of the "server"."""
        path = self._run / "events" / f"{who if isinstance(who, str) else f'worker-{self.rank(who)}'}.jsonl"
        return [row for row in read_events(path) if row["event"] in events] if path.exists() else []

    def rank(self, host: int) -> int:
        """The rank of the worker on a host."""
        rows = self.rows("server", "joined")
        return next((row["worker"] for row in rows if row["pid"] == self._workers[host].pid), -1)

    def send_s(self, rate_mbit: float) -> float:
        """How long it takes at least to send all parameters once."""
        return self._size * BYTES_PER_ELEMENT * 8 / (rate_mbit * 1e6)

    def output(self, host: int) -> str:
        """What a process has printed."""
        return (self._folder / f"{host}.log").read_text()

    def await_exchanges(self, count: int, *, since: float = 0.0, hosts: tuple[int, ...] = WORKERS) -> None:
        """Until each worker has shared the parameters, and made `count` exchanges that began after `since`."""

        def are_made(host: int) -> bool:
            died = self._workers[host].poll()
            assert died is None, f"the worker on host {host} has ended with {died}: {self.output(host)}"
            rows = self.rows(host, "pull", "exchange")
            return bool(rows) and sum(row["event"] == "exchange" and row["start"] > since for row in rows) >= count

        await_(lambda: all(are_made(host) for host in hosts))

    def end(self) -> None:
        """Tell the workers to end, then the host. All end well, and the center is the sum of all steps."""
        (self._folder / "stop").touch()
        for host, worker in self._workers.items():
            assert worker.wait(PATIENCE_S) == 0, self.output(host)
        self._host.send_signal(signal.SIGTERM)
        assert self._host.wait(PATIENCE_S) == 0, self.output(HOST)
        steps = {host: int(self.output(host).rpartition("steps ")[2]) for host in WORKERS}
        assert all(steps.values())
        total = sum(steps[host] * self._amount(host) for host in WORKERS)
        for name, value in load_file(self._run / "center" / "center-0.safetensors").items():
            wrong = value - total * (1 + np.arange(self._size) % 3)
            assert not wrong.any(), f"{name} is off by up to {abs(wrong).max()}, of steps {steps}"

    def _start(self, host: int, *words: str):
        log = self._folder / f"{host}.log"
        return self._network.start(host, MANIPLE, *words, folder=self._folder, output=log)

    @staticmethod
    def _amount(host: int) -> int:
        """What the worker on a host adds: small enough that float32 is exact, apart enough that errors show whose."""
        return 16 ** (host - WORKERS[0])


@pytest.fixture
def train(network: Network, tmp_path: Path):
    return lambda size_bytes: Training(network, tmp_path, size_bytes)


def assert_within_rate(rows: list[Row]) -> None:
    """The share of time in exchanges, broken ones included, is at no time above the limit by more than one exchange.

    The last row is left out: it has the exchange at the end, which has no pace.
    """
    longest_s, count = 0.0, 0
    for row in rows[: max(i for i, row in enumerate(rows) if row["event"] == "progress")]:
        if row["event"] == "progress":
            count += 1
            assert row["sync_share"] <= MAXIMUM_RATE + longest_s / row["elapsed"], row
        else:
            longest_s = max(longest_s, row["duration"])
    assert count and longest_s


@pytest.mark.parametrize(
    ("rate_mbit", "round_trip_s", "size_bytes"), [(1000, 0.005, 6_000_000), (10, 0.02, 200_000)], ids=["quick", "slow"]
)
def test_exchanges_over_a_link_add_up_and_keep_to_their_rate(
    network: Network, train, rate_mbit: float, round_trip_s: float, size_bytes: int
):
    network.shape(rate_mbit=rate_mbit, round_trip_s=round_trip_s)
    training = train(size_bytes)
    training.begin()
    training.await_exchanges(3)
    training.end()
    assert not training.rows("server", "lost")
    for host in WORKERS:
        exchanges = training.rows(host, "exchange")
        assert min(row["duration"] for row in exchanges) > training.send_s(rate_mbit), "the link was not that quick"
        assert_within_rate(training.rows(host, *TIMED))


def test_heartbeats_survive_exchanges_that_fill_a_slow_link_for_longer_than_the_heartbeat_timeout(
    network: Network, train
):
    training = train(4_500_000)  # without a limit, else it would take minutes until the first exchange is due
    network.shape(rate_mbit=10, round_trip_s=0.02)
    training.begin()
    time.sleep(2)
    training.end()  # after the exchange that fills the link now
    assert not training.rows("server", "lost"), "a worker counted as dead while it was exchanging"
    made = [training.rows(host, "exchange")[0] for host in WORKERS]
    busy_s = max(row["end"] for row in made) - min(row["start"] for row in made)
    assert busy_s > len(WORKERS) * training.send_s(10) > HEARTBEAT_TIMEOUT_S, "the link was not that quick"
    for host in WORKERS:
        assert not training.rows(host, "away")
        assert_within_rate(training.rows(host, *TIMED))


def test_a_worker_cut_off_in_an_exchange_trains_on_and_comes_back_without_loss(network: Network, train):
    lone, others = WORKERS[-1], WORKERS[:-1]
    training = train(2_000_000)
    training.begin()
    training.await_exchanges(2)

    network.shape(rate_mbit=10, round_trip_s=0.005)
    time.sleep(1.5)  # into an exchange, of which some parameters are applied by now
    network.cut(lone)
    cut = time.time()
    network.shape(rate_mbit=1000, round_trip_s=0.005)
    await_(lambda: training.rows("server", "lost"), 20)
    await_(lambda: "Training continues" in training.output(lone), 25)
    time.sleep(max(3.0, cut + 15 - time.time()))
    healed = time.time()
    network.heal(lone)
    training.await_exchanges(2, since=healed, hosts=(lone,))
    training.end()

    assert [row["worker"] for row in training.rows("server", "lost", "returned")] == 2 * [training.rank(lone)]
    assert [row["live"] for row in training.rows("server", "lost", "returned")] == [2, 3]
    # A change of the rate drops the packets that wait in the link, and exchanges may break until they are sent again.
    away = [row for row in training.rows(lone, "away") if row["timestamp"] > cut]
    assert len(away) == 1
    assert not any(row["timestamp"] > cut + RESENT_S for host in others for row in training.rows(host, "away"))
    alone = [row for row in training.rows(lone, "progress") if away[0]["timestamp"] < row["timestamp"] < healed]
    assert len(alone) >= 2 and all(a["step"] < b["step"] for a, b in pairwise(alone)), "it made no steps alone"
    back = next(row for row in training.rows(lone, "exchange") if row["end"] > healed)
    # The broken exchange counts for the rate limit, and began 1.5 s before the cut at the earliest.
    began = cut - 1.5
    allowed = began + (away[0]["timestamp"] - began) / MAXIMUM_RATE
    assert back["end"] < max(healed, allowed) + 10 and back["step"] > alone[-1]["step"]
    for host in others:
        assert any(cut < row["end"] < healed for row in training.rows(host, "exchange"))
    for host in WORKERS:
        assert_within_rate(training.rows(host, *TIMED))


def test_the_doctor_measures_a_slow_line_and_suggests_a_rule_that_suits_it(network: Network, tmp_path: Path):
    rate_mbit, round_trip_s = 10, 0.02
    network.shape(rate_mbit=rate_mbit, round_trip_s=round_trip_s)
    listen = ["--listen", f"{network.address(HOST)}:0"]
    serve = [MANIPLE, "serve", *listen, "--runs", "runs", "--name", "run", "--quiet"]
    host = network.start(HOST, *serve, folder=tmp_path, output=tmp_path / "host.log")
    about, output = tmp_path / "runs" / "run" / "host.json", tmp_path / "doctor.json"
    where = await_(lambda: about.exists() and json.loads(about.read_text()))
    asked = ["--token-file", "runs/run/token", "--model-size", "5M", "--step-time", "0.1", "--timeout", "30"]
    doctor = network.start(WORKERS[0], MANIPLE, "doctor", "--json", *asked, where["address"], folder=tmp_path,
                           output=output)  # fmt: skip
    assert doctor.wait(PATIENCE_S) == 0, output.read_text()
    values = {one["check"]: one["values"] for one in json.loads(output.read_text())}
    most = 1.3 * rate_mbit * 1e6 / 8  # what lies in buffers seems to be sent sooner
    assert values["way"]["round_trip_s"] >= round_trip_s
    assert 0 < values["way"]["up_bytes_per_s"] < most and 0 < values["way"]["down_bytes_per_s"] < most
    assert values["rule"]["rule"] == "diloco" and values["rule"]["wire"] != "float32" and values["rule"]["overlap"]
    host.send_signal(signal.SIGTERM)
    assert host.wait(PATIENCE_S) == 0
