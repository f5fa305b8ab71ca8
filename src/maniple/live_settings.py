"""Live settings: changes of the rule and the pace in a running run (`maniple change`). Pure.

alpha=0.3           a setting of the rule that the workers share
every=20            the pace: an exchange every 20 steps
maximum_rate=0.1    the pace: as many as fit into 10 % of the time
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from maniple.errors import BadFrame, InvalidArgument
from maniple.pace import Every, Pace, change_pace
from maniple.rules import Rule, changed, noted_rule, settings_of

_PACE = ("every", "maximum_rate")
_LONGEST = 100  # characters of a value: all are sent with every heartbeat

Settings = Mapping[str, Any]


class Changes(msgspec.Struct, frozen=True):
    """All changes so far: the newest value of each setting, and the number of its change."""

    number: int = 0  # how often something was changed
    settings: dict[str, tuple[int, float | int | bool | str | None]] = {}

    @classmethod
    def read(cls, text: str) -> "Changes":
        """Decode what a heartbeat reply carries."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"the host has sent changes that cannot be read: {error}.") from None

    @property
    def text(self) -> str:
        """As JSON for heartbeat replies; empty if nothing was changed."""
        return msgspec.json.encode(self).decode() if self.number else ""

    def add(self, settings: Settings) -> "Changes":
        """Add a change. Of the two kinds of pace the newest counts."""
        number, is_pace = self.number + 1, any(name in settings for name in _PACE)
        kept = {name: value for name, value in self.settings.items() if not (is_pace and name in _PACE)}
        return Changes(number, kept | {name: (number, value) for name, value in settings.items()})

    def without(self, *, rule: bool, pace: bool) -> "Changes":
        """The changes that stay valid after a resume with another rule or pace."""
        kept = {name: value for name, value in self.settings.items() if not (pace if name in _PACE else rule)}
        return Changes(self.number, kept)

    def since(self, before: "Changes") -> dict[str, Any]:
        """The settings that are not as they were."""
        return {name: value[1] for name, value in self.settings.items() if before.settings.get(name) != value}


def check_changes(settings: Settings, notes: Sequence[str]) -> None:
    """Raise InvalidArgument if workers with the rules in `notes` (their `repr`) cannot apply these changes."""
    if not settings:
        raise InvalidArgument("nothing is to be changed. Give NAME=VALUE, for instance alpha=0.3 or every=20.")
    for name, value in settings.items():
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > _LONGEST:
            raise InvalidArgument(f"{name}={str(value)[:_LONGEST]} is neither a number nor a word. Write {name}=0.5.")
    if not notes:
        raise InvalidArgument(
            f"{_listed(settings)} cannot be changed: no worker shares a model yet, so there is no rule. Ask again when "
            "training has begun."
        )
    shared = [(note, noted_rule(note)) for note in notes]
    free = [(note, rule) for note, rule in shared if rule is None or not rule.is_synchronous]
    if not free:
        raise in_step(settings, notes[0])
    change_pace(Every(), _paces(settings))
    for name in set(settings) - set(_PACE):
        if not any(name in _names(note, rule) for note, rule in free):
            rules = ", ".join(note.partition("(")[0] for note, _ in free)
            there = [*dict.fromkeys(known for note, rule in free for known in _names(note, rule)), *_PACE]
            raise InvalidArgument(
                f"{name!r} cannot be changed: the workers share by {rules}, which has no such setting. Choose from "
                f"{', '.join(there)}."
            )
    for _, rule in free:
        if rule is not None:
            changed(rule, own_settings(rule, settings))


def follow(settings: Settings, rule: Rule, pace: Pace) -> Pace:
    """Apply changes to `rule`, which may raise to refuse them; gives the new pace."""
    own = own_settings(rule, settings)
    if rule.is_synchronous and (own or _paces(settings)):
        raise in_step(settings, repr(rule))
    made, new = changed(rule, own), change_pace(pace, _paces(settings))
    for name in own:
        setattr(rule, name, getattr(made, name))
    return new


def own_settings(rule: Rule, settings: Settings) -> dict[str, Any]:
    """Those of the settings that this rule has."""
    return {name: value for name, value in settings.items() if name not in _PACE and name in settings_of(type(rule))}


def touches(rule: Rule, settings: Settings) -> bool:
    """A model that is shared by this rule has at least one of these settings."""
    return bool(own_settings(rule, settings) or _paces(settings))


def in_step(settings: Settings, rule: str) -> InvalidArgument:
    """The refusal for a rule by which all workers make each step together."""
    return InvalidArgument(
        f"{_listed(settings)} cannot be changed: with {rule} all workers exchange at the same step, but learn of a "
        "change at different steps. End the run, and continue with other settings: maniple run --resume RUN --rule ..."
    )


def _paces(settings: Settings) -> dict[str, Any]:
    return {name: settings[name] for name in _PACE if name in settings}


def _names(note: str, rule: Rule | None) -> list[str]:
    """The settings of a rule; of one of the user's own, which is not known here, as its `repr` tells."""
    return re.findall(r"(\w+)=", note) if rule is None else settings_of(type(rule))


def _listed(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
