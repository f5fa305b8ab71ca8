"""The public names, signatures and options: changed on purpose or not at all."""

import inspect

import click
import pytest

import maniple
from maniple.cli import cli


def test_the_public_names_are_these():
    assert sorted(maniple.__all__) == [
        "ASGD", "BSP", "BatchFiles", "Client", "Controller", "DiLoCo", "Downpour", "EAMSGD", "EASGD", "Every", "Feed",
        "Gate", "Gossip", "LocalSGD", "MSync", "ManipleError", "NoLoCo", "Pool", "Prefetch", "RateLimit", "Replica",
        "Rule", "Session", "StopAfter", "Swap", "Tournament", "Worker", "join",
    ]  # fmt: skip
    assert all(hasattr(maniple, name) for name in maniple.__all__)


def test_share_takes_these_arguments():
    names = list(inspect.signature(maniple.Worker.share).parameters)
    assert names == [
        "self",
        "model",
        "optimizer",
        "rule",
        "pace",
        "wire",
        "gate",
        "state",
        "params",
        "buffers",
        "lock",
        "stop",
        "save_optimizer",
    ]
    assert list(inspect.signature(maniple.join).parameters) == ["address", "own_data"]


def test_clients_offer_these_calls():
    calls = {name for name in dir(maniple.Client) if not name.startswith("_")}
    assert calls == {
        "close", "create", "names", "pull", "pull_at", "pull_part", "push", "push_at", "push_part", "save",
    }  # fmt: skip


def test_controllers_offer_these_members():
    members = {name for name in dir(maniple.Controller) if not name.startswith("_")}
    assert members == {"batches", "handle_control", "is_stopping", "live", "samples", "serve", "stop"}
    assert list(inspect.signature(maniple.Worker.sampler).parameters) == [
        "self", "data", "static", "balance", "shuffle", "chunk", "validation",
    ]  # fmt: skip
    assert list(inspect.signature(maniple.Worker.ask).parameters) == ["self", "request", "timeout_s", "info"]


def test_pools_offer_these_members():
    from maniple import pool

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert list(inspect.signature(maniple.Pool).parameters) == ["n", "devices"]
    assert public(maniple.Pool) == {
        "all_gather", "all_reduce", "broadcast", "close", "data", "drop", "function", "gather", "get",
        "gradient_and_update", "lengths", "pids", "profile", "reduce", "replicate", "scatter", "set", "shapes",
        "train_function",
    }  # fmt: skip
    assert public(pool.Function) == {"serial"}
    assert public(pool.Data) == {
        "capacity", "dtype", "free", "here", "nbytes", "ndim", "set_length", "set_value", "shape", "size",
    }  # fmt: skip


def test_workers_and_replicas_offer_these_members():
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(maniple.Feed) == {"close", "push"}
    assert list(inspect.signature(maniple.Feed).parameters) == ["name", "high_water", "address"]
    assert list(inspect.signature(maniple.Prefetch).parameters) == ["iterable", "ahead"]
    assert public(maniple.Worker) >= {
        "all_gather", "all_reduce", "ask", "barrier", "broadcast", "device", "gather", "reduce", "scatter",
        "epochs", "feed", "leave", "lock", "log", "sampler", "share", "should_stop",
    }  # fmt: skip
    assert public(maniple.Replica) >= {"center", "exchange", "no_sync", "pull", "push", "reduce", "step", "sync_share"}


def test_models_and_sessions_offer_these_members():
    from maniple import model, schedules

    assert schedules.__all__ == ["Schedule", "cosine", "poly", "scaled", "set_lr", "step", "warm_up"]
    assert model.__all__ == ["Recorder", "top_errors"]
    assert {name for name in dir(maniple.Session) if not name.startswith("_")} == {
        "end", "folder", "is_running", "start", "wait",
    }  # fmt: skip
    assert list(inspect.signature(maniple.Session).parameters) == ["model", "script", "args", "options"]


SETTINGS = [
    "--certificate", "--controller", "--controller-arg", "--every", "--gate", "--host-deadline", "--json", "--keep",
    "--key",
    "--max-batches", "--max-epochs", "--max-memory", "--maximum-rate", "--name", "--overlap", "--patience", "--quiet",
    "--resume", "--rule", "--runs", "--seed", "--show-settings", "--snapshot", "--snapshot-every", "--stop-at-target",
    "--target",
    "--tls", "--total-duration", "--validate-every", "--wire",
    "-q",
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "run",
            [
                *SETTINGS,
                "--baseline",
                "--bind",
                "--collectives",
                "--collectives-deadline",
                "--deterministic",
                "--devices",
                "--feed",
                "--hosts",
                "--listen",
                "--min-workers",
                "--model",
                "--model-arg",
                "--no-bind",
                "--producers",
                "--restarts",
                "--snapshot-epochs",
                "--strict",
                "--web",
                "--web-listen",
                "--workers",
                "-n",
            ],
        ),
        ("serve", [*SETTINGS, "--from", "--listen", "--web", "--web-listen"]),
        (
            "submit",
            [
                *SETTINGS,
                "--allocation",
                "--cpus-per-worker",
                "--dry-run",
                "--gpus-per-worker",
                "--host-job",
                "--host-sbatch",
                "--instances",
                "--leave-early",
                "--listen",
                "--max-simultaneous",
                "--mem",
                "--min-workers",
                "--model",
                "--model-arg",
                "--partition",
                "--ray",
                "--ray-address",
                "--restarts",
                "--sbatch",
                "--slurm",
                "--snapshot-epochs",
                "--strict",
                "--walltime",
                "-n",
            ],
        ),
        ("status", []),
        ("change", ["--certificate", "--snapshot", "--token-file"]),
        ("stop", ["--timeout"]),
        (
            "watch",
            [
                "--browser",
                "--certificate",
                "--json",
                "--listen",
                "--logs",
                "--once",
                "--read-only",
                "--token-file",
                "--web",
            ],
        ),
        ("record", ["--plot"]),
        ("plot", ["--against", "--log", "--output", "--smooth", "--target", "--value", "-o"]),
        ("compare", ["--above", "--below", "--json", "--smooth", "--target", "--value"]),
        ("export", ["--follow", "--output", "--to", "-o"]),
        ("join", ["--certificate", "--device", "--task", "--token-file", "--wait"]),
        (
            "doctor",
            [
                "--certificate",
                "--cpus-per-worker",
                "--devices",
                "--gpus-per-worker",
                "--hosts",
                "--json",
                "--mem",
                "--model-size",
                "--partition",
                "--peer",
                "--ray",
                "--ray-address",
                "--runs",
                "--script",
                "--slurm",
                "--step-time",
                "--timeout",
                "--token-file",
                "--walltime",
                "--workers",
                "-n",
            ],
        ),
        ("host", [*SETTINGS, "--listen", "--min-workers", "--strict"]),
    ],
)
def test_the_commands_have_these_options(command, options):
    assert sorted(cli.commands) == [
        "change", "compare", "doctor", "export", "host", "join", "plot", "record", "run", "serve", "status", "stop",
        "submit", "watch",
    ]  # fmt: skip
    given = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    assert sorted(name for p in given for name in p.opts + p.secondary_opts) == sorted(options)
    assert all(p.help for p in given), "every option explains itself"


def test_every_public_thing_is_documented():
    for name in maniple.__all__:
        thing = getattr(maniple, name)
        assert thing.__doc__, name
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"
