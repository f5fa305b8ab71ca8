"""Throughput of an exchange through a server, compared with a loopback echo, with Ray and with gloo.

Models of 4, 40 and 400 MiB (float32, parameters of 1 Mi elements = 4 MiB each; the 4 MiB model has 4 of 1 MiB), and
1, 2 and 4 workers, each a separate process. In a round every worker exchanges once; the rounds of all rows are
interleaved, in one run. GB/s is bytes of the vector times workers per second of a round, from the starting signal
through a pipe to the last worker's "done". An exchange moves the vector twice per worker, an all_reduce among n workers
only 2 (n - 1) / n times. The server's memory is the growth of its process since before the first worker, without its
libraries. Ray is not a dependency of this project: without it, its row is empty.

    python benchmarks/server.py [--sizes 4 40 400] [--workers 1 2 4] [--rows tcp unix shared echo ray gloo]
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib.util
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.tcp_client import TcpCenter
from maniple.connection.link import Endpoint, Link
from maniple.connection.retry import retry_until
from maniple.contracts import ExchangeInfo
from maniple.environment import Environment, shared_memory, variables_for
from maniple.memory.segment import LIVE
from maniple.rules import EASGD
from maniple.wire.address import Address
from measure import interleave, report

ALPHA = 0.5
MIB = 1 << 20
DEADLINE_S = 120.0  # for every wait
TOKEN = "token of a benchmark"
ROWS = {
    "tcp": "ours over loopback TCP: EASGD exchange with a server process",
    "unix": "ours over a Unix-domain socket: the same",
    "shared": "ours in shared memory: the same, without a server",
    "echo": "(a) the limit: bare duplex echo over loopback TCP, a process per connection, in pieces of 1 MiB",
    "ray": "(b) a Ray actor does the same update: x travels there and back, and is copied into place",
    "gloo": "(c) torch.distributed gloo all_reduce of the flat vector among the workers",
}
NEEDS = {"ray": "ray", "gloo": "torch"}
RATIOS = [("tcp", "echo"), ("tcp", "ray"), ("tcp", "gloo"), ("shared", "ray"), ("shared", "gloo")]
PROCESSES = multiprocessing.get_context("spawn")
Act = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """The settings that all processes of one table share."""

    size_bytes: int
    parameters: int
    workers: int
    run: Path
    segment: Path
    addresses: dict[str, Address]


def work(pipe: Any, rank: int, rows: list[str], plan: Plan) -> None:
    """Run a worker: prepare its rows, then make one exchange for each name received through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    flat = np.random.default_rng(rank).uniform(1, 2, plan.size_bytes // 4).astype(np.float32)
    acts = {row: {"echo": echo_act, "gloo": gloo_act}.get(row, our_act)(plan, row, rank, flat) for row in rows}
    with contextlib.suppress(EOFError):  # the parent has exited
        while pipe.poll(DEADLINE_S):
            acts[pipe.recv()]()
            pipe.send("done")
    os._exit(0)  # gloo's threads would wait for their peers


def our_act(plan: Plan, row: str, rank: int, flat: np.ndarray) -> Act:
    """Prepare an exchange with the center, through the call that training uses."""
    model = adapt({f"p{i}": part for i, part in enumerate(np.split(flat, plan.parameters))})
    if row == "shared":  # a separate center, so that the server's pages are not shared
        center, _ = SharedCenter.open_or_create(Segment(plan.segment), "center-1", model, rank=rank)
    else:
        link = Link(Endpoint(plan.addresses[row], TOKEN), "data")
        center, _ = TcpCenter.open_or_create(link, "center-0", model, rank=rank, deadline_s=DEADLINE_S)
    return lambda: center.exchange(model, EASGD(ALPHA), None, ExchangeInfo(live=plan.workers))


def echo_act(plan: Plan, row: str, _rank: int, flat: np.ndarray) -> Act:
    """Prepare a duplex echo of the same bytes, without frames, locks and arithmetic."""
    link = bounded(plan.addresses[row].connect(DEADLINE_S))
    whole = memoryview(flat).cast("B")
    pieces = [whole[start : start + MIB] for start in range(0, whole.nbytes, MIB)]

    def act() -> None:
        sender = threading.Thread(target=link.sendall, args=(whole,), daemon=True)
        sender.start()
        for piece in pieces:
            if link.recv_into(piece, MIB, socket.MSG_WAITALL) < MIB:
                raise ConnectionResetError("the echo has ended")
        sender.join(DEADLINE_S)

    return act


def echo(listener: socket.socket) -> None:
    """Echo the bytes of one connection until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener.settimeout(DEADLINE_S)
    link = bounded(listener.accept()[0])
    buffer = memoryview(bytearray(MIB))
    with contextlib.suppress(ConnectionError):
        while count := link.recv_into(buffer, MIB, socket.MSG_WAITALL):
            link.sendall(buffer[:count])


def bounded(link: socket.socket) -> socket.socket:
    """Set the socket's timeout in the kernel: Python's would cost another system call each time."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", int(DEADLINE_S), 0))
    return link


def gloo_act(plan: Plan, row: str, rank: int, flat: np.ndarray) -> Act:
    """Prepare an all_reduce of a vector of zeros, whose repeated sums stay finite."""
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    among: Any = {"rank": rank, "world_size": max(2, plan.workers), "timeout": datetime.timedelta(seconds=DEADLINE_S)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{plan.run}/{row}", **among)
    vector = torch.zeros(flat.size)
    return lambda: torch.distributed.all_reduce(vector)


@contextlib.contextmanager
def ray_act(plan: Plan) -> Generator[Act]:
    """Prepare a round of Ray, with the center and each worker as an actor."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # otherwise Ray listens on every address
    import numba
    import ray

    @numba.njit
    def elastic(x, c, new_x):
        for i in range(x.size):
            d = np.float32(ALPHA) * (x[i] - c[i])
            c[i] += d
            new_x[i] = x[i] - d

    class Center:
        def __init__(self, size: int) -> None:
            self.c, self.new_x = np.ones(size, np.float32), np.ones(size, np.float32)

        def exchange(self, x: np.ndarray) -> np.ndarray:
            elastic(x, self.c, self.new_x)  # x is in the object store, which is read-only
            return self.new_x

    class Worker:
        def __init__(self, size: int, center: Any) -> None:
            self.x, self.center = np.ones(size, np.float32), center

        def exchange(self) -> None:
            self.x[:] = ray.get(self.center.exchange.remote(self.x), timeout=DEADLINE_S)

    options: Any = {"object_store_memory": 4 * plan.workers * plan.size_bytes + 200 * MIB, "log_to_driver": False}
    options |= {"_node_ip_address": "127.0.0.1", "_temp_dir": str(plan.run / "ray"), "logging_level": "error"}
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: Ray's orphans become children of this process
    resource_tracker.ensure_running()  # of multiprocessing; must not be killed with Ray's orphans
    before = set((children := Path(f"/proc/self/task/{os.getpid()}/children")).read_text().split())
    try:
        ray.init(num_cpus=plan.workers + 1, include_dashboard=False, **options)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's handler, which aborts
        center = ray.remote(Center).remote(plan.size_bytes // 4)
        workers = [ray.remote(Worker).remote(plan.size_bytes // 4, center) for _ in range(plan.workers)]
        yield lambda: ray.get([worker.exchange.remote() for worker in workers], timeout=DEADLINE_S)
    finally:
        ray.shutdown()
        while left := set(children.read_text().split()) - before:
            for pid in map(int, left):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def measure(mebibytes: int, workers: int, rows: list[str], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the GB/s of each row, and the server's memory."""
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maniple-", ignore_cleanup_errors=True)))
        (run / "events").mkdir()
        segment = Segment.create(shared_memory(), secrets.token_hex(8), run)
        stack.callback(segment.remove)
        for rank in range(workers):
            segment.mark(rank, LIVE)
        addresses = {"tcp": Address(), "unix": Address(path=f"{run}/socket"), "echo": Address()}
        listeners = {name: stack.enter_context(address.listen()) for name, address in addresses.items()}
        addresses |= {name: Address(port=listeners[name].getsockname()[1]) for name in ("tcp", "echo")}
        plan = Plan(mebibytes * MIB, max(4, mebibytes // 4), workers, run, segment.path, addresses)
        acts: dict[str, Act] = {"ray": stack.enter_context(ray_act(plan))} if "ray" in rows else {}
        server = serve(stack, plan, [listeners["tcp"], listeners["unix"]])
        before_bytes = settled_bytes(server)
        for _ in range(workers if "echo" in rows else 0):
            start(stack, echo, listeners["echo"])
        pipes: list[Any] = []
        for rank in range(max(2, workers) if "gloo" in rows else workers):  # one worker reduces with a host
            own = [row for row in rows if row != "ray" and (row == "gloo" or rank < workers)]
            pipe, far = PROCESSES.Pipe()
            pipes.append(stack.enter_context(pipe))
            start(stack, work, far, rank, own, plan)
            far.close()  # so that the worker's death closes the pipe
        acts = {row: lambda row=row: tell(pipes if row == "gloo" else pipes[:workers], row) for row in rows} | acts
        seconds = interleave(acts, repeats)
        grown_bytes = settled_bytes(server) - before_bytes
    connections = workers * len({"tcp", "unix"} & set(rows))
    bound_bytes = plan.size_bytes + connections * plan.size_bytes // plan.parameters
    memory = {"MiB": mebibytes, "workers": workers, "connections": connections, "server grew, MB": grown_bytes / 1e6}
    memory |= {"center + a parameter per connection, MB": bound_bytes / 1e6, "ratio": grown_bytes / bound_bytes}
    return {row: plan.size_bytes * workers / value / 1e9 for row, value in seconds.items()}, memory


def serve(stack: contextlib.ExitStack, plan: Plan, listeners: list[socket.socket]) -> int:
    """Start the server's process as the launcher does, and return its pid once it serves."""
    env = os.environ | variables_for(Environment(segment=plan.segment, run=plan.run, world=0, token=TOKEN))
    numbers = [one.fileno() for one in listeners]
    command = [sys.executable, "-m", "maniple.host", *map(str, numbers)]
    process = subprocess.Popen(command, env=env, pass_fds=numbers)
    stack.callback(process.wait, DEADLINE_S)
    stack.callback(process.kill)  # callbacks run in reverse order
    link = Link(Endpoint(plan.addresses["tcp"], TOKEN), "data")
    retry_until(link, link.stream, DEADLINE_S).close()
    return process.pid


def start(stack: contextlib.ExitStack, act: Callable[..., None], *arguments: Any) -> None:
    """Start a process that ends with the stack."""
    process = PROCESSES.Process(target=act, args=arguments, daemon=True)
    process.start()
    stack.callback(process.join, DEADLINE_S)
    stack.callback(process.kill)


def tell(pipes: list[Any], row: str) -> None:
    """Run one round: all workers exchange once; the first time, they prepare before. EOFError if one has died."""
    for pipe in pipes:
        pipe.send(row)
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(DEADLINE_S):
            raise TimeoutError(f"worker {rank} has not answered for {DEADLINE_S:g} s")
        pipe.recv()


def settled_bytes(pid: int) -> int:
    """Return the memory of a process without its shared libraries, once it has been stable for a second."""
    deadline, before, now = time.monotonic() + DEADLINE_S, -1, 0  # a server loads its kernels in the background
    while now != before and time.monotonic() < deadline:
        time.sleep(1 if now else 0)
        lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        before, now = now, 1024 * sum(int(line[1]) for line in lines if line[0] in {"Pss_Anon:", "Pss_Shmem:"})
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 40, 400], help="model sizes in MiB, multiples of 4")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the child processes, as Ctrl-C does
    missing = {row: f"{need} is not installed" for row, need in NEEDS.items() if not importlib.util.find_spec(need)}
    ratios, memories = [], []
    for mebibytes, workers in itertools.product(options.sizes, options.workers):
        asked = [row for row in options.rows if row != "unix" or workers == 1]  # one worker is enough for this row
        speed, memory = measure(mebibytes, workers, [row for row in asked if row not in missing], options.repeats)
        what = ROWS | ({"gloo": ROWS["gloo"] + ": one and a host"} if workers == 1 else {}) | missing
        pairs = {(a, b): speed[a] / speed[b] for a in speed for b in speed}
        parts = [(row, {"GB/s": speed.get(row), "of (a)": pairs.get((row, "echo"))}) for row in asked]
        table = [{"row": row} | numbers | {"what": what[row]} for row, numbers in parts]
        report(f"server-{mebibytes}-{workers}", f"{mebibytes} MiB, workers: {workers}", table, repeats=options.repeats)
        ratios.append({"MiB": mebibytes, "workers": workers} | {f"{a} / {b}": pairs.get((a, b)) for a, b in RATIOS})
        memories.append(memory)
    report("server-memory", "memory of the server", memories)
    report("server", "how many times as fast", ratios, repeats=options.repeats)


if __name__ == "__main__":
    main()
