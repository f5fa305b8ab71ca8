"""The memory of a gate, in a file beside its center: the last norms of each chunk, which all workers compare with.

    0       what the workers have agreed on (UTF-8, up to the first 0)
    4096    for each chunk: how many norms came so far (int64), and a ring of the last ones (float64)

A chunk's norms are written under its lock. The file lives as long as the segment, so a restarted host continues with
it. Snapshots contain the gate, and not the norms: after a restore it begins with none.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maniple.center.gate import Gate, Verdict, apply_operation, norm_of, parse_gate, weighed
from maniple.contracts import Array, ExchangeInfo, Exchanger, Operation, State
from maniple.errors import Conflict, InvalidArgument
from maniple.memory.segment import GATE_KEPT, GATED, UNDECIDED, UNGATED, CenterFile
from maniple.memory.shm import map_file
from maniple.rules.rule import Rule, is_operation_known

if TYPE_CHECKING:
    from maniple.center.staging import Intent

Exchange = Callable[[Array, Array, State, ExchangeInfo], Array | None]

_PAGE = 4096
_VALUES, _CHANGES = "values", "changes"
_JUDGED = ("elastic", "blend", "nesterov")  # a push replaces the center on purpose


def check_gate(gate: Gate | None, rule: Rule, *, lock: bool) -> None:
    """Raise Conflict if a gate cannot judge the contributions of this rule."""
    if gate is None:
        return
    if not lock:
        raise Conflict(
            f"{gate!r} compares each contribution with the ones before, which needs the lock of the center, but "
            "share() was given lock=False. Leave one of them out."
        )
    if rule.is_synchronous or not is_operation_known(type(rule)) or rule.operation(ExchangeInfo()) is None:
        why = "exchanges by collectives" if rule.is_synchronous else "computes exchanges that the host does not know"
        raise Conflict(
            f"{gate!r} judges what each worker sends to the center, but {rule!r} {why}. Use easgd, asgd or downpour, "
            "or leave the gate out."
        )


def agreement_on(gate: Gate | None, rule: Rule) -> str:
    """What all workers of a center must agree on: the gate, and what it judges; "" without a gate."""
    operation = None if gate is None else rule.operation(ExchangeInfo())
    return "" if operation is None else f"{_CHANGES if operation.is_change else _VALUES} {gate}"


def gate_bytes(agreement: str, chunks: int) -> int:
    """The size of the file; 0 without a gate."""
    return _PAGE + 8 * (1 + _parse(agreement)[1].window) * chunks if agreement else 0


class GateMemory:
    """The gate of one center, with the norms that it has seen."""

    def __init__(self, center: Path, chunks: int) -> None:
        memory, self.agreement = map_file(_path(center)), _agreement_in(center)
        self.is_change, self.gate = _parse(self.agreement)
        rows = np.frombuffer(memory, np.int64, chunks * (1 + self.gate.window), _PAGE).reshape(chunks, -1)
        self._counts, self._norms = rows[:, 0], rows[:, 1:].view(np.float64)

    @staticmethod
    def is_agreed_on(center: CenterFile) -> bool:
        """Whether the workers of this center have a gate."""
        return center.gated in {GATED, GATE_KEPT}

    @staticmethod
    def agree(center: CenterFile, path: Path, agreement: str) -> None:
        """Compare with what the first worker has brought; be the first if none was. The creation lock is held."""
        known = _agreement_in(path) if GateMemory.is_agreed_on(center) else ""
        if center.gated in {UNDECIDED, GATE_KEPT}:
            if known != agreement:
                _path(path).unlink(missing_ok=True)  # processes that have mapped it go on with the other one
            if agreement and known != agreement:
                is_change, gate = _parse(agreement)  # a text of a remote worker
                agreement = f"{_CHANGES if is_change else _VALUES} {gate}"
                memory = map_file(_path(path), gate_bytes(agreement, len(center.layout.chunks)), what="a gate")
                memory[: len(agreement)] = agreement.encode()
            center.gated = GATED if agreement else UNGATED
        elif known != agreement:
            raise InvalidArgument(
                f"this worker brings {_described(agreement)}, but the center was opened with {_described(known)}. All "
                "workers of a run need the same gate: set it once, by --gate of the launcher or in the script."
            )

    def norms(self, k: int) -> Array:
        """The last norms of chunk k."""
        return self._norms[k, : int(self._counts[k])]

    def exchange(
        self,
        k: int,
        pieces: Sequence[tuple[slice, Array]],
        c: Array,
        state: State,
        *,
        rule: Exchanger,
        moment: ExchangeInfo,
    ) -> tuple[Exchange, Verdict]:
        """What is called instead of `rule.exchange` on the replica's pieces of chunk k, and why."""
        operation = rule.operation(moment)
        assert operation is not None
        old = state["center"] if operation.is_change else c
        made, verdict = self.weigh(k, operation, [(x, old[where]) for where, x in pieces], moment.staleness)
        if made is operation:
            return rule.exchange, verdict

        def exchange(x: Array, c: Array, state: State, moment: ExchangeInfo) -> Array | None:
            return apply_operation(made, x, c, state, moment.staleness)

        return exchange, verdict

    def adjust(self, intent: "Intent", value: Array, c: Array, staleness: int) -> Verdict:
        """Let an intent apply what the gate lets through of a remote worker's `value`, before it is begun."""
        if intent.operation not in _JUDGED:
            return Verdict()
        operation = Operation(intent.operation, intent.a, intent.b, is_change=self.is_change)
        made, verdict = self.weigh(intent.chunk, operation, [(value, None if self.is_change else c)], staleness)
        intent.a, intent.b = made.a, made.b
        if made.share < 1:  # the value is not part of the center yet, so it can be repeated
            value *= value.dtype.type(made.share)
        return verdict

    def weigh(
        self, k: int, operation: Operation, differences: Iterable[tuple[Array, Array | None]], staleness: int
    ) -> tuple[Operation, Verdict]:
        """What is done instead of `operation` on chunk k, whose lock is held, and why.

        The norm counts from now on, and twice if a kill interrupts the exchange, which is then sent again.
        """
        norm = norm_of(differences) if self.gate.judges_norms else 0.0
        verdict = self.gate.judge(self.norms(k), norm, staleness)
        count = int(self._counts[k])
        self._norms[k, count % self.gate.window] = verdict.norm
        self._counts[k] = count + 1
        return operation if verdict.share == 1 else weighed(operation, verdict.share), verdict


def _path(center: Path) -> Path:
    return center.with_name(f"gate-{center.name}")


def _agreement_in(center: Path) -> str:
    return bytes(map_file(_path(center))[:_PAGE]).partition(b"\0")[0].decode()


def _parse(agreement: str) -> tuple[bool, Gate]:
    judged, _, gate = agreement.partition(" ")
    return judged == _CHANGES, parse_gate(gate)


def _described(agreement: str) -> str:
    if not agreement:
        return "no gate"
    is_change, gate = _parse(agreement)
    return f"{gate!r} for {_CHANGES if is_change else _VALUES}"
