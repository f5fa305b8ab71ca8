"""Examining: all checks at the same time, findings in the order of the list."""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from maniple.doctor.case import Case
from maniple.doctor.finding import OK, Check, Finding, grave, warning
from maniple.errors import ManipleError

_LONGEST = 12  # waits, one after the other, in one check
_IMPORT_S = 60.0
_GLANCE_S = 1.0  # it takes a few milliseconds, unless a name server is away


def examine(case: Case, checks: Iterable[Check]) -> list[Finding]:
    """What the checks find. One that does not come to its end in time is left behind, and said so."""
    limit_s = _LONGEST * case.wait_s + _IMPORT_S
    late = warning(
        "this check has not come to its end", limit=f"limit {limit_s:g} s", fix="Raise --timeout, and try again."
    )
    looking = _looked(case, checks, limit_s)
    return [finding for one in looking for finding in one.told([late])]


def glance(case: Case, checks: Iterable[Check]) -> list[Finding]:
    """What a launcher tells before it begins: what quick checks have found that is not fine."""
    looking = _looked(case, (check for check in checks if check.is_quick), _GLANCE_S)
    return [finding for one in looking for finding in one.told([]) if finding.level != OK]


def _looked(case: Case, checks: Iterable[Check], within_s: float) -> "list[_Looking]":
    looking = [_Looking(check, case) for check in checks]
    for one in looking:
        one.start()
    deadline = time.monotonic() + within_s
    for one in looking:
        one.join(max(0.0, deadline - time.monotonic()))
    return looking


class _Looking(threading.Thread):
    """One check under way. A name server that does not answer cannot be interrupted: it keeps nobody from ending."""

    def __init__(self, check: Check, case: Case) -> None:
        super().__init__(name=f"maniple-doctor-{check.name}", daemon=True)
        self._check, self._case = check, case
        self._found: list[Finding] | None = None

    def run(self) -> None:
        try:
            found = list(self._check.look(self._case))
        except ManipleError as error:
            found = [grave(str(error).rstrip("."), limit="", fix="")]
        except Exception as error:  # one check that fails must not hide what the others have found
            seen = f"this check itself failed: {type(error).__name__}: {error}"
            found = [warning(seen, limit="", fix="Look at it by hand, and report it.")]
        self._found = found

    def told(self, late: list[Finding]) -> list[Finding]:
        """What was found; `late` if it is still looking."""
        found = late if self._found is None else self._found
        return [replace(one, check=self._check.name) for one in found]
