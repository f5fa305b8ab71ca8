"""`maniple run --feed`: producers beside the workers, in processes of their own, that end well or do not."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import await_, is_gone

from .conftest import Run

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]

TRAIN = """
    import numpy as np
    import maniple

    worker = maniple.join()
    w = np.zeros(3)
    replica = worker.share({"w": w})
    for x, number in worker.feed():
        assert x.shape == (4, 5) and (x == number).all()
        w += 1
        replica.step()
        worker.log(number=number)
    worker.log(done=True)
"""
PRODUCE = """
    import numpy as np
    import maniple

    feed = maniple.Feed(high_water=4)
    for number in range(feed.index, 22, feed.count):
        feed.push(np.full((4, 5), number, np.float32), number)
"""


@pytest.fixture
def feed(tmp_path, start):
    """Start a run with one producer script."""

    def feed(produce: str, train: str, *options: str) -> Run:
        (tmp_path / "produce.py").write_text(textwrap.dedent(produce))
        return start(train, "-n", "2", "--feed", "produce.py", *options)

    return feed


def numbers(run: Run) -> list[int]:
    rows = [row for rank in (0, 1) for row in run.events(rank, "log")]
    return sorted(int(row["number"]) for row in rows if "number" in row)


def producer_pids(run: Run) -> list[int]:
    return [row["pid"] for row in run.events("host", "started") if "producer" in row]


def test_22_batches_for_2_workers_with_an_exchange_every_10_end_by_themselves(feed):
    run = feed(PRODUCE, TRAIN, "--every", "10")
    assert run.wait() == 0, run.output
    assert numbers(run) == list(range(22))
    assert all(run.events(rank, "log")[-1].get("done") for rank in (0, 1))
    assert sum(row["batches"] for rank in (0, 1) for row in run.events(rank, "wait")) == 22
    assert all(row["feed"] == "batches" and row["seconds"] >= 0 for row in run.events(0, "wait"))
    assert run.description["asked"]["feeds"] == ["produce.py"]


def test_copies_of_a_producer_share_the_data(feed):
    run = feed(PRODUCE, TRAIN, "--producers", "3")
    assert run.wait() == 0, run.output
    assert numbers(run) == list(range(22))
    exits = [row for row in run.events("host", "exit") if "producer" in row]
    assert sorted((row["producer"], row["exit_code"]) for row in exits) == [(0, 0), (1, 0), (2, 0)]
    assert (run.folder / "logs" / "producer-2.log").exists()


def test_two_scripts_feed_two_feeds(feed, tmp_path):
    (tmp_path / "valid.py").write_text("import maniple\nmaniple.Feed('valid').push([7.0])\n")
    train = TRAIN + "    worker.log(valid=sum(float(x[0]) for (x,) in worker.feed('valid')))\n"
    run = feed(PRODUCE, train, "--feed", "valid.py")
    assert run.wait() == 0, run.output
    assert numbers(run) == list(range(22))
    assert sum(row.get("valid", 0) for rank in (0, 1) for row in run.events(rank, "log")) == 7.0


def test_exception_of_a_producer_reaches_the_workers_and_ends_the_run(feed):
    run = feed(PRODUCE + "        if number == 9:\n            raise ValueError('no more film')\n", TRAIN)
    assert run.wait() == 1
    assert "maniple: producer 0 ended with exit code 1, so the run ends" in run.output
    assert run.output.count("ValueError: no more film") >= 2
    (failed,) = run.events(0, "failed") or run.events(1, "failed")[:1]
    assert failed["error"].startswith("ProducerFailed: producer 0 of feed 'batches'")
    assert "ValueError: no more film" in failed["error"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "producer 0 was killed by SIGKILL"),
        ("raise SystemExit(3)", "producer 0 ended with exit code 3"),
    ],
)
def test_producer_that_dies_without_a_word_is_an_error_for_the_workers(feed, end, said):
    run = feed(PRODUCE + f"    {end}\n", TRAIN)
    assert run.wait() == 1
    assert f"maniple: {said}, so the run ends" in run.output
    errors = [row["error"] for rank in (0, 1) for row in run.events(rank, "failed")]
    assert errors and all("producer 0 of feed 'batches' ended before its data did" in error for error in errors)


def test_producers_are_ended_when_the_workers_are_done(feed):
    endless = PRODUCE.replace("range(feed.index, 22, feed.count)", "iter(int, 1)")
    train = TRAIN.replace("replica.step()\n", "replica.step()\n        if w[0] > 5: break\n")
    run = feed(endless, train)
    assert run.wait() == 0, run.output
    assert all(is_gone(pid) for pid in producer_pids(run))


def test_ctrl_c_ends_producers_too(feed):
    endless = PRODUCE.replace("range(feed.index, 22, feed.count)", "iter(int, 1)")
    run = feed(endless, TRAIN)
    run.await_event(0, "log", count=3)
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert all(is_gone(pid) for pid in producer_pids(run))


def test_producers_end_with_a_killed_launcher_and_nothing_stays_after_the_next_run(feed, run):
    endless = PRODUCE.replace("range(feed.index, 22, feed.count)", "iter(int, 1)")
    killed = feed(endless, TRAIN)
    killed.await_event(0, "log", count=3)
    killed.kill()
    await_(lambda: all(is_gone(pid) for pid in producer_pids(killed)))
    # The memory of a killed host is freed by the next run; `nothing_left` looks.
    assert run("import maniple\nmaniple.join()").process.returncode == 0


def test_killed_worker_that_is_started_again_takes_on(feed):
    slow = PRODUCE.replace("        feed.push", "        import time; time.sleep(0.02)\n        feed.push")
    slow = slow.replace("22, feed.count", "100, feed.count")
    run = feed(slow, TRAIN, "--restarts", "1")
    rank = await_(lambda: next((str(rank) for rank in (0, 1) if len(run.events(rank, "log")) > 1), None))
    os.kill(run.pid(int(rank)), signal.SIGKILL)
    assert run.wait() == 0, run.output
    taken = numbers(run)
    assert len(taken) == len(set(taken)) >= 99  # one that was taken may not have come to its log
    assert len(run.events(int(rank), "join")) == 2


def test_feed_that_nobody_opens_is_an_error(feed):
    short = PRODUCE.replace("22", "2")  # it ends, though nobody takes
    run = feed(short, TRAIN.replace("worker.feed()", "worker.feed('trian')"))
    assert run.wait() == 1
    assert "feed 'trian' was never opened, and all 1 producers have ended" in run.output
    assert "Theirs: batches" in run.output


def test_producer_and_workers_elsewhere_reach_the_feed_of_a_host(serve, tmp_path):
    host = serve()
    workers = [host.join(TRAIN) for _ in range(2)]
    (tmp_path / "produce.py").write_text(textwrap.dedent(PRODUCE))
    env = {"MANIPLE_ADDRESS": host.address, "MANIPLE_TOKEN_FILE": str(host.token)}
    done = subprocess.run(
        [sys.executable, "produce.py"], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for worker in workers:
        output = worker.communicate(timeout=60)[0]
        assert worker.returncode == 0, output
    assert host.end() == 0
    assert numbers(host) == list(range(22))
    assert json.loads((Path(host.folder) / "run.json").read_text())["exit_code"] == 0


def test_producers_started_by_hand_end_well_with_the_run(serve, tmp_path):
    host = serve()
    env = os.environ | {"MANIPLE_ADDRESS": host.address, "MANIPLE_TOKEN_FILE": str(host.token)}
    ends = {"busy": "input()", "full": "", "done": "input(); feed.close(); print('closed')"}
    producers = {}
    for name, wait in ends.items():
        code = (
            f"import maniple; feed = maniple.Feed('{name}', high_water=1); feed.push([1.0]); print('here', flush=True)"
        )
        code += f"\n{wait}\nif '{name}' != 'done': feed.push([2.0])"
        producers[name] = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for producer in producers.values():
        assert producer.stdout.readline() == "here\n"
    assert host.end() == 0
    for name, producer in producers.items():
        output, errors = producer.communicate("\n", timeout=60)
        assert producer.returncode == 0, errors
        expected = ("closed\n", "") if name == "done" else ("", "maniple: the run has ended")
        assert output == expected[0] and errors.startswith(expected[1]) and errors.count("\n") <= 1


def test_server_killed_under_a_feed_loses_and_doubles_no_push(serve, tmp_path):
    host = serve()
    train = TRAIN.replace("worker.log(number=number)", "worker.log(number=number); import time; time.sleep(0.02)")
    (tmp_path / "produce.py").write_text(textwrap.dedent(PRODUCE.replace("22", "120")))
    env = {"MANIPLE_ADDRESS": host.address, "MANIPLE_TOKEN_FILE": str(host.token)}
    producer = subprocess.Popen([sys.executable, "produce.py"], cwd=tmp_path, env=os.environ | env)
    worker = host.join(train)
    host.await_event(0, "log", count=20)
    os.kill(host.server_pid, signal.SIGKILL)
    assert producer.wait(60) == 0
    output = worker.communicate(timeout=60)[0]
    assert worker.returncode == 0, output
    assert host.end() == 0
    # The one that was under way to the worker may have come twice.
    assert sorted(set(numbers(host))) == list(range(120))
    assert len(numbers(host)) <= 121
