"""Prefetch: batches are loaded in another process, which never outlives the pass or the trainer."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import maniple
from maniple.errors import InvalidArgument, ProducerFailed
from tests.waiting import await_, is_gone

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]


class Counted:
    """Batches that tell in which process they were made, in passes that can be repeated."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for number in range(self.count):
            yield {"number": number, "x": np.full((3, number), number, np.float32), "pid": os.getpid()}


def loader_of(batches) -> int:
    """The process behind a pass over `Counted`."""
    return next(batches)["pid"]


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_batches_come_in_order_from_another_process_in_every_pass(ahead):
    batches = maniple.Prefetch(Counted(20), ahead=ahead)
    assert len(batches) == 20
    pids = set()
    for _ in range(2):
        passed = list(batches)
        assert [batch["number"] for batch in passed] == list(range(20))
        for number, batch in enumerate(passed):
            assert batch["x"].shape == (3, number) and (batch["x"] == number).all()
        pids |= {batch["pid"] for batch in passed}
    assert len(pids) == 2 and os.getpid() not in pids
    assert all(is_gone(pid) for pid in pids)


def test_structure_is_kept_and_arrays_are_ones_own():
    shared = np.arange(3.0)
    sent = [
        shared,
        [shared, (np.int8(3), {"a": [np.zeros((0, 2)), "word", None]})],
        (np.arange(12).reshape(3, 4).T, np.array(["text", "too"])),
        np.zeros(2_000_000),  # larger than those before
        7,
    ]
    got = list(maniple.Prefetch(sent))
    assert [type(one) for one in got] == [np.ndarray, list, tuple, np.ndarray, int]
    np.testing.assert_array_equal(got[1][0], shared)
    assert got[1][1][1]["a"][0].shape == (0, 2) and got[1][1][1]["a"][1:] == ["word", None]
    np.testing.assert_array_equal(got[2][0], sent[2][0])
    assert got[2][1].tolist() == ["text", "too"]
    got[0] += 1  # it can be written to, and is nobody else's
    assert got[1][0].tolist() == [0, 1, 2] and got[4] == 7


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    sent = [
        (torch.arange(6.0).reshape(2, 3), torch.tensor(3)),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.ones(5)[::2],
    ]
    pair, half, step = maniple.Prefetch(sent)
    assert torch.equal(pair[0], sent[0][0]) and torch.equal(pair[1], sent[0][1])
    assert half.dtype == torch.bfloat16 and step.tolist() == [1, 1, 1]
    pair[0].add_(1)


def test_tensors_come_to_a_trainer_that_has_not_imported_torch(tmp_path):
    (tmp_path / "torch.py").write_text(  # what is asked of it, in a tenth of the time
        textwrap.dedent(
            """
            import types

            class Tensor:
                requires_grad, device = False, types.SimpleNamespace(type="cpu")
                def __init__(self, array): self.array = array
                def numpy(self): return self.array

            from_numpy = Tensor
            """
        )
    )
    code = """
        import sys, numpy as np, maniple

        def batches():
            import torch
            yield torch.from_numpy(np.arange(3))

        assert "torch" not in sys.modules
        print(*(batch.numpy() for batch in maniple.Prefetch(batches())))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[0 1 2]\n"), done.stderr


def test_exception_is_raised_with_the_remote_traceback_as_cause():
    def batches():
        yield 1
        raise KeyError("film 7")

    passed = iter(maniple.Prefetch(batches()))
    assert next(passed) == 1
    with pytest.raises(KeyError, match="film 7") as caught:
        next(passed)
    assert isinstance(caught.value.__cause__, ProducerFailed)
    assert 'raise KeyError("film 7")' in str(caught.value.__cause__)
    with pytest.raises(StopIteration):
        next(passed)


def test_exception_that_cannot_be_pickled_is_reported_by_its_traceback():
    class Odd(Exception):  # of this function: it has no name to be found by
        pass

    def batches():
        raise Odd("film 8")
        yield

    with pytest.raises(ProducerFailed, match="Odd: film 8"):
        list(maniple.Prefetch(batches()))


def test_batch_that_cannot_be_pickled_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        list(maniple.Prefetch([lambda: None]))


def test_feed_cannot_be_taken_from_in_another_process(tmp_path):
    from maniple.center import Segment
    from maniple.feed.local_feed import Batches, LocalConsumer

    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    source = LocalConsumer(segment.path, "x")
    with pytest.raises(InvalidArgument, match="forked from its worker"):
        list(maniple.Prefetch(Batches("x", source)))
    source.close()
    segment.remove()


def test_killed_loader_is_an_error_and_no_hang():
    passed = iter(maniple.Prefetch(Counted(1000), ahead=1))
    os.kill(loader_of(passed), signal.SIGKILL)
    with pytest.raises(ProducerFailed, match="was killed by SIGKILL, in the middle"):
        list(passed)


def test_loader_killed_by_a_signal_without_a_name_is_reported_by_its_number():
    passed = iter(maniple.Prefetch(Counted(1000), ahead=1))
    os.kill(loader_of(passed), signal.SIGRTMIN + 3)
    with pytest.raises(ProducerFailed, match=f"was killed by signal {signal.SIGRTMIN + 3}, in the middle"):
        list(passed)


def test_no_more_batches_than_requested_are_prefetched(tmp_path):
    made = tmp_path / "made"

    def batches():
        for number in range(20):
            with made.open("a") as file:
                file.write(".")
            yield np.full(1000, number)

    passed = iter(maniple.Prefetch(batches(), ahead=3))
    next(passed)
    await_(lambda: made.stat().st_size >= 5)  # 1 is taken, 3 are ready, and one waits to be handed over
    for number, batch in enumerate(passed, 1):
        assert batch[0] == number
        assert made.stat().st_size <= number + 6  # one more may be on its way since this one was taken


def test_abandoned_pass_leaves_no_process():
    before = children()
    for batch in maniple.Prefetch(Counted(1000)):
        pid = batch["pid"]
        break
    gc.collect()
    assert is_gone(pid) and children() == before


def test_loader_that_sleeps_is_ended_too():
    def batches():
        import time

        yield os.getpid()
        time.sleep(600)

    passed = iter(maniple.Prefetch(batches()))
    pid = next(passed)
    del passed
    gc.collect()
    assert is_gone(pid)


def test_loader_ends_with_a_killed_trainer(tmp_path):
    code = """
        import os, time, maniple

        def batches():
            yield os.getpid()
            time.sleep(600)

        passed = iter(maniple.Prefetch(batches()))
        print(next(passed), flush=True)
        time.sleep(600)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    loader = int(trainer.stdout.readline())
    trainer.kill()
    trainer.communicate(timeout=30)
    await_(lambda: is_gone(loader))


def test_script_that_ends_in_the_middle_of_a_pass_ends():
    code = """
        import os, maniple
        passed = iter(maniple.Prefetch(range(1000)))
        print(next(passed))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_torch_has_one_thread_in_the_loader():
    torch = pytest.importorskip("torch")

    def batches():
        yield torch.get_num_threads()

    assert list(maniple.Prefetch(batches())) == [1]


def test_wrong_numbers_are_refused():
    for ahead in (0, 257):
        with pytest.raises(InvalidArgument, match=f"ahead={ahead}"):
            maniple.Prefetch([], ahead=ahead)
    with pytest.raises(TypeError):
        len(maniple.Prefetch(iter([])))


def test_time_lost_is_a_row_of_the_worker(run):
    done = run(
        """
        import time
        import numpy as np
        import maniple

        def batches():
            for number in range(12):
                time.sleep(0.06)
                yield np.full(10, number)

        worker = maniple.join()
        w = np.zeros(2)
        replica = worker.share({"w": w})
        for x in maniple.Prefetch(batches()):
            replica.step()
        """
    )
    assert done.process.returncode == 0, done.output
    rows = done.events(0, "wait")
    assert sum(row["batches"] for row in rows) == 12
    assert sum(row["seconds"] for row in rows) > 0.1  # it took 0.7 s to load
    assert all(row["feed"] == "prefetch" for row in rows)
