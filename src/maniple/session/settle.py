"""Which value counts: the command line, then each source in turn; what excludes each other is decided the same way."""

from collections.abc import Set

from maniple.errors import InvalidArgument
from maniple.session.file import Setting

_PACES = ("every", "maximum_rate")  # one or the other
# Set aside if the second was given by a source that counts more.
_GIVES_WAY_TO = {
    "every": "maximum_rate",
    "maximum_rate": "every",
    "name": "resume",
    "model": "script",
    "script": "model",
    "args": "model",
}
# A file for all runs may say how to encrypt whatever listens: where nothing does, there is nothing to do.
_ENCRYPTION = {"tls", "certificate", "key"}
_LISTENS = {"listen", "hosts"}
# A run that goes on remembers these itself; a file for all runs does not change them.
_REMEMBERED = {"rule", "wire", "seed", *_PACES}


def settle(
    given: Set[str], sources: list[dict[str, Setting]], has_default: Set[str] = frozenset()
) -> dict[str, Setting]:
    """Of all settings those that count.

    Args:
        given: keys that the command line gives; they count more than any source.
        sources: what variables and files give; the first counts most.
        has_default: keys that have a value even if nobody gives one.
    """
    settled: dict[str, Setting] = {}
    for source in sources:
        _refuse_both_paces(source)
        before = given | settled.keys()
        settled |= {
            key: setting
            for key, setting in source.items()
            if key not in before and _GIVES_WAY_TO.get(key) not in before
        }
    have = given | settled.keys() | has_default
    return {key: setting for key, setting in settled.items() if not setting.is_general or _applies(key, have)}


def _applies(key: str, have: Set[str]) -> bool:
    """A wish for all runs is one for this run."""
    if key in _ENCRYPTION:
        return bool(have & _LISTENS)
    return not (key in _REMEMBERED and "resume" in have)


def _refuse_both_paces(source: dict[str, Setting]) -> None:
    if all(pace in source for pace in _PACES):
        one, other = (source[pace].origin for pace in _PACES)
        raise InvalidArgument(f"{one} sets every, and {other} maximum_rate: these are two paces. Keep one of them.")
