"""The page about environment variables lists what the code knows, and only `place` reads them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from maniple.cli import cli
from maniple.place import own_variables, setting_variable
from maniple.session import Configured
from maniple.session.keys import option_keys

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maniple"
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]*)+|RANK|HOME|PYTHON[A-Z]+")
OF_THE_SYSTEM = {
    "SC_CLK_TCK",
    "MANIPLE_",
    "MANIPLE_OPTION_",
}  # a number that the kernel is asked for; beginnings of names
# Those that only write them, for processes that they start, or run where maniple is not imported.
WRITERS = {"launch/child.py", "launch/remote.py", "launch/ssh.py", "pool/crew.py"}


def words(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of a folder, and all words in them that look like variables."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                yield str(path.relative_to(SOURCE)), node.value


def test_the_page_lists_all_variables_and_no_others():
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)(?:=[a-z]+)?`", (ROOT / "docs/environment.md").read_text()))
    configured = [command for command in cli.commands.values() if isinstance(command, Configured)]
    of_options = {setting_variable(key) for command in configured for key in option_keys(command)}
    in_code = {word for file, word in words(SOURCE) if file.startswith("place/") or file in WRITERS}
    assert listed == (in_code | of_options | set(own_variables())) - OF_THE_SYSTEM


def test_variables_are_read_in_one_package_only():
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "place" and re.search(r"\b(os\.environ|os\.getenv)\b", path.read_text())
    }
    assert readers <= {"launch/remote.py", "pool/crew.py", "pool/pool.py"}, "those hand it on whole"
    others = {file for file, word in words(SOURCE) if word.startswith("MANIPLE_")} - WRITERS
    assert {file for file in others if not file.startswith("place/")} == set()
