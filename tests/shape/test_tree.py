"""The shape of the tree: layers, sizes, the checklist and its tests."""

import re
import tomllib
from pathlib import Path

import pytest

import maniple
from tests.conftest import TIMED

ROOT = Path(__file__).parents[2]


def layers_of(text: str) -> list[set[str]]:
    """The rows of an indented map of layers."""
    names = {path.stem for path in (ROOT / "src/maniple").iterdir()}
    rows = []
    for line in text.splitlines():
        found = re.match(r"    ([a-z]+(?: \| [a-z]+)*)(?:  |$)", line)
        if found and set(found[1].split(" | ")) <= names:
            rows.append(set(found[1].split(" | ")))
    return rows


def test_the_maps_of_layers_agree():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    checked = [set(row.split(" | ")) for row in config["tool"]["importlinter"]["contracts"][0]["layers"]]
    assert layers_of(maniple.__doc__ or "") == checked
    assert layers_of((ROOT / "docs/design.md").read_text()) == checked


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.name)
def test_a_source_file_holds_one_idea(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600, "beyond this a file usually holds two ideas"
    assert text.startswith('"""'), "it says what it is"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path):
    assert len(path.read_text().splitlines()) < 100


def test_the_version_is_one():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["version"] == maniple.__version__


@pytest.mark.parametrize("timed", TIMED)
def test_the_tests_that_come_after_one_another_exist(timed: str):
    path, _, name = timed.partition("::")
    assert (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text())


def test_the_checklist_names_tests_that_exist():
    rows = re.findall(r"^\| ([FN]-[A-Z0-9-]+) \| .+? \| (.*?) \|$", (ROOT / "docs/checklist.md").read_text(), re.M)
    assert len(rows) == len({row[0] for row in rows}) == 100
    shown = 0
    for identity, cell in rows:
        for path, name in re.findall(r"`(tests/[a-z_/]+\.py)::([a-z0-9_]+)`", cell):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{identity}: {path}::{name}"
            shown += 1
    assert shown >= 25
