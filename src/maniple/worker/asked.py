"""What was asked for, by the script and by the command line: they agree, or one of them is silent."""

from collections.abc import Sequence
from typing import TypeVar

from maniple.center import Segment
from maniple.contracts import Circle
from maniple.errors import Conflict, InvalidArgument, say
from maniple.pace import Every, Pace, parse_pace
from maniple.place import Place
from maniple.record import Events
from maniple.rules import EASGD, Rule, parse_rule
from maniple.worker.replica import Replica

T = TypeVar("T")


def settle(place: Place, rule: Rule | None, pace: Pace | None, wire: str | None) -> tuple[Rule, Pace, str]:
    """The rule, the pace and the wire of a model that is to be shared."""
    if rule is not None and not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"rule={rule!r} is no rule. Write for instance rule=maniple.EASGD().")
    rule = _agreed("rule", rule, parse_rule(place.rule) if place.rule else None, EASGD())
    pace = _agreed("pace", pace, parse_pace(place.pace) if place.pace else None, Every(rule.every))
    wire = _agreed("wire", wire, place.wire, "float32")
    if wire != "float32":
        from maniple.wire.codecs import codec

        codec(wire)  # says which there are, before anything is shared
    return rule, pace, wire


def check_rule_and_pace(rule: Rule, pace: Pace) -> None:
    """Raise Conflict if a rule cannot be followed at this pace; launchers ask before they start workers."""
    if rule.meets == "gradients" and pace != Every(1):
        raise Conflict(
            f"{rule!r} averages gradients at each step, but the pace is {pace!r}. Leave the pace out, or average "
            'parameters: BSP(average="parameters", every=k).'
        )
    if rule.meets == "values" and not isinstance(pace, Every):
        raise Conflict(f"{rule!r} needs all workers at the same step, but {pace!r} is each worker's own. Use Every(k).")


def check_pace(rule: Rule, pace: Pace, circle: Circle, wire: str) -> None:
    """Raise Conflict or InvalidArgument if a rule of the circle cannot be followed at this pace, or in this circle."""
    check_rule_and_pace(rule, pace)
    if rule.quorum > 0 and circle.name not in {"shared", "alone"}:
        raise InvalidArgument(
            f"{rule!r} goes on without those who are late, which only the circle in shared memory can (this one is "
            f"{circle.name}). Use --circle shared, or BSP()."
        )
    if rule.quorum > 0 and rule.norm == "synchronised":
        raise InvalidArgument(
            f'{rule!r}: norm="synchronised" waits for all workers in each layer, so nobody is ever late. Use BSP().'
        )
    if rule.quorum > 0 and wire != "float32":
        raise InvalidArgument(f"{rule!r} works on values as they are, not in {wire}. Leave --wire out, or use BSP().")


def check_center(place: Place, rule: Rule) -> None:
    """Raise InvalidArgument where workers of another launcher would each get a center of their own."""
    if rule.meets == "center" and place.is_guest and place.center == "none":
        raise InvalidArgument(
            f"{rule!r} needs a center, and these {place.world} workers of {place.launcher} were told to have none "
            f"(MANIPLE_CENTER={place.center}): {place.world} separate models would be trained. Unset it, choose a rule "
            "of the circle, or unset the launcher's variables (RANK and WORLD_SIZE, say) to train alone."
        )


def check_return(place: Place, replicas: Sequence[Replica], circle: str) -> None:
    """Raise InvalidArgument if a worker that was started again would have to enter two circles at once."""
    if circle == "shared" and place.restarts and any(replica.rule.meets != "center" for replica in replicas):
        raise InvalidArgument(
            f"worker {place.rank} was started again, but a run that shares 2 models in the circle cannot take workers "
            "back, only one that shares 1. Start the run again with --resume, or share both as one module."
        )


def is_in_step(place: Place, replicas: Sequence[Replica]) -> bool:
    """All workers make the same number of steps: by the rules of what they share, or that of the command line."""
    rules = [replica.rule for replica in replicas] or [parse_rule(place.rule or "easgd")]
    return any(rule.meets != "center" for rule in rules)


def tell_undivided(place: Place, events: Events) -> None:
    """A model that several workers share makes its first step, and nothing divides the data among them: warn once.

    Of workers that were started together the first one does; one that has joined by itself has its own terminal.
    """
    is_by_itself = not place.launcher and place.rank > 0
    if (place.rank == 0 and place.world > 1) or is_by_itself:
        events.write("undivided")
        workers = f"{place.world} workers train" if place.world > 1 else "several workers train"
        say(
            f"warning: {workers}, and nothing divides the data among them: all may train on the same batches. Instead "
            "of shuffle=True, use `DataLoader(train, batch_size=..., sampler=worker.sampler(train))`, or a feed. If "
            "each worker has data of its own, write maniple.join(own_data=True)."
        )


def tell_unshared(place: Place, segment: Segment | None) -> None:
    """A worker has come to its end and has shared nothing: say so where no launcher of maniple's will."""
    is_ours = place.launcher == "maniple" or place.is_queued or place.is_alone
    is_first = place.rank == 0 or not place.launcher
    if not is_ours and is_first and not (segment is not None and segment.centers()):
        say(f"warning: {unshared('this worker has')}")


def unshared(who: str) -> str:
    """What to tell a person whose script calls join() and then trains by itself."""
    return (
        f"{who} ended without sharing a model: each worker trained its own, and there is no center. Add `replica = "
        "worker.share(model, optimizer)` after `worker = maniple.join()`."
    )


def _agreed(what: str, script: T | None, command_line: T | None, default: T) -> T:
    """The one that was given, by the script or the command line; both and different is an error."""
    if script is not None and command_line is not None and script != command_line:
        raise Conflict(
            f"the script asks for the {what} {script!r}, the command line for {command_line!r}. "
            f"Leave one of them out: `{what}=` in share(), or the option of the command."
        )
    if script is not None:
        return script
    return default if command_line is None else command_line
