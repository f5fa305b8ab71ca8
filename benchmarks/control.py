"""Cost of the control plane: time for many workers to join, latency of a request, memory of the server.

A host's server runs in a separate process, on loopback TCP. In each round, one worker sends requests, one at a time: to
an otherwise idle server; while 2 workers exchange a model of 48 MiB without a pause; and after 200 workers have joined,
all at once from 8 processes, which then only send heartbeats. The server saves each answer before it sends it. Seconds
to join are from the starting signal to the last worker's "joined". Memory is the growth of the server's process,
without its libraries.

    python benchmarks/control.py [--workers 200] [--questions 300] [--repeats 5]
"""

import argparse
import contextlib
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from maniple.center import Segment
from maniple.connection.link import Endpoint
from maniple.environment import shared_memory
from maniple.wire.address import Address
from maniple.wire.messages import JoinRequest
from maniple.worker.controller_client import ControllerClient
from maniple.worker.heartbeat_sender import HeartbeatSender
from measure import report
from server import DEADLINE_S, MIB, PROCESSES, TOKEN, Plan, make_model, our_act, serve, settled_bytes, start, tell

CROWDS = 8  # processes that hold the workers' connections
PAUSE_S = 0.005  # between two requests
SITUATIONS = {
    "idle": "nothing else goes on",
    "exchanges": "2 workers exchange 48 MiB without a pause",
    "crowd": "the other workers beat, and do nothing else",
}


def crowd(pipe: Any, address: Address, count: int) -> None:
    """Hold the control connections of `count` workers in one process: they join on request, and send heartbeats."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    members = [
        HeartbeatSender(Endpoint(address, TOKEN), JoinRequest("node", 1, -1, 0), count=lambda: (0, 0, False))
        for _ in range(count)
    ]

    def join(member: HeartbeatSender) -> None:
        member.join(DEADLINE_S)
        member.start()

    pipe.send("ready")
    with contextlib.suppress(EOFError):  # the parent has exited
        while pipe.poll(DEADLINE_S) and pipe.recv():
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(join, members))
            pipe.send("joined")


def train(pipe: Any, rank: int, plan: Plan) -> None:
    """Run a worker that exchanges its model continuously until it is killed."""
    act = our_act(plan, "tcp", rank, make_model(plan, rank))
    act()
    pipe.send("ready")
    while True:
        act()


def begin(stack: contextlib.ExitStack, act: Callable[..., None], *arguments: Any) -> Any:
    """Start a process, wait until it is ready, and return the pipe to it."""
    pipe, far = PROCESSES.Pipe()
    start(stack, act, far, *arguments)
    far.close()  # so that its death closes the pipe
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"{act.__name__} is not ready after {DEADLINE_S:g} s")
    pipe.recv()
    return pipe


def ask(questions: ControllerClient, count: int) -> list[float]:
    """Return the latency of each of `count` requests in milliseconds."""
    found = []
    for _ in range(count):
        before = time.perf_counter()
        questions.ask("next", {}, timeout_s=DEADLINE_S)
        found.append(1e3 * (time.perf_counter() - before))
        time.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def host() -> Generator[tuple[contextlib.ExitStack, Plan, int, ControllerClient]]:
    """Start a server, and yield a client that sends requests to it."""
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maniple-")))
        for part in ("events", "center"):
            (run / part).mkdir()
        segment = Segment.create(shared_memory(), secrets.token_hex(8), run)
        stack.callback(segment.remove)
        listener = stack.enter_context(Address().listen())
        address = Address(port=listener.getsockname()[1])
        plan = Plan(48 * MIB, 12, 2, run, segment.path, {"tcp": address})
        server = serve(stack, plan, [listener])
        questions = ControllerClient(Endpoint(address, TOKEN), who=lambda: (0, 0), count=lambda: (0, 0, False))
        stack.callback(questions.close)
        ask(questions, 10)
        settled_bytes(server)  # wait until it has loaded its kernels
        yield stack, plan, server, questions


def idle_and_exchanges(count: int) -> dict[str, list[float]]:
    """Return the latencies in milliseconds at an idle server, and at one that exchanges values."""
    with host() as (stack, plan, _, questions):
        found = {"idle": ask(questions, count)}
        for rank in range(2):
            begin(stack, train, rank, plan)
        return found | {"exchanges": ask(questions, count)}


def crowded(workers: int, count: int) -> tuple[list[float], float, float]:
    """Return the latencies in milliseconds with many workers, the seconds they took to join, and bytes per worker."""
    with host() as (stack, plan, server, questions):
        before_bytes = settled_bytes(server)
        pipes = [begin(stack, crowd, plan.addresses["tcp"], workers // CROWDS) for _ in range(CROWDS)]
        before = time.perf_counter()
        tell(pipes, "join")
        join_s = time.perf_counter() - before
        found = ask(questions, count)
        return found, join_s, (settled_bytes(server) - before_bytes) / workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200, help=f"a multiple of {CROWDS}")
    parser.add_argument("--questions", type=int, default=300, help="requests per situation and round")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the child processes, as Ctrl-C does
    found: dict[str, list[float]] = {name: [] for name in SITUATIONS}
    joins_s, sizes_bytes = [], []
    for _ in range(options.repeats):
        for name, milliseconds in idle_and_exchanges(options.questions).items():
            found[name] += milliseconds
        milliseconds, join_s, each_bytes = crowded(options.workers, options.questions)
        found["crowd"] += milliseconds
        joins_s.append(join_s)
        sizes_bytes.append(each_bytes)
    table = [
        {
            "situation": name,
            "median, ms": statistics.median(values),
            "95 %, ms": statistics.quantiles(values, n=20)[-1],
            "longest, ms": max(values),
            "what": SITUATIONS[name],
        }
        for name, values in found.items()
    ]
    facts = {"questions": options.questions, "repeats": options.repeats}
    report("control-ask", "a question to the controller", table, **facts)
    joined = {"workers": options.workers, "all joined, s": statistics.median(joins_s), "slowest round, s": max(joins_s)}
    joined |= {"memory of the server per worker, kB": statistics.median(sizes_bytes) / 1e3}
    report("control-join", "a crowd of workers", [joined], **facts)


if __name__ == "__main__":
    main()
