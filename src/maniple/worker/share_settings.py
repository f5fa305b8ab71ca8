"""Rule, pace and wire format of a model that is shared: from the script, the command line or defaults, and checked."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from maniple.environment import Environment
from maniple.errors import Conflict, InvalidArgument
from maniple.layout import check_state_names
from maniple.pace import Every, Pace, parse_pace
from maniple.replica import Replica
from maniple.replica.sharing import check_wire
from maniple.rules import Rule, parse_rule, with_overlap

T = TypeVar("T")


def resolve_settings(
    environment: Environment, rule: Rule | None, pace: Pace | None, wire: str | None, default: Rule
) -> tuple[Rule, Pace, str]:
    """Rule, pace and wire format of a model that is shared: from the script, else the command line, else defaults."""
    if rule is not None and not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"rule={rule!r} is no rule. Write for instance rule=maniple.EASGD().")
    rule = agreed("rule", rule, parse_rule(environment.rule) if environment.rule else None, default)
    pace = agreed("pace", pace, parse_pace(environment.pace) if environment.pace else None, Every(rule.every))
    wire = agreed("wire", wire, environment.wire, "float32")
    if environment.overlap and not rule.overlap:
        rule = with_overlap(rule)
    if wire != "float32":
        check_wire(rule, wire)  # before anything is shared
    return rule, pace, wire


def warn_local_buffers(model: Any, rule: Rule) -> None:
    """Say that running statistics stay local, if a torch model has any."""
    if any(buffer.is_floating_point() for buffer in getattr(model, "buffers", list)()):
        warnings.warn(
            f"{type(rule).__name__}(sync=False) leaves the running statistics of normalisation layers with each "
            "worker, since with momentum a variance could become negative. Its synchronous form averages them",
            stacklevel=3,
        )


def agreed(what: str, script: T | None, command_line: T | None, default: T) -> T:
    """The value given by the script or the command line; Conflict if both are given and differ."""
    if script is not None and command_line is not None and script != command_line:
        raise Conflict(
            f"the script asks for the {what} {script!r}, the command line for {command_line!r}. "
            f"Leave one of them out: `{what}=` in share(), or the option of the command."
        )
    if script is not None:
        return script
    return default if command_line is None else command_line


def check_rule(environment: Environment, rule: Rule) -> None:
    """Raise InvalidArgument for a rule that does not work in this run."""
    check_state_names(rule.worker_state, rule.center_state)
    if rule.is_synchronous and (rule.worker_scalars or rule.center_scalars):
        raise InvalidArgument(
            f"{rule!r} keeps scalars, one per chunk, but a synchronous rule is applied to whole parameters. "
            "Compute them from `moment.step`, or keep a vector."
        )
    world = environment.world
    is_late = rule.is_synchronous and not rule.averages_gradients and rule.overlap
    if environment.deterministic and is_late and rule.delay is None:
        raise InvalidArgument(
            f"--deterministic with {rule!r}: results are applied when they arrive, which differs between runs. Give it "
            "a delay, such as delay=1, after which they are applied, or leave --deterministic out."
        )
    if environment.deterministic and world > 1 and (not rule.is_synchronous or 0 < rule.quorum < world):
        raise InvalidArgument(
            f"--deterministic with {rule!r}: the result of {world} workers depends on which comes first. "
            "Choose bsp, localsgd or easgd:sync=true, or leave --deterministic out."
        )
    if not rule.is_synchronous and environment.is_external and environment.center == "none":
        raise InvalidArgument(
            f"{rule!r} needs a center, but MANIPLE_CENTER={environment.center} gives these {world} workers of "
            f"{environment.launcher} none: {world} separate models would be trained. Unset it, choose a synchronous "
            "rule (bsp), or unset the launcher's variables (RANK and WORLD_SIZE, say) to train alone."
        )


def check_restart(environment: Environment, replicas: Sequence[Replica], collectives: str) -> None:
    """Raise InvalidArgument if a restarted worker would have to join two synchronous models at once."""
    if collectives == "shared" and environment.restarts and any(replica.rule.is_synchronous for replica in replicas):
        raise InvalidArgument(
            f"worker {environment.rank} was started again, but a run that shares 2 models synchronously cannot take "
            "workers back, only one that shares 1. Start the run again with --resume, share both as one module, or "
            "choose an asynchronous rule: --rule easgd."
        )
