"""The errors: one root, the builtin kin that users catch, an exit code for each."""

import sys

import pytest

import maniple
from maniple import errors
from maniple.model.recorder import show

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


def test_every_error_descends_from_the_public_root():
    assert maniple.ManipleError is errors.ManipleError
    assert len(KINDS) > 5
    assert all(issubclass(kind, maniple.ManipleError) for kind in KINDS)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (errors.ManipleError, 4),
        (errors.InvalidArgument, 2),
        (errors.Conflict, 2),
        (errors.SharedMemoryFull, 3),
        (errors.QueueRefused, 3),
        (errors.LayoutMismatch, 1),
        (errors.Diverged, 1),
        (errors.WaitedTooLong, 1),
        (errors.HostAway, 1),
        (errors.NotAdmitted, 1),
        (errors.BadFrame, 1),
        (errors.HandlerFailed, 1),
        (errors.ProducerFailed, 1),
        (errors.WorkerFailed, 1),
        (errors.PeerLost, 1),
        (errors.CallMismatch, 1),
        (errors.Desynced, 1),
    ],
)
def test_exit_code_of_each_error(kind, exit_code):
    assert kind.exit_code == exit_code
    assert f"{kind.__name__}" in errors.__doc__


def test_every_error_has_its_exit_code_tested():
    assert {kind.__name__ for kind in KINDS} == {
        "BadFrame",
        "CallMismatch",
        "Conflict",
        "Desynced",
        "Diverged",
        "HandlerFailed",
        "HostAway",
        "InvalidArgument",
        "LayoutMismatch",
        "ManipleError",
        "NotAdmitted",
        "PeerLost",
        "ProducerFailed",
        "QueueRefused",
        "SharedMemoryFull",
        "WaitedTooLong",
        "WorkerFailed",
    }


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.SharedMemoryFull, OSError),
        (errors.WaitedTooLong, TimeoutError),
        (errors.HostAway, ConnectionError),
    ],
)
def test_errors_are_caught_as_their_builtin_kin(kind, builtin):
    with pytest.raises(builtin, match="words"):
        raise kind("words")


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_an_error_is_what_was_said(kind):
    assert str(kind("what is wrong, the limit, what to do")) == "what is wrong, the limit, what to do"


def test_error_that_the_other_side_named_is_raised_here():
    with pytest.raises(errors.LayoutMismatch, match="parameter 3"):
        errors.raise_remote("LayoutMismatch", "parameter 3 differs")
    with pytest.raises(errors.ManipleError, match="words"):
        errors.raise_remote("SomethingNew", "words")


class Broken:
    """A stream that nobody reads."""

    def write(self, text: str) -> None:
        raise BrokenPipeError

    flush = write


@pytest.mark.parametrize("stream", [Broken(), None])
def test_a_warning_that_cannot_be_printed_does_not_end_the_training(monkeypatch, stream):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    errors.say("somebody should know this")
    show("epoch 1")


def test_warnings_are_printed_on_standard_error(capsys):
    errors.say("this")
    assert capsys.readouterr() == ("", "maniple: this\n")
