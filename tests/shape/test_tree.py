"""The shape of the tree: layers, sizes, the checklist and its tests."""

import ast
import re
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

import maniple
from tests.conftest import TIMED

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# Modules under 40 lines that have one importer, and why they are files of their own.
SHORT_FOR_A_REASON = {
    "maniple.launch.start": "run by its path, before anything is imported",
    "maniple.rules.asgd": "one file per family of rules",
}
# Modules that name one of a higher layer in a string: (module, named module), and why.
UPWARDS_FOR_A_REASON = {
    ("maniple.job", "maniple.model"): "the program of the workers' processes",
    ("maniple.launch.services", "maniple.watch"): "the program of the page's process",
    ("maniple.queues.slurm", "maniple.cli"): "the command in a job script",
    ("maniple.queues.slurm", "maniple.cli.host_job"): "the command in a job script",
    ("maniple.worker.external_launch", "maniple.cli"): "worker 0 of another launcher starts the host's process",
    ("maniple.worker.worker", "maniple.pool"): "looked up among the imported modules, never imported",
}
# Modules that no test imports, by name or by a name that their package exports: what shows instead that they work.
TESTED_THROUGH = {
    "maniple.*.__main__": "tests/process, which run them by `python -m`",
    "maniple.cli.*": "tests/process and unit/test_settings.py, which call the command",
    "maniple.adapters.base": "the adapters of unit/test_adapters.py derive from it",
    "maniple.adapters.numpy_arrays": "unit/test_adapters.py, which adapts dicts of arrays",
    "maniple.adapters.torch_*": "unit/test_adapters_torch_*.py, which adapt modules and optimizers",
    "maniple.center.worker_sessions": "contract/test_server.py and process/test_chaos.py, by workers that reconnect",
    "maniple.center.tcp_server": "contract/test_server.py and contract/test_center.py, through a live server",
    "maniple.collectives.barrier": "contract/test_collectives.py and test_collectives_membership.py, which wait at it",
    "maniple.collectives.group": "contract/test_collectives.py: every engine derives from it",
    "maniple.collectives.membership": "contract/test_collectives_membership.py, which joins collectives",
    "maniple.collectives.peer_to_peer": "contract/test_collectives.py, which starts its ranks by the engine's name",
    "maniple.collectives.reductions_compiled": "unit/test_reductions.py, which compares it with its NumPy twin",
    "maniple.collectives.torch_tensors": "unit/test_collectives_values.py, by values that are tensors",
    "maniple.doctor.hosts": "process/test_doctor_hosts.py and cluster/test_doctor.py",
    "maniple.doctor.remote_host": "process/test_doctor_hosts.py, which checks live and broken hosts",
    "maniple.host.watchers": "contract/test_watchers.py, through a live server",
    "maniple.launch.process": "tests/process, where every run starts workers",
    "maniple.launch.ssh_remote": "process/test_hosts.py; run by its path, without maniple",
    "maniple.launch.start": "tests/process; run by its path, without maniple",
    "maniple.model.loop": "process/test_model.py, where it is `maniple run --model`",
    "maniple.pool.function*": "tests/process/test_pool*.py, which call functions on workers",
    "maniple.pool.gather_kernels": "unit/test_pool.py, by a selection of many rows",
    "maniple.pool.processes": "tests/process/test_pool*.py: pools of real processes",
    "maniple.pool.worker_process": "tests/process/test_pool*.py: pools of real processes",
    "maniple.rules.streaming": "unit/test_rules_diloco.py, by the rules that derive from it",
    "maniple.replica.pairwise": "unit/test_pairs.py and process/test_pairs.py, by rules that are pairwise",
    "maniple.replica.synchronous*": "unit/test_replica.py and process/test_bsp.py, by rules that are synchronous",
    "maniple.replica.warm_up": "process/test_diloco.py, by runs that begin with synchronous rounds",
    "maniple.replica.with_center": "unit/test_replica.py, by rules with a center",
    "maniple.watch.site": "process/test_watch_web.py, in a real browser",
    "maniple.worker.collective_groups": "process/test_collectives_run.py, by the calls of a worker",
}


def is_entry_point(module: str) -> bool:
    """A package's own file, or one that `python -m` runs."""
    return MODULES[module].stem in {"__init__", "__main__"}


def imported_modules(path: Path) -> set[str]:
    """The modules of maniple that a file imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(MODULES)


IMPORTS = {name: imported_modules(path) for name, path in MODULES.items()}
# The module from which a package exports a name.
EXPORTS = {
    (name, alias.name): node.module or ""
    for name, path in MODULES.items()
    if path.stem == "__init__"
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def exported_from(module: str, name: str) -> set[str]:
    """The modules behind `from module import name`: a submodule, or those through which packages export the name."""
    found = set[str]()
    while module in MODULES and module not in found:
        found |= {module, f"{module}.{name}"} & set(MODULES)
        module = EXPORTS.get((module, name), "")
    return found


def modules_used_by(path: Path) -> set[str]:
    """The modules of maniple that a test imports, directly or by names that a package exports."""
    used = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                used |= exported_from(node.module, alias.name)
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "maniple":
            used |= exported_from("maniple", node.attr)
    parents = {".".join(name.split(".")[:depth]) for name in used for depth in (1, 2)}
    return (used | parents) & set(MODULES)


def layers_of(text: str) -> list[set[str]]:
    """The rows of an indented map of layers."""
    names = {path.stem for path in (ROOT / "src/maniple").iterdir()}
    rows = []
    for line in text.splitlines():
        found = re.match(r"    ([a-z_]+(?: \| [a-z_]+)*)(?:  |$)", line)
        if found and set(found[1].split(" | ")) <= names:
            rows.append(set(found[1].split(" | ")))
    return rows


def test_the_layers_in_the_design_page_are_those_that_are_checked():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    checked = [set(row.split(" | ")) for row in config["tool"]["importlinter"]["contracts"][0]["layers"]]
    assert layers_of((ROOT / "docs/design.md").read_text()) == checked


def test_the_modules_that_the_design_page_names_exist():
    packages = [path.name for path in (ROOT / "src/maniple").iterdir() if path.is_dir()]
    text = (ROOT / "docs/design.md").read_text()
    named = re.findall(rf"`((?:{'|'.join(packages)})/[a-z_/]+)(?:\.py)?(?:: \w+)?`", text)
    assert len(named) > 30
    kept_in_run_folder = {"center/best"}
    source = ROOT / "src/maniple"
    missing = {name for name in named if not ((source / name).is_dir() or (source / f"{name}.py").exists())}
    assert missing - kept_in_run_folder == set()


def test_source_files_hold_one_idea_each():
    """Long files usually hold two ideas; a short one with a single importer is a splinter of that importer."""
    wrong = []
    for name, path in MODULES.items():
        text = path.read_text()
        if not text.startswith('"""'):
            wrong.append(f"{name} has no docstring")
        if (lines := len(text.splitlines())) > 600:
            wrong.append(f"{name} has {lines} lines")
        importers = {other for other, found in IMPORTS.items() if name in found} - {name}
        if lines < 40 and len(importers) < 2 and not is_entry_point(name) and name not in SHORT_FOR_A_REASON:
            wrong.append(f"{name} has {lines} lines and is imported by {importers or 'nobody'}")
    assert wrong == []


def test_module_and_class_names_are_unique():
    modules = Counter(path.stem for name, path in MODULES.items() if not is_entry_point(name))
    classes = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in [*modules.items(), *classes.items()] if count > 1] == []


def test_modules_named_in_strings_respect_the_layers():
    """A module that is imported by name, or run by `python -m`, must stand in a lower layer or in the same package."""
    rows = layers_of((ROOT / "docs/design.md").read_text())
    level = {name: depth for depth, row in enumerate(rows) for name in row}
    wrong = []
    for name, path in MODULES.items():
        package = name.split(".")[1] if "." in name else ""
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if named not in MODULES or "." not in named or not package or (name, named) in UPWARDS_FOR_A_REASON:
                continue
            target = named.split(".")[1]
            if target != package and level[target] <= level[package]:
                wrong.append((name, named))
    assert wrong == []


def test_every_module_is_imported_by_a_test_or_tested_through_another():
    """A module with logic of its own needs a unit test; one that only real processes use is listed with its tests."""
    tested = set[str]().union(*(modules_used_by(path) for path in (ROOT / "tests").rglob("*.py")))
    unlisted = {name for name in MODULES if not any(fnmatch(name, pattern) for pattern in TESTED_THROUGH)}
    assert sorted(unlisted - tested) == [], "write a unit test, or say in TESTED_THROUGH which tests show them"


def test_tests_named_in_place_of_unit_tests_exist():
    for text in TESTED_THROUGH.values():
        for name in re.findall(r"[a-z]+/test_[a-z_*]+\.py", text):
            assert list((ROOT / "tests").glob(name.removeprefix("tests/"))), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
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
