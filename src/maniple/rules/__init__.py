"""Rules: what an exchange computes. Pure maths on flat arrays: no process, no clock, no framework."""

import ast
import difflib
import re

from maniple.errors import InvalidArgument
from maniple.rules.asgd import ASGD
from maniple.rules.bsp import BSP, LocalSGD, MSync
from maniple.rules.diloco import DiLoCo
from maniple.rules.downpour import Downpour
from maniple.rules.easgd import EAMSGD, EASGD
from maniple.rules.gossip import Gossip, NoLoCo
from maniple.rules.kernels import warm_up, warm_up_in_background
from maniple.rules.pairs import Pairwise, Swap, Tournament, draw_pairs
from maniple.rules.rule import Rule, changed, settings_of, with_overlap

__all__ = [
    "ASGD",
    "BSP",
    "EAMSGD",
    "EASGD",
    "RULES",
    "DiLoCo",
    "Downpour",
    "Gossip",
    "LocalSGD",
    "MSync",
    "NoLoCo",
    "Pairwise",
    "Rule",
    "Swap",
    "Tournament",
    "changed",
    "draw_pairs",
    "noted_rule",
    "parse_rule",
    "settings_of",
    "warm_up",
    "warm_up_in_background",
    "with_overlap",
]

RULES: dict[str, type[Rule]] = {
    "easgd": EASGD,
    "eamsgd": EAMSGD,
    "asgd": ASGD,
    "downpour": Downpour,
    "bsp": BSP,
    "localsgd": LocalSGD,
    "msync": MSync,
    "diloco": DiLoCo,
    "swap": Swap,
    "tournament": Tournament,
    "gossip": Gossip,
    "noloco": NoLoCo,
}


def parse_rule(text: str) -> Rule:
    """The rule of a command-line option: `easgd`, `easgd:alpha=0.5`, `asgd:alpha=0.9,beta=0.1`."""
    name, _, options = text.partition(":")
    kind = RULES.get(name.strip().lower())
    if kind is None:
        near = difflib.get_close_matches(name.lower(), RULES, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Choose one of them."
        raise InvalidArgument(f"there is no rule {name!r} (rules: {', '.join(RULES)}). {hint}")
    values: dict[str, float | str | bool] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise InvalidArgument(f"{option!r} in --rule {text} has no value. Write it as {name}:{option}=0.5.")
        values[key.strip()] = _value(value.strip())
    try:
        return kind(**values)
    except TypeError:
        known = settings_of(kind)
        raise InvalidArgument(
            f"--rule {text} sets {', '.join(values)}, but {name} has {', '.join(known)}. "
            f"Write for instance {name}:{known[0]}={getattr(kind(), known[0])}."
        ) from None


def noted_rule(note: str) -> Rule | None:
    """The rule that a `repr` describes, except for a schedule in it; None for a user-defined class."""
    name, _, settings = note.partition("(")
    kind = next((kind for kind in RULES.values() if kind.__name__ == name), None)
    if kind is None:
        return None
    told = re.findall(rf"\b({'|'.join(settings_of(kind))})=([\d.e+-]+|'\w+'|None|True|False)", settings)
    try:
        return kind(**{key: ast.literal_eval(value) for key, value in told})
    except (ValueError, SyntaxError, TypeError):  # another class of that name
        return None


def _value(text: str) -> float | str | bool:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
