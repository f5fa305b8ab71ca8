"""Optional engines: a test that needs one skips without it, and fails instead where MANIPLE_REQUIRE lists it."""

import importlib
import os
from typing import Any

import pytest


def engine(name: str) -> Any:
    """The module `name`, or a skip of the test module (or test) that asks for it."""
    if name in os.environ.get("MANIPLE_REQUIRE", "").replace(",", " ").split():
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed")
