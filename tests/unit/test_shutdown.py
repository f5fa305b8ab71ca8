"""The end of a worker's script by a signal or an error: where it may end, and with which exit code."""

import signal
from types import SimpleNamespace

import pytest

from maniple.environment import Environment
from maniple.errors import WorkerFailed
from maniple.record import RunFolder
from maniple.replica.context import TrainingContext
from maniple.worker.shutdown import SignalHandler, check_host_lost


@pytest.fixture
def context(monkeypatch) -> TrainingContext:
    """A context whose timers never fire: the grace period of a step is not waited for."""
    monkeypatch.setattr("threading.Timer.start", lambda self: None)
    return TrainingContext(Environment())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_a_signal_ends_a_script_that_shares_nothing_at_once(context, number, code):
    with pytest.raises(SystemExit) as ended:
        SignalHandler(context)(number, None)
    assert ended.value.code == code == context.exit_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_waits_for_the_current_step_and_a_second_one_does_not(context, number):
    context.replicas.append(SimpleNamespace(is_exchanging=False))
    handler = SignalHandler(context)
    handler(number, None)
    assert context.is_signalled, "the step that is under way sees it at its end"
    with pytest.raises(SystemExit):
        handler(number, None)


def test_no_signal_interrupts_an_exchange(context):
    replica = SimpleNamespace(is_exchanging=True)
    context.replicas.append(replica)
    handler = SignalHandler(context)
    for _ in range(3):
        handler(signal.SIGTERM, None)
    replica.is_exchanging = False
    with pytest.raises(SystemExit):
        context.exit_if_signalled()


def test_the_first_signal_decides_the_exit_code(context):
    context.replicas.append(SimpleNamespace(is_exchanging=True))
    handler = SignalHandler(context)
    handler(signal.SIGUSR1, None)
    handler(signal.SIGTERM, None)
    assert context.exit_code == 0


def test_a_worker_that_has_left_is_not_ended_again(context):
    context.exit_code, context.has_left = 143, True
    context.exit_if_signalled()


def test_an_elastic_launcher_restarts_workers_whose_host_was_lost(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "run")
    environment = Environment(rank=1, world=2, run=run.path, launcher="torchrun")
    monkeypatch.setattr("maniple.worker.shutdown.is_elastic", lambda: True)
    with pytest.raises(WorkerFailed, match=r"has ended before worker 1 was done.*torchrun restarts.*--max-restarts"):
        check_host_lost(environment)
    run.stop()
    check_host_lost(environment)  # `maniple stop` has ended it
    check_host_lost(environment.replace(launcher="maniple"))
