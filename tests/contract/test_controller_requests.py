"""Controller requests: each reaches the controller exactly once, though servers are killed and answers lost.

A server that is killed leaves its segment and nothing else, so a new `ControllerRequests` with a new controller on the
same segment is what its successor has.
"""

import math
import threading
import time

import msgspec
import numpy as np
import pytest

from maniple.center import Segment
from maniple.controller import Controller
from maniple.errors import BadFrame, HandlerFailed, InvalidArgument, ManipleError, SharedMemoryFull, WaitedTooLong
from maniple.host.controller_requests import ControllerRecord, ControllerRequests, request_stop
from maniple.host.snapshots import BestCenter, discard_changes, prepare_resume
from maniple.live_settings import Changes
from maniple.memory.segment import LIVE
from maniple.record import Events, RunFolder, read_events
from maniple.settings.options import Limits
from maniple.wire.messages import ControllerRequest
from tests.limits import file_limit

PATIENCE_S = 60.0  # only against hanging


class Counter(Controller):
    """Counts what it hears; some requests make it fail in one way or another."""

    def handle_control(self, request, worker, info):
        self.state["heard"] = self.state.get("heard", 0) + 1
        if request == "add":
            self.state["sum"] = self.state.get("sum", 0) + info["value"]
            return {"sum": self.state["sum"], "worker": worker}
        if request == "fail":
            raise RuntimeError("out of luck")
        if request == "exit":
            raise SystemExit(3)
        if request == "refuse":
            raise InvalidArgument("not with me.")
        if request == "late":
            raise WaitedTooLong("for too long.")
        if request == "object":
            return object()
        if request == "bad state":
            self.state["bad"] = object()
            return "done"
        if request == "no state":
            self.state = ["no", "dict"]
            return "done"
        if request == "echo":
            return info
        return super().handle_control(request, worker, info)


class RequestHost:
    """One host's memory, and the controller requests of its servers, one after the other."""

    def __init__(self, root, kind=Counter) -> None:
        run = root / "run"
        (run / "center").mkdir(parents=True)
        self.segment = Segment.create(root, "0123456789abcdef", run)
        self.rows = run / "server.jsonl"
        self.snapshots: list[str] = []
        self.center, self.kind, self.limits = run / "center", kind, Limits()
        self.start()

    def start(self) -> None:
        """A new server, the first or one after a kill."""
        self.controller = self.kind()
        events = Events(self.rows)
        self.best = BestCenter(self.segment, RunFolder(self.center.parent), events)
        self.best._write = self._write
        self.requests = ControllerRequests(self.controller, self.segment, events, self.limits, self.best)

    def ask(self, request, number, *, worker="a1", rank=0, steps=0, **info):
        question = ControllerRequest(number, request, rank, 1, steps, 0)
        return msgspec.json.decode(self.requests.answer(worker, question, info))

    def events(self, event) -> list[dict]:
        return [row for row in read_events(self.rows) if row["event"] == event] if self.rows.exists() else []

    def _write(self, name):
        self.snapshots.append(name)
        (self.center / name).mkdir(exist_ok=True)
        return self.center / name


@pytest.fixture
def requested(tmp_path):
    host = RequestHost(tmp_path)
    yield host
    host.segment.remove()


def test_repeated_request_gets_the_same_answer_and_is_handled_once(requested):
    first = requested.ask("add", 1, value=5)
    assert first == {"sum": 5, "worker": 0}
    assert requested.ask("add", 1, value=5) == first
    assert requested.ask("add", 2, value=5) == {"sum": 10, "worker": 0}
    assert requested.controller.state["heard"] == 2


def test_request_repeated_to_the_next_server_is_handled_once(requested):
    first = requested.ask("add", 1, value=5)
    requested.start()
    assert requested.ask("add", 1, value=5) == first
    assert requested.controller.state == {"heard": 1, "sum": 5}
    requested.start()
    assert requested.ask("add", 2, value=1) == {"sum": 6, "worker": 0}


def test_server_killed_before_the_answer_was_written_has_not_handled_the_request(requested, monkeypatch):
    requested.ask("add", 1, value=5)

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ControllerRecord, "write", kill)
        requested.ask("add", 2, value=7)
    requested.start()
    assert requested.controller.state == {"heard": 1, "sum": 5}
    assert requested.ask("add", 2, value=7) == {"sum": 12, "worker": 0}


def test_workers_have_numbers_of_their_own(requested):
    for number in (1, 2):
        for rank, worker in enumerate(("a1", "b2", "c3")):
            assert requested.ask("add", number, worker=worker, rank=rank, value=1)["worker"] == rank
    assert requested.controller.state["sum"] == 6


def test_request_that_its_worker_has_given_up_is_not_handled_after_a_newer_one(requested):
    """It waited behind a slow handler for longer than its worker did, and the next one was quicker."""
    newer = requested.ask("add", 2, value=1)
    with pytest.raises(ManipleError):
        requested.ask("add", 1, value=100)
    assert requested.ask("add", 2, value=1) == newer
    assert requested.controller.state["sum"] == 1


def test_all_that_json_knows_survives_a_server(requested):
    state = {"words": ["ä", "漢", ""], "deep": {"a": {"b": [1, 2.5, None, True]}}, "big": 2**53, "small": 1e-300}
    requested.controller.state["kept"] = state
    requested.ask("echo", 1)
    requested.start()
    assert requested.controller.state["kept"] == state


def test_what_a_controller_sets_at_its_beginning_gives_way_to_what_it_knew(tmp_path):
    class Patient(Counter):
        def __init__(self) -> None:
            self.state = {"sum": 100, "new": True}

    host = RequestHost(tmp_path, Patient)
    try:
        assert host.ask("add", 1, value=1)["sum"] == 101
        host.start()
        assert host.controller.state == {"sum": 101, "new": True, "heard": 1}
    finally:
        host.segment.remove()


def test_failure_of_the_handler_is_reported_with_its_traceback_and_recorded(requested):
    with pytest.raises(HandlerFailed, match="out of luck") as caught:
        requested.ask("fail", 1, rank=3)
    assert "in handle_control" in str(caught.value)
    assert "'fail' of worker 3" in str(caught.value)
    (row,) = requested.events("handler failed")
    assert (row["worker"], row["request"]) == (3, "fail")
    assert requested.ask("add", 2, value=1)["sum"] == 1, "the next question is answered"


@pytest.mark.parametrize("request_", ["fail", "refuse", "exit", "object", "late"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_request_that_failed_is_handled_once_too(requested, request_, is_killed):
    with pytest.raises(ManipleError) as first:
        requested.ask(request_, 1)
    if is_killed:
        requested.start()
    with pytest.raises(ManipleError) as second:
        requested.ask(request_, 1)
    assert type(second.value) is type(first.value)
    assert str(second.value) == str(first.value)
    assert requested.controller.state["heard"] == 1


def test_errors_of_maniple_itself_keep_their_kind(requested):
    with pytest.raises(InvalidArgument, match="not with me"):
        requested.ask("refuse", 1)
    with pytest.raises(InvalidArgument, match="the controller does not answer 'nxet'"):
        requested.ask("nxet", 2)


@pytest.mark.parametrize("request_", ["bad state", "no state"])
def test_state_that_cannot_be_saved_is_reported_and_replaced_by_the_last_that_could(requested, request_):
    requested.ask("add", 1, value=5)
    with pytest.raises(HandlerFailed):
        requested.ask(request_, 2)
    requested.requests.count((0, 1), 1, 1)
    assert requested.ask("add", 3, value=1)["sum"] == 6
    requested.start()
    assert requested.controller.state["sum"] == 6


def test_answers_beyond_json_are_kept_apart(requested):
    assert requested.ask("echo", 1, x=math.nan) == {"x": None}, "JSON has no such number"
    with pytest.raises(HandlerFailed, match="object"):
        requested.ask("object", 2)


def test_questions_never_reach_the_controller_at_the_same_time(tmp_path):
    class Slow(Controller):
        inside = most = 0

        def handle_control(self, request, worker, info):
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
            time.sleep(0.002)
            self.state["sum"] = self.state.get("sum", 0) + 1
            Slow.inside -= 1

    host = RequestHost(tmp_path, Slow)
    try:
        threads = [
            threading.Thread(
                target=lambda rank: [host.ask("x", number, worker=f"w{rank}", rank=rank) for number in range(1, 21)],
                args=(rank,),
            )
            for rank in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert (Slow.most, host.controller.state["sum"]) == (1, 160)
    finally:
        host.segment.remove()


def test_heartbeats_and_goodbyes_do_not_wait_for_a_slow_handler(tmp_path):
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(Controller):
        def handle_control(self, request, worker, info):
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return self.batches

    host = RequestHost(tmp_path, Stuck)
    try:
        asking = threading.Thread(target=host.ask, args=("x", 1))
        asking.start()
        assert entered.wait(PATIENCE_S)
        for steps in range(1, 6):  # hangs here if they do
            host.requests.count((1, 1), steps, 10 * steps)
        host.requests.forget("b2")
        assert asking.is_alive(), "all this while the handler was busy"
        go_on.set()
        asking.join(PATIENCE_S)
        assert host.ask("x", 2) == 5, "what was reported meanwhile is not lost"
    finally:
        go_on.set()
        host.segment.remove()


def test_counts_and_the_reason_to_stop_survive_a_server(requested):
    requested.limits = Limits(max_batches=100)
    requested.start()
    assert requested.requests.count((0, 1), 60, 600) == ""
    requested.ask("echo", 1)  # written down
    requested.start()
    assert requested.controller.batches == 60
    assert "--max-batches 100" in requested.requests.count((1, 1), 40, 400)
    assert requested.ask("next", 2) == "stop"
    requested.start()
    assert "--max-batches 100" in requested.requests.count((0, 1), 60, 600)
    assert len(requested.events("stop")) == 1, "that everybody stops is reported once"


def test_steps_that_come_with_a_request_count_at_once(requested):
    requested.limits = Limits(max_batches=10)
    requested.start()
    assert requested.ask("next", 1, steps=9) == "train"
    assert requested.ask("next", 2, steps=10) == "stop"


def test_run_that_goes_on_has_its_state_and_no_reason_to_stop(requested):
    requested.ask("add", 1, value=5)
    requested.ask("stop", 2, reason="enough")
    assert requested.requests.count((0, 1), 1, 1) == "enough"
    prepare_resume(requested.segment)
    requested.start()
    assert requested.requests.count((0, 1), 1, 1) == ""
    assert requested.controller.state["sum"] == 5


def test_the_launcher_can_stop_all_workers_and_a_resumed_run_does_not_stop_again(requested):
    assert requested.requests.count((0, 1), 10, 0) == ""
    request_stop(requested.segment.path, "target loss 0.2: reached")
    assert requested.requests.count((0, 1), 20, 0) == "target loss 0.2: reached"
    assert [row["reason"] for row in requested.events("stop")] == ["target loss 0.2: reached"]
    assert requested.ask("next", 1) == "stop"
    prepare_resume(requested.segment)
    requested.start()
    assert requested.requests.count((0, 1), 30, 0) == ""


def test_dead_validator_is_replaced_across_servers(requested):
    requested.limits = Limits(validate_every=1)
    requested.start()
    for rank in (0, 1):
        requested.segment.renew(rank)
        requested.segment.mark(rank, LIVE)
    assert requested.ask("next", 1, steps=5) == "validate"
    assert requested.ask("next", 1, worker="b2", rank=1) == "train"
    requested.start()
    assert requested.ask("next", 2, worker="b2", rank=1) == "train", "it is alive, whoever serves"
    requested.segment.renew(0)  # the launcher has started its successor
    assert requested.ask("next", 3, worker="b2", rank=1) == "validate"


def test_center_of_the_best_validation_is_kept_and_no_other(requested):
    requested.limits = Limits(validate_every=1)
    requested.start()
    for number, loss in enumerate((0.5, 0.7, 0.3)):
        assert requested.ask("next", 2 * number + 1, steps=10 * (number + 1)) == "validate"
        requested.ask("validated", 2 * number + 2, loss=loss)
    assert sorted(path.name for path in requested.center.iterdir()) == ["best", "best-000002"]
    assert (requested.center / "best").resolve().name == "best-000002"
    assert [row["loss"] for row in requested.events("best")] == [0.5, 0.3]


def test_disk_that_cannot_take_the_best_center_does_not_end_the_run(requested):
    requested.limits = Limits(validate_every=1)
    requested.start()

    def refuse(name):
        raise OSError(28, "No space left on device")

    requested.best._write = refuse
    assert requested.ask("next", 1, steps=5) == "validate"
    assert requested.ask("validated", 2, loss=0.5) == {"best": True, "stop": False}
    assert requested.events("unsaved")


def test_numbers_of_numpy_are_answered_and_kept_as_plain_ones(requested):
    requested.controller.handle_control = lambda *_: {"mean": np.float32(0.5), "all": np.arange(3)}
    assert requested.ask("x", 1) == {"mean": 0.5, "all": [0, 1, 2]}
    requested.controller.state["best"] = np.float64(0.25)
    requested.ask("x", 2)
    assert ControllerRecord.read(requested.segment.path).state == {"best": 0.25}


def test_state_that_a_failing_handler_has_spoilt_gives_way_too(requested):
    requested.ask("add", 1, value=3)

    def spoil(*_):
        requested.controller.state["bad"] = object()
        raise RuntimeError("out of luck")

    requested.controller.handle_control = spoil
    with pytest.raises(HandlerFailed):
        requested.ask("x", 2)
    assert requested.controller.state["sum"] == 3
    requested.requests.count((0, 1), 1, 1)


def test_rank_that_nobody_can_have_is_refused(requested):
    for rank, incarnation in ((30_000, 1), (-2, 1), (0, -1), (0, 1 << 40)):
        question = ControllerRequest(1, "next", rank, incarnation, 0, 0)
        with pytest.raises(BadFrame, match="cannot ask"):
            requested.requests.answer("w", question, {})


def test_limit_is_seen_while_a_handler_hangs(requested):
    requested.limits = Limits(max_batches=5)
    requested.start()
    is_in, may_end = threading.Event(), threading.Event()

    def hang(*_):
        is_in.set()
        may_end.wait(PATIENCE_S)

    requested.controller.handle_control = hang
    thread = threading.Thread(target=requested.ask, args=("x", 1), daemon=True)
    thread.start()
    assert is_in.wait(PATIENCE_S)
    assert "--max-batches 5" in requested.requests.count((0, 1), 6, 6)
    may_end.set()
    thread.join(PATIENCE_S)


def test_best_that_was_kept_before_a_kill_is_not_kept_anew(requested):
    center = requested.center
    requested.best.keep_candidate()
    (center / "candidate" / "which").write_text("1")
    requested.best.keep_best(1, 0.5)  # and killed before that was written down: the question is heard again
    requested.start()
    requested.best.keep_best(1, 0.5)
    assert requested.snapshots == ["candidate"]
    assert (center / "best").resolve() == center / "best-000001"
    requested.best.keep_candidate()
    (center / "candidate" / "which").write_text("2")
    requested.best.keep_best(2, 0.25)
    assert (center / "best" / "which").read_text() == "2"
    requested.best.prune_bests(2)
    assert not (center / "best-000001").exists()


def test_changed_settings_outlive_servers_and_give_way_to_what_is_said_anew(requested):
    assert requested.requests.changes == ""
    requested.requests.change({"alpha": 0.3, "every": 20})
    requested.ask("add", 1, value=5)
    prepare_resume(requested.segment)
    requested.start()
    assert Changes.read(requested.requests.changes).since(Changes()) == {"alpha": 0.3, "every": 20}
    assert requested.requests.change({"every": 5}).number == 2
    discard_changes(requested.segment, rule=False, pace=True)  # --resume RUN --every 10
    requested.start()
    assert Changes.read(requested.requests.changes).since(Changes()) == {"alpha": 0.3}


def test_a_change_that_cannot_be_written_down_is_refused(requested):
    requested.requests.change({"alpha": 0.3})
    before = requested.requests.changes
    with file_limit(0), pytest.raises(SharedMemoryFull):
        requested.requests.change({"alpha": 0.4})
    assert requested.requests.changes == before
    requested.start()
    assert requested.requests.changes == before
