"""`maniple doctor` in the test's own process, and what it found."""

import json
from dataclasses import asdict
from typing import Any

import click
from click.testing import CliRunner

from maniple.cli import cli
from maniple.doctor import CHECKS, Case, examine
from maniple.errors import ManipleError

Findings = list[dict[str, Any]]


def doctor(*arguments: str) -> tuple[int, Findings]:
    """The exit code and the findings of a call."""
    done = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    if isinstance(done.exception, ManipleError):
        return done.exception.exit_code, [{"check": "", "level": "", "text": str(done.exception)}]
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code == click.UsageError.exit_code:
        return done.exit_code, [{"check": "", "level": "", "text": done.stderr}]
    return done.exit_code, read(done.stdout)


def looked(*checks: str, **case: Any) -> Findings:
    """What some checks find."""
    found = examine(Case(**case), [one for one in CHECKS if one.name in checks])
    return [asdict(one) | {"text": str(one)} for one in found]


def read(output: str) -> Findings:
    """The findings that were printed as JSON."""
    return [one | {"text": f"{one['seen']} ({one['limit']}). {one['fix']}"} for one in json.loads(output)]


def assert_found(found: Findings, check: str, level: str, *words: str) -> None:
    """One finding of that check and level has all the words, and says what to do."""
    here = [one for one in found if one["check"] == check and one["level"] == level]
    assert any(all(word in one["text"] for word in words) for one in here), found
    assert all(one["fix"] and one["limit"] for one in here if level != "ok"), here


def grave(found: Findings) -> set[str]:
    """The checks that found something grave."""
    return {one["check"] for one in found if one["level"] == "grave"}
