"""Synchronous rules of a user, as docs/rules.md prints them: real workers compute what one process computes for all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shape.test_docs import blocks

from .conftest import MANIPLE, Run

pytestmark = pytest.mark.usefixtures("without_numba")

RULES = next(
    code
    for code in blocks(Path(__file__).parents[2] / "docs" / "rules.md", "python")
    if "is_synchronous = True" in code
)

# Each worker adds its rank + 1 in each step, and computes the replicas and the state of all workers beside.
SCRIPT = """
    import sys
    from pathlib import Path
    import numpy as np

    class Counting(HalfMean):
        worker_vectors = ("count",)

        def accept(self, x, total, state, moment):
            super().accept(x, total, state, moment)
            state["count"] += 1
            self.count = state["count"][0]

    worker = maniple.join(own_data=True)
    world, file = worker.world, Path(f"state-{worker.rank}.npz")
    before = dict(np.load(file)) if file.exists() else {"count": 0, "momentum": 0.0, "center": 0.0}
    half, outer = {"w": np.zeros(300_000), "b": np.zeros(3)}, {"w": np.zeros(300_000), "b": np.zeros(3)}
    counting = Counting()
    replicas = [worker.share(half, rule=counting, pace=maniple.Every(1)), worker.share(outer, rule=OuterMomentum(1))]
    halves = np.full(world, half["b"][0])  # after --resume all begin with the center
    center, momentum = before["center"], before["momentum"]
    assert outer["w"][0] == center, (outer["w"][0], center)
    for _ in range(5):
        for params, replica in zip((half, outer), replicas):
            for value in params.values():
                value += worker.rank + 1
            replica.step()
        halves += np.arange(1, world + 1)
        halves += (halves.mean() - halves) / 2
        total = (center + np.arange(1, world + 1)).mean()
        momentum = 0.9 * momentum + (total - center)
        center += 0.7 * momentum
        for params, expected in ((half, halves[worker.rank]), (outer, center)):
            for value in params.values():
                assert np.allclose(value, expected, rtol=1e-12), (value, expected)
    assert counting.count == before["count"] + 5
    with replicas[1].center():
        assert np.allclose(outer["w"], center)
    np.savez(file, count=counting.count, momentum=momentum, center=outer["w"][0])
"""


@pytest.mark.parametrize("collectives", ["shared", "torch"])
def test_rules_as_printed_compute_what_one_process_would_and_continue_with_their_state(
    start: Any, tmp_path: Path, collectives: str
):
    script = RULES + "\n" + "\n".join(line.removeprefix("    ") for line in SCRIPT.splitlines())
    first = start(script, "-n", "2", "--collectives", collectives)
    assert first.wait() == 0, first.output
    assert len(list(tmp_path.glob("state-*.npz"))) == 2
    second = Run(tmp_path, first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder)], {})
    assert second.wait() == 0, second.output
    assert [np.load(tmp_path / f"state-{rank}.npz")["count"] for rank in range(2)] == [10, 10]


def test_a_synchronous_rule_without_accept_says_what_is_missing(run: Any):
    script = """
        import numpy as np, maniple

        class Nothing(maniple.Rule):
            is_synchronous = True

        replica = maniple.join(own_data=True).share({"w": np.zeros(3)}, rule=Nothing(), pace=maniple.Every(1))
        replica.step()
    """
    done = run(script, "-n", "1")
    assert done.description["exit_code"] != 0
    assert "Nothing must define accept(self, x, total, state, moment)" in done.log(0)
