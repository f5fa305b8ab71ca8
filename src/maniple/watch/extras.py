"""Extras: libraries that only some commands need, imported when they do."""

import importlib
from typing import Any

from maniple.errors import InvalidArgument


def need(module: str, *, extra: str, what: str) -> Any:
    """Import `module`; `what` cannot be done without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        reason = "is not installed" if (error.name or "").partition(".")[0] == library else f"does not work: {error}"
        raise InvalidArgument(
            f"{what} cannot be done: {library} {reason}. `pip install 'maniple[{extra}]'` brings it."
        ) from None
