"""The end of a worker's script by a signal or an error: where it may end, and with which exit code."""

import signal
from types import SimpleNamespace

import pytest

from maniple.clock import clock
from maniple.environment import Environment
from maniple.errors import WorkerFailed
from maniple.record import RunFolder
from maniple.replica.context import TrainingContext
from maniple.worker.shutdown import SignalHandler, check_host_lost
from tests.simulated_clock import SimulatedClock


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


def test_a_signal_during_an_exchange_is_repeated_until_it_has_ended_the_script(context, monkeypatch):
    """The first time after the grace period, for what follows the exchange; then soon."""
    pauses = []
    monkeypatch.setattr("threading.Timer.__init__", lambda self, seconds, *_: pauses.append(seconds))
    monkeypatch.setattr("threading.Timer.daemon", False)
    replica = SimpleNamespace(is_exchanging=True)
    context.replicas.append(replica)
    handler = SignalHandler(context)
    for _ in range(3):
        handler(signal.SIGUSR1, None)
    assert pauses == [20.0, 0.25, 0.25]
    replica.is_exchanging = False
    with pytest.raises(SystemExit):
        handler(signal.SIGUSR1, None)


def test_waits_for_other_workers_end_with_the_grace_period(context):
    simulated = SimulatedClock()
    with clock.replaced(simulated):
        context.exit_if_overdue()
        context.replicas.append(SimpleNamespace(is_exchanging=True))
        SignalHandler(context)(signal.SIGTERM, None)
        simulated.now = 4.9
        context.exit_if_overdue()
        simulated.now = 5.1
        with pytest.raises(SystemExit) as ended:
            context.exit_if_overdue()
    assert ended.value.code == 143


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
