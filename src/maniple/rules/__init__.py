"""The rules: what an exchange does. Pure maths on flat arrays: no process, no clock, no framework."""

import difflib

from maniple.errors import InvalidArgument
from maniple.rules.asgd import ASGD
from maniple.rules.bsp import BSP, LocalSGD, MSync
from maniple.rules.downpour import Downpour
from maniple.rules.easgd import EASGD
from maniple.rules.kernels import warm_up
from maniple.rules.rule import Rule, settings_of

__all__ = ["ASGD", "BSP", "EASGD", "RULES", "Downpour", "LocalSGD", "MSync", "Rule", "parse_rule", "warm_up"]

RULES: dict[str, type[Rule]] = {
    "easgd": EASGD,
    "asgd": ASGD,
    "downpour": Downpour,
    "bsp": BSP,
    "localsgd": LocalSGD,
    "msync": MSync,
}


def parse_rule(text: str) -> Rule:
    """The rule that the command line means: `easgd`, `easgd:alpha=0.5`, `asgd:alpha=0.9,beta=0.1`."""
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


def _value(text: str) -> float | str | bool:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
