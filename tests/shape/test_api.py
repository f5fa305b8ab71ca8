"""The public names, signatures and options: changed on purpose or not at all."""

import inspect

import click

import maniple
from maniple.cli import cli


def test_the_public_names_are_these():
    assert sorted(maniple.__all__) == [
        "ASGD", "Downpour", "EASGD", "Every", "ManipleError", "RateLimit", "Replica", "Rule", "StopAfter", "Worker",
        "join",
    ]  # fmt: skip
    assert all(hasattr(maniple, name) for name in maniple.__all__)


def test_share_takes_these_arguments():
    names = list(inspect.signature(maniple.Worker.share).parameters)
    assert names == ["self", "model", "optimizer", "rule", "pace", "state", "buffers", "lock", "stop"]


def test_workers_and_replicas_offer_these_members():
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(maniple.Worker) >= {"device", "leave", "lock", "log", "sampler", "share", "should_stop"}
    assert public(maniple.Replica) >= {"center", "exchange", "pull", "push", "step", "sync_share"}


def test_the_command_has_these_options():
    assert sorted(cli.commands) == ["run"]
    run = cli.commands["run"]
    options = sorted(name for p in run.params if isinstance(p, click.Option) for name in p.opts + p.secondary_opts)
    assert options == [
        "--bind", "--devices", "--every", "--maximum-rate", "--name", "--no-bind", "--quiet", "--restarts", "--rule",
        "--runs", "--seed", "--workers", "-n", "-q",
    ]  # fmt: skip
    assert all(p.help for p in run.params if isinstance(p, click.Option)), "every option explains itself"


def test_every_public_thing_is_documented():
    for name in maniple.__all__:
        thing = getattr(maniple, name)
        assert thing.__doc__, name
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"
