"""A gate in a run: one worker sends senseless values now and then while the others train."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("without_numba")

STEPS, FIRST, EVERY = 300, 60, 10

TRAINING = f"""
    import numpy as np, maniple
    worker = maniple.join(own_data=True)
    params, rng = {{"w": np.zeros(50)}}, np.random.default_rng(worker.rank)
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    for step in range(1, {STEPS} + 1):
        params["w"] -= 0.01 * (params["w"] - 1)  # half the gradient of |w - 1|^2, whose minimum is at 1
        if worker.rank == 1 and step >= {FIRST} and step % {EVERY} == 0:
            params["w"] += 1e6 * rng.standard_normal(50)
        replica.step()
"""


@pytest.mark.parametrize("gate", [(), ("--gate", "refuse"), ("--gate", "clip")])
def test_senseless_contributions_spoil_a_run_only_without_a_gate(start, gate):
    going = start(TRAINING, "-n", "2", *gate)
    assert going.wait() == 0, going.output
    distance = float(np.abs(going.center["w"] - 1).max())
    bad = (STEPS - FIRST) // EVERY + 1
    counts = [going.events(rank, "progress")[-1].get("gated") for rank in range(2)]
    if not gate:
        assert distance > 100
        assert counts == [None, None]
        return
    assert distance < 0.1
    gated = [[row for row in going.events(rank, "exchange") if "gated" in row] for rank in range(2)]
    assert counts == [len(rows) for rows in gated]
    assert counts[1] >= bad
    by_step = {row["step"]: row for row in gated[1]}
    for step in range(FIRST, STEPS + 1, EVERY):
        assert by_step[step]["gated"] == ["w"]
        assert by_step[step]["factor"] == 0 if "refuse" in gate else 0 < by_step[step]["factor"] < 1e-6
    assert going.events(0, "share")[0]["gate"].startswith(gate[1])
    assert f"gated {counts[1]}" in going.output
