"""The page about environment variables lists what the code knows, and only `environment` reads them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from maniple.environment import own_variables
from maniple.queues import QUEUES
from maniple.settings.options import all_settings, option_variable

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maniple"
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]*)+|RANK|HOME|PYTHON[A-Z]+")
OF_THE_SYSTEM = {
    "SC_CLK_TCK",
    "MANIPLE_",
    "MANIPLE_OPTION_",
}  # a number that the kernel is asked for; beginnings of names
# Those that only write them, for processes that they start, or run where maniple is not imported.
WRITERS = {"launch/process.py", "launch/ssh_remote.py", "launch/remote_workers.py", "pool/processes.py"}


def words(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of a folder, and all words in them that look like variables."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                yield str(path.relative_to(SOURCE)), node.value


def test_the_page_lists_all_variables_and_no_others():
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)(?:=[a-z]+)?`", (ROOT / "docs/environment.md").read_text()))
    of_options = {option_variable(key) for key in all_settings()}
    in_code = {word for file, word in words(SOURCE) if file.startswith("environment/") or file in WRITERS}
    of_queues = {name for queue in QUEUES.values() for name in queue.task_variables}
    assert listed == (in_code | of_options | of_queues | set(own_variables())) - OF_THE_SYSTEM


def test_the_page_marks_the_options_that_count_under_another_launcher():
    page = (ROOT / "docs/environment.md").read_text()
    options = page[page.index("## Options") : page.index("## Checked by the doctor")]
    marked = {name: bool(star) for name, star in re.findall(r"`(MANIPLE_[A-Z_]+)`( \*)?", options)}
    assert marked == {
        option_variable(key): "host" in one.commands or one.readers != "run" for key, one in all_settings().items()
    }


def test_variables_are_read_in_one_package_only():
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "environment" and re.search(r"\b(os\.environ|os\.getenv)\b", path.read_text())
    }
    assert readers <= {"launch/ssh_remote.py", "pool/processes.py", "pool/pool.py"}, "those hand it on whole"
    others = {file for file, word in words(SOURCE) if word.startswith("MANIPLE_")} - WRITERS
    assert {file for file in others if not file.startswith("environment/")} == {"settings/options.py"}, "declares them"
