"""Throughput of an exchange through a server, compared with a loopback echo, with Ray and with gloo.

Torch models of 4, 40 and 400 MiB (float32) with 8 and 200 parameters, and 1, 2 and 4 workers, each a separate process.
The limit is a bare duplex echo of the same bytes, over loopback TCP and over a Unix-domain socket. Like ours, it has
one server process with a thread per connection. It is measured in pieces of 256 KiB and of 1 MiB, and the better one
counts. In a round every worker exchanges once; the rounds of all rows are interleaved, in one run. GB/s is bytes of the
vector times workers per second of a round, from the starting signal through a pipe to the last worker's "done". An
exchange moves the vector twice per worker, an all_reduce among n workers only 2 (n - 1) / n times. The server's memory
is the growth of its process since before the first worker, without its libraries. The worker that creates the center
sends it parameter by parameter, so its connection needs the memory of the largest one rather than of a chunk.

Ray and gloo are measured with --others only, since Ray takes long to start. Ray is not a dependency of this project:
without it, its row is empty.

    python benchmarks/server.py [--parameters 8 200] [--sizes 4 40 400] [--workers 1 2 4] [--others]
    python benchmarks/server.py --rows tcp echo
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
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from maniple.adapters import Adapter, adapt
from maniple.center import Segment, SharedCenter
from maniple.center.tcp_client import TcpCenter
from maniple.connection.link import Endpoint, Link
from maniple.connection.retry import retry_until
from maniple.contracts import ExchangeInfo
from maniple.environment import Environment, shared_memory, variables_for
from maniple.layout import CHUNK_BYTES
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
    "echo": "the limit of tcp: bare duplex echo over loopback TCP",
    "unix echo": "the limit of unix: bare duplex echo over a Unix-domain socket",
    "ray": "a Ray actor does the same update: x travels there and back, and is copied into place",
    "gloo": "torch.distributed gloo all_reduce of the flat vector among the workers",
}
OTHERS = ("ray", "gloo")
PIECES = {f"{row}, {piece >> 10} KiB": (row, piece) for row in ("echo", "unix echo") for piece in (MIB // 4, MIB)}
LIMITS = {"tcp": "echo", "unix": "unix echo"}
RATIOS = [*LIMITS.items(), ("unix", "tcp")]
RATIOS_TO_OTHERS = [("tcp", "ray"), ("tcp", "gloo"), ("shared", "ray"), ("shared", "gloo")]
UNIX_BUFFER_BYTES = 4 * MIB  # as ours; the default is 208 KiB. Over TCP, both leave it to the kernel.
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
    model = make_model(plan, rank)
    prepare = dict.fromkeys(PIECES, echo_act) | {"gloo": gloo_act}
    acts = {row: prepare.get(row, our_act)(plan, row, rank, model) for row in rows}
    with contextlib.suppress(EOFError):  # the parent has exited
        while pipe.poll(DEADLINE_S):
            acts[pipe.recv()]()
            pipe.send("done")
    os._exit(0)  # gloo's threads would wait for their peers


def make_model(plan: Plan, rank: int) -> Adapter:
    """Make a torch model, whose parameters the adapter keeps in one flat vector. All rows use the same one."""
    import torch

    flat = np.random.default_rng(rank).random(plan.size_bytes // 4, np.float32) + np.float32(1)
    return adapt(torch.nn.ParameterList([torch.tensor(part) for part in np.array_split(flat, plan.parameters)]))


def vector_of(model: Adapter) -> np.ndarray:
    """Return the flat vector that has all parameters."""
    vectors = model.flat_vectors()
    assert vectors is not None
    return vectors[0]["float32"]


def our_act(plan: Plan, row: str, rank: int, model: Adapter) -> Act:
    """Prepare an exchange with the center, through the call that training uses."""
    if row == "shared":  # a separate center, so that the server's pages are not shared
        center, _ = SharedCenter.open_or_create(Segment(plan.segment), "center-1", model, rank=rank)
    else:
        link = Link(Endpoint(plan.addresses[row], TOKEN), "data")
        center, _ = TcpCenter.open_or_create(link, "center-0", model, rank=rank, deadline_s=DEADLINE_S)
    return lambda: center.exchange(model, EASGD(ALPHA), None, ExchangeInfo(live=plan.workers))


def echo_act(plan: Plan, row: str, _rank: int, model: Adapter) -> Act:
    """Prepare a duplex echo of the same bytes, without frames, locks and arithmetic."""
    link = configured(plan.addresses[row].connect(DEADLINE_S))
    whole, (_, size) = memoryview(vector_of(model)).cast("B"), PIECES[row]
    pieces = [whole[start : start + size] for start in range(0, whole.nbytes, size)]

    def act() -> None:
        sender = threading.Thread(target=link.sendall, args=(whole,), daemon=True)
        sender.start()
        for piece in pieces:
            if link.recv_into(piece, size, socket.MSG_WAITALL) < size:
                raise ConnectionResetError("the echo has ended")
        sender.join(DEADLINE_S)

    return act


def echo_all(listeners: dict[str, socket.socket], workers: int) -> None:
    """Run the server of all echoes: accept a connection of each worker for each row, and echo it in a thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads: list[threading.Thread] = []
    for row, listener in listeners.items():
        listener.settimeout(DEADLINE_S)
        for _ in range(workers):
            threads.append(threading.Thread(target=echo, args=(configured(listener.accept()[0]), PIECES[row][1])))
            threads[-1].start()
    for thread in threads:
        thread.join()


def echo(link: socket.socket, size: int) -> None:
    """Echo the bytes of one connection in pieces, until it closes."""
    buffer = memoryview(bytearray(size))
    with contextlib.suppress(ConnectionError):
        while count := link.recv_into(buffer, size, socket.MSG_WAITALL):
            link.sendall(buffer[:count])


def configured(link: socket.socket) -> socket.socket:
    """Give the socket of an echo the settings that ours have.

    Its timeout is the kernel's: Python's would cost another system call each time.
    """
    link.settimeout(None)
    if link.family == socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", int(DEADLINE_S), 0))
    return link


def gloo_act(plan: Plan, row: str, rank: int, model: Adapter) -> Act:
    """Prepare an all_reduce of a vector of zeros, whose repeated sums stay finite."""
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    among: Any = {"rank": rank, "world_size": max(2, plan.workers), "timeout": datetime.timedelta(seconds=DEADLINE_S)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{plan.run}/{row}", **among)
    vector = torch.zeros(vector_of(model).size)
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


def measure(
    mebibytes: int, parameters: int, workers: int, rows: list[str], repeats: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the GB/s of each row, an echo once for each size of its pieces, and the server's memory."""
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maniple-", ignore_cleanup_errors=True)))
        (run / "events").mkdir()
        segment = Segment.create(shared_memory(), secrets.token_hex(8), run)
        stack.callback(segment.remove)
        for rank in range(workers):
            segment.mark(rank, LIVE)
        contestants = [name for name in [*ROWS, *PIECES] if row_of(name) in rows and name not in LIMITS.values()]
        echoes = [name for name in contestants if name in PIECES]
        listeners, addresses = {}, dict[str, Address]()
        for number, name in enumerate(["tcp", "unix", *echoes]):
            address = Address(path=f"{run}/socket-{number}") if name.startswith("unix") else Address()
            listeners[name] = one = stack.enter_context(address.listen())
            addresses[name] = address if address.path else Address(port=one.getsockname()[1])
        plan = Plan(mebibytes * MIB, parameters, workers, run, segment.path, addresses)
        acts: dict[str, Act] = {"ray": stack.enter_context(ray_act(plan))} if "ray" in rows else {}
        server = serve(stack, plan, [listeners["tcp"], listeners["unix"]])
        before_bytes = settled_bytes(server)
        if echoes:
            start(stack, echo_all, {name: listeners[name] for name in echoes}, workers)
        pipes: list[Any] = []
        for rank in range(max(2, workers) if "gloo" in rows else workers):  # one worker reduces with a host
            own = [name for name in contestants if name != "ray" and (name == "gloo" or rank < workers)]
            pipe, far = PROCESSES.Pipe()
            pipes.append(stack.enter_context(pipe))
            start(stack, work, far, rank, own, plan)
            far.close()  # so that the worker's death closes the pipe
        told = {name: partial(tell, pipes if name == "gloo" else pipes[:workers], name) for name in contestants}
        seconds = interleave(told | acts, repeats)
        grown_bytes = settled_bytes(server) - before_bytes
    connections = workers * len({"tcp", "unix"} & set(rows))
    bound_bytes = (plan.size_bytes if connections else 0) + connections * min(CHUNK_BYTES, plan.size_bytes)
    memory = {"parameters": parameters, "MiB": mebibytes, "workers": workers, "connections": connections}
    memory |= {"server grew, MB": grown_bytes / 1e6, "center + a chunk per connection, MB": bound_bytes / 1e6}
    memory["ratio"] = grown_bytes / bound_bytes if connections else None
    return {name: plan.size_bytes * workers / value / 1e9 for name, value in seconds.items()}, memory


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


def row_of(name: str) -> str:
    """Return the row of a contestant: echoes have one for each size of pieces."""
    return PIECES[name][0] if name in PIECES else name


def with_limits(speed: dict[str, float]) -> dict[str, float]:
    """Add the rows of the echoes, with the better of their pieces."""
    limits = {row: [value for name, value in speed.items() if row_of(name) == row] for row in LIMITS.values()}
    return speed | {row: max(values) for row, values in limits.items() if values}


def ratio(speed: dict[str, float], a: str, b: str | None) -> float | None:
    """Return how many times as fast `a` is; None if one of them was not measured."""
    return speed[a] / speed[b] if a in speed and b in speed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[8, 200], help="numbers of parameters")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 40, 400], help="model sizes in MiB")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=11)
    ours = [row for row in ROWS if row not in OTHERS]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ours, help="which rows; all but Ray and gloo")
    parser.add_argument("--others", action="store_true", help="measure Ray and gloo too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the child processes, as Ctrl-C does
    asked = [row for row in ROWS if row in options.rows or (options.others and row in OTHERS)]
    missing = [row for row in asked if row == "ray" and not importlib.util.find_spec("ray")]
    wanted = RATIOS + [pair for pair in RATIOS_TO_OTHERS if pair[1] in asked]
    rows, ratios, memories = [row for row in asked if row not in missing], [], []
    for parameters, mebibytes, workers in itertools.product(options.parameters, options.sizes, options.workers):
        measured, memory = measure(mebibytes, parameters, workers, rows, options.repeats)
        speed = with_limits(measured)
        what = ROWS | ({"gloo": ROWS["gloo"] + ": one and a host"} if workers == 1 else {})
        table: list[dict[str, Any]] = [
            {
                "row": name,
                "GB/s": value,
                "of its limit": ratio(speed, name, LIMITS.get(name)),
                "what": what[row_of(name)],
            }
            for name, value in measured.items()
        ]
        table += [{"row": row, "what": f"{row} is not installed"} for row in missing]
        case = {"parameters": parameters, "MiB": mebibytes, "workers": workers}
        title = ", ".join(f"{key}: {value}" for key, value in case.items())
        report(f"server-{parameters}-{mebibytes}-{workers}", title, table, repeats=options.repeats)
        ratios.append(case | {f"{a} / {b}": ratio(speed, a, b) for a, b in wanted})
        memories.append(memory)
    report("server-memory", "memory of the server", memories)
    report("server", "how many times as fast", ratios, repeats=options.repeats)


if __name__ == "__main__":
    main()
